"""The keys of completion requests that shape the distribution sampled from, and structured output, as vLLM has them."""

from functools import cached_property
from typing import Annotated, Any, NoReturn, Self, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from insitu.backend.http import StopAtFirstError
from insitu.backend.inference.structured import Grammar, GrammarKind
from insitu.errors import RequestRefused

MAX_BAD_WORDS = 64
"""Per request: each is compared with the completion after every token."""
MAX_LISTED_TOKENS = 1024
"""Entries of logit_bias and of stop_token_ids."""
_MOST_BYTES, _MOST_CHOICES = 2**18, 4096
"""Of a grammar: longer ones take seconds to compile."""
KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""The keys of structured_outputs, one of which a request has."""
_ANY_OBJECT = '{"type": "object"}'

Token = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingParameters(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    top_k: int | None = Field(default=0, ge=-1)
    """Samples among so many of the most likely tokens; 0 and -1: all."""
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    """Samples among the tokens with at least this share of the probability of the most likely one."""
    presence_penalty: Penalty | None = 0.0
    """Subtracted from the logits of tokens that the completion has."""
    frequency_penalty: Penalty | None = 0.0
    """Subtracted from the logits of tokens for each time that the completion has them."""
    repetition_penalty: float | None = Field(default=1.0, ge=0.01, le=100)
    """Divides the positive logits of tokens that prompt or completion have, and multiplies the negative ones."""
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=MAX_LISTED_TOKENS)
    """Added to the logits, by token id."""
    bad_words: Annotated[list[str], StopAtFirstError()] | None = Field(default=None, max_length=MAX_BAD_WORDS)
    """Texts whose tokens are not sampled in a row."""
    stop_token_ids: Annotated[list[Token], StopAtFirstError()] | None = Field(
        default=None, max_length=MAX_LISTED_TOKENS
    )
    """Tokens that end the completion, beside the model's own; not part of its text."""
    response_format: dict[str, Any] | None = None
    """`{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema": ...}}`."""
    structured_outputs: dict[str, Any] | None = None
    """What the completion must match: one of `json` (a schema), `regex`, `choice`, `grammar`, `json_object`."""

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before the division by the temperature."""
        keys = self.repetition_penalty or 1, self.presence_penalty or 0, self.frequency_penalty or 0
        return keys != (1, 0, 0) or bool(self.bad_words or self.logit_bias) or self.grammar is not None

    def shaping_params(self, vocab_size: int, num_ends: int) -> dict[str, Any]:
        """The SamplingParams of these keys. Raises RequestRefused for what the model cannot sample."""
        room = vocab_size - num_ends - 2 * len(words := tuple(self.bad_words or ()))
        if words and room < 1:
            _refuse("bad_words", f"has {len(words)} entries, which may leave none of the {vocab_size} tokens")
        if any(not word.strip() for word in words):
            _refuse("bad_words", "has a word without characters other than spaces")
        stop_token_ids = frozenset(self.stop_token_ids or ())
        _check_token("stop_token_ids", max(stop_token_ids, default=0), vocab_size)
        return {
            "top_k": max(self.top_k or 0, 0),
            "min_p": self.min_p or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "repetition_penalty": 1.0 if self.repetition_penalty is None else self.repetition_penalty,
            "logit_bias": tuple(self._biases(vocab_size)),
            "bad_words": words,
            "stop_token_ids": stop_token_ids,
            "grammar": self.grammar,
        }

    def _biases(self, vocab_size: int) -> list[tuple[int, float]]:
        biases: dict[int, float] = {}
        for key, bias in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdecimal()) or len(key) > len(str(vocab_size)):
                _refuse("logit_bias", f"has the key {key!r:.80}; allowed: ids of tokens below {vocab_size}")
            _check_token("logit_bias", int(key), vocab_size)
            biases[int(key)] = bias
        return [*biases.items()]

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the completion must match. Raises RequestRefused if that is not clear."""
        by_format, by_key = _of_response_format(self.response_format), _of_structured_outputs(self.structured_outputs)
        if by_format is not None and by_key is not None:
            _refuse("structured_outputs", "and response_format exclude each other")
        return by_format or by_key


class RowShaping(SamplingParameters):
    """The `shaping` of a TrainingRow."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="after")
    def _can_be_added(self) -> Self:
        for key in ("top_k", "min_p", "repetition_penalty", "stop_token_ids"):
            if key in self.model_fields_set:
                raise PydanticCustomError("shaping", "{key} does not add to logits", {"key": key})
        return self


def _of_response_format(value: dict[str, Any] | None) -> Grammar | None:
    key, kind = "response_format", (value or {"type": "text"}).get("type")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json", _ANY_OBJECT, key)
    if kind != "json_schema":
        _refuse(key, f"is of type {kind!r:.80}; allowed: text, json_object, json_schema")
    schema = value.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict | bool):
        _refuse(key, "has no json_schema.schema, which is an object or a boolean")
    return Grammar("json", _text(key, schema["schema"]), key)


def _of_structured_outputs(value: dict[str, Any] | None) -> Grammar | None:
    key, chosen = "structured_outputs", {k: v for k, v in (value or {}).items() if v is not None and v is not False}
    if not chosen:
        return None
    if unknown := [*chosen.keys() - {*KINDS}]:
        _refuse(key, f"has the key {unknown[0]!r:.80}; allowed: {', '.join(KINDS)}")
    if len(chosen) > 1:
        _refuse(key, f"has the keys {', '.join(chosen)}; allowed: one of them")
    ((kind, content),) = chosen.items()
    if kind == "json_object":
        return Grammar("json", _ANY_OBJECT, key)
    if kind == "json" and isinstance(content, dict | bool):
        return Grammar("json", _text(key, content), key)
    if kind == "choice":
        if not isinstance(content, list) or not content or not all(isinstance(text, str) and text for text in content):
            _refuse(key, "has a choice that is not a list of texts")
        if len(content) > _MOST_CHOICES:
            _refuse(key, f"has {len(content)} choices; allowed: {_MOST_CHOICES}")
        return Grammar("choice", _text(key, content), key)
    if not isinstance(content, str) or not content:
        _refuse(key, f"has a {kind} of type {type(content).__name__}; allowed: a text")
    return Grammar(cast(GrammarKind, kind), _text(key, content, as_it_is=True), key)


def _text(key: str, content: Any, *, as_it_is: bool = False) -> str:
    """What is compiled, as JSON or as it is. Raises RequestRefused if it is too long or cannot be JSON."""
    try:
        data = content.encode() if as_it_is else orjson.dumps(content)
    except (TypeError, ValueError) as error:  # integers above 64 bits, deep nesting, half of a character
        _refuse(key, f"cannot be read: {error}")
    if len(data) > _MOST_BYTES:
        _refuse(key, f"has {len(data)} bytes; allowed: {_MOST_BYTES}")
    return str(data, "utf-8")


def _check_token(key: str, token: int, vocab_size: int) -> None:
    if token >= vocab_size:
        _refuse(key, f"has the token {token}; the vocabulary ends at {vocab_size - 1}")


def _refuse(key: str, problem: str) -> NoReturn:
    raise RequestRefused(f"{key} {problem}", param=key)
