"""What chat and text completions share (the request, its translation for the sampler, the response), and the latter.

Text completions (`POST /v1/completions`) have prompts without a chat template.
"""

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator
from pydantic_core import PydanticCustomError

from insitu.backend.http import StopAtFirstError
from insitu.backend.inference.sampler import (
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    OutputDelta,
    SamplingParams,
)
from insitu.backend.inference.sampling import choice_seed
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.protocols.openai.parameters import SamplingParameters
from insitu.errors import RequestRefused
from insitu.schemas.episodes import GREEDY_TEMPERATURE
from insitu.wire.http_format import format_token_id
from insitu.wire.http_server import parse_json

MAX_STOP_STRINGS = 64
"""Per request: every stop string is searched after every token, in the thread that samples for all requests."""
IGNORED_KEYS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
}
"""Keys without influence on the completion; accepted and ignored."""
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "suffix": ("",),
    "nvext": ({"extra_fields": ["engine_data"]},),  # ART's clients from 0.5.20 on ask for it, and do without
}
"""Unsupported keys, with the values that have no effect and are therefore accepted."""


MAX_CHOICES = 1024
"""Choices of a request over all its prompts."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], StopAtFirstError()]


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(RequestModel):
    include_usage: bool = False


class SamplingRequest(SamplingParameters, RequestModel):
    """The keys of both kinds of completion request."""

    prompt_key: ClassVar[str]
    """The key that holds the prompt."""
    formatter: ClassVar[type["ResponseFormatter"]]

    model: str
    """`NAME` for the latest weights, `NAME@K` for version K."""
    temperature: float | None = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    n: int | None = Field(default=1, ge=1, le=128)
    """Choices per prompt."""
    seed: int | None = None
    """The same seed, prompt and weights give the same completion; each choice derives its own seed from it."""
    stop: str | Annotated[list[str], StopAtFirstError()] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=0, ge=0)
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    """Whether the text of a completion is without special tokens."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    """Writes tokens in logprobs as `token_id:N`; default: only for models whose clients send completions back."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises RequestRefused, or ValidationError, for what is invalid or not supported."""
        data = parse_json(body)
        if not isinstance(data, dict):
            raise RequestRefused(f"the body is a JSON {type(data).__name__}; expected an object", code="malformed_json")
        request = cls.model_validate(data)
        request.check()
        return request

    def check(self) -> None:
        """Raises RequestRefused for unsupported keys and invalid combinations."""
        for key, value in (self.model_extra or {}).items():
            if key not in IGNORED_KEYS and value is not None and value not in NO_OP_VALUES.get(key, ()):
                allowed = f"; allowed: {NO_OP_VALUES[key][0]!r}, which has no effect" if key in NO_OP_VALUES else ""
                raise RequestRefused(f"{key} is not supported by this server{allowed}", param=key, code="unsupported")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise RequestRefused(f"stop has {len(self.stop)} entries; allowed: {MAX_STOP_STRINGS}", param="stop")
        if self.is_constrained:
            for key in ("min_tokens", "ignore_eos", "bad_words"):
                if getattr(self, key):
                    problem = f"{key} cannot be used with structured output, which decides where the completion ends"
                    raise RequestRefused(f"{problem} and may allow a single token", param=key)

    @property
    def is_constrained(self) -> bool:
        """Whether completions must match a grammar."""
        return self.grammar is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return False

    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        """Token ids of each prompt."""
        raise NotImplementedError

    def enable_token_ids(self) -> None:
        """Adds what training needs to each choice, for models whose completions are sent back by the client."""

    @property
    def token_limit(self) -> int | None:
        """Maximum number of completion tokens; None: up to the model's maximum length."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int:
        raise NotImplementedError

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text that is sampled has special tokens."""
        return self.skip_special_tokens is False

    @property
    def may_be_compact(self) -> bool:
        """Whether the compact form has all that is requested."""
        return bool(self.return_token_ids) and not (self.stream or self.num_top_logprobs)

    def generation_requests(
        self, prompts: Sequence[list[int]], max_length: int, vocab_size: int, num_ends: int
    ) -> list[GenerationRequest]:
        """One request per choice; `max_length` bounds prompt and completion together."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        common: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "stop": tuple(text for text in stop if text),
            "ignore_eos": bool(self.ignore_eos),
            "min_tokens": self.min_tokens or 0,
            "top_logprobs": self.num_top_logprobs,
            "skip_special_tokens": not self.needs_special_tokens,
            **self.shaping_params(vocab_size, num_ends),
        }
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            room = max_length - len(prompt)
            max_tokens = min(self.token_limit or room, room)
            for _ in range(self.n or 1):
                params = SamplingParams(choice_seed(seed, len(requests)), max_tokens, **common)
                requests.append(GenerationRequest(prompt, params))
        return requests


@dataclass
class ResponseFormatter:
    """Formats the response to one request, as plain dicts: they are built for every token of every stream.

    `prompts` holds the prompt of each choice.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    """`object` of the events of a stream."""

    request: Any
    prompts: Sequence[list[int]]
    tokenizer: ChatTokenizer
    says_processed: bool = False
    """Whether to say that log-probabilities include what shapes the logits, as those of the learner do."""
    compact: bool = False
    """Whether the logprobs of a choice are one list, beside the list of its token ids."""
    weights_of: Callable[[int], str | None] = lambda version: None
    """The digest of the weights of a version."""

    def __post_init__(self) -> None:
        self._base = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.request.model,
        }
        self._started: set[int] = set()
        self._completion_tokens = 0

    def _choice(self, index: int, output: OutputDelta) -> dict[str, Any]:
        """A complete choice."""
        raise NotImplementedError

    def _delta_choice(self, index: int, output: OutputDelta, first: bool) -> dict[str, Any]:
        """A choice of a stream's event; by default it has the form of a complete one."""
        return self._choice(index, output)

    def _add_prompt_ids(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        """Adds the prompt's token ids; called once per choice."""
        raise NotImplementedError

    def response(self, outputs: Sequence[OutputDelta]) -> dict[str, Any]:
        """The body of a response without streaming, from one complete output per choice."""
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        body = self._body(self.object, outputs[0].version, choices)
        body["usage"] = self._usage(sum(len(output.tokens) for output in outputs))
        if self.request.return_token_ids:
            body["weights"] = self.weights_of(outputs[0].version)
            for choice in choices:
                self._add_prompt_ids(body, choice)
        return body

    def chunk(self, index: int, output: OutputDelta) -> dict[str, Any]:
        """The body of one event of a stream."""
        first = index not in self._started
        self._started.add(index)
        self._completion_tokens += len(output.tokens)
        choice = self._delta_choice(index, output, first)
        body = self._body(self.chunk_object, output.version, [choice])
        if first and self.request.return_token_ids:
            body["weights"] = self.weights_of(output.version)
            self._add_prompt_ids(body, choice)
        return body

    def usage_chunk(self, version: int) -> dict[str, Any]:
        """The last event of a stream with `include_usage`."""
        return self._body(self.chunk_object, version, []) | {"usage": self._usage(self._completion_tokens)}

    def _body(self, kind: str, version: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._base, "object": kind, "policy_version": version, "choices": choices}

    @staticmethod
    def _end(output: OutputDelta) -> dict[str, Any]:
        """`stop_reason`, as vLLM calls it, only where a stop string or a token of `stop_token_ids` was found."""
        stopped = {} if output.stop_reason is None else {"stop_reason": output.stop_reason}
        return {"finish_reason": output.finish_reason, **stopped}

    def _token_ids(self, output: OutputDelta) -> dict[str, Any]:
        return {"token_ids": output.tokens.ids} if self.request.return_token_ids else {}

    @property
    def _temperature(self) -> dict[str, Any]:
        """What the logits were divided by before the log-probabilities, and whether they were changed before that."""
        requested = self.request.temperature
        divided = requested is not None and requested >= GREEDY_TEMPERATURE
        processed = {"logprobs_processed": True} if self.says_processed and self.request.shapes_logits else {}
        return {"logprobs_temperature": requested if divided else 1.0, **processed}

    def _token_text(self, token_id: int) -> str:
        """A token as it is written in logprobs."""
        if self.request.return_tokens_as_token_ids:
            return format_token_id(token_id)
        return self.tokenizer.decode_token(token_id)[0]

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(map(len, self.prompts[:: self.request.n or 1]))
        total = prompt_tokens + completion_tokens
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


class TextFormatter(ResponseFormatter):
    """The prompt's token ids are in each choice: a request may have several prompts."""

    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, output: OutputDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": output.text,
            **self._end(output),
            "logprobs": None if self.request.logprobs is None else self._logprobs(index, output),
            **self._token_ids(output),
            **({} if self.request.logprobs is None else self._temperature),
        }

    def _add_prompt_ids(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        choice["prompt_token_ids"] = self.prompts[choice["index"]]

    def _logprobs(self, index: int, output: OutputDelta) -> dict[str, Any]:
        if self.compact:
            return {"token_logprobs": output.tokens.logprobs}
        texts = [self._token_text(token.id) for token in output.tokens]
        ids = output.tokens.ids
        lengths = [len(self.tokenizer.decode_token(token_id)[0]) for token_id in ids]
        if ids and index not in self._offsets:  # some decoders drop the space that a text starts with
            lengths[0] = len(self.tokenizer.decode(ids[:1], skip_special_tokens=False))
        *offsets, end = itertools.accumulate(lengths, initial=self._offsets.get(index, 0))
        if ids:
            self._offsets[index] = end
        top = [
            {self._token_text(other): logprob for other, logprob in token.top or ()} | {text: token.logprob}
            for text, token in zip(texts, output.tokens, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": output.tokens.logprobs,
            "top_logprobs": top if self.request.num_top_logprobs else None,
            "text_offset": offsets,
        }


class TextRequest(SamplingRequest):
    """The body of `POST /v1/completions`."""

    prompt_key: ClassVar[str] = "prompt"
    formatter = TextFormatter

    prompt: Annotated[
        str | TokenIds | Annotated[list[str], StopAtFirstError()] | Annotated[list[TokenIds], StopAtFirstError()],
        Field(union_mode="left_to_right"),
    ]
    """A text or token ids, or a list of several prompts, each with its own choices."""
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Natural log-probabilities of the sampled tokens and of this many of the most likely tokens."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=0)
    """0: also the log-probabilities of the prompt's own tokens, as in vLLM; without `stream`."""
    add_special_tokens: bool | None = True
    """Whether the tokenizer adds its special tokens (usually BOS) to texts."""

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_error_for_all_types(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError:
            raise PydanticCustomError("prompt", "should be a text, a list of token ids, or a list of those") from None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None

    def check(self) -> None:
        super().check()
        if self.wants_prompt_logprobs and self.stream:
            raise RequestRefused("prompt_logprobs cannot be streamed; omit stream", param="prompt_logprobs")

    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        several: Sequence[Any] = self.prompt
        if isinstance(self.prompt, str) or not several or isinstance(several[0], int):
            several = [self.prompt]
        if len(several) * (self.n or 1) > MAX_CHOICES:
            problem = f"prompt holds {len(several)} prompts, with n {self.n or 1} each; allowed: {MAX_CHOICES} choices"
            raise RequestRefused(problem, param="prompt")
        special = self.add_special_tokens is not False
        return [tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in several]

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0
