"""Text completions (`POST /v1/completions`): prompts that go through no chat template, and how the answer is spelt."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator
from pydantic_core import PydanticCustomError

from insitu.backend.inference.answers import STRICT, Answer, AnswerHead
from insitu.backend.inference.lane import Piece
from insitu.backend.inference.requests import FinishReason, SamplingRequest
from insitu.backend.inference.sampling import TOP_LOGPROBS
from insitu.backend.inference.tokens import ChatTokenizer
from insitu.errors import RequestRefused

MOST_CHOICES = 1024
"""Choices of one request, those of all its prompts together."""
TokenId = Annotated[int, Field(ge=0)]


class TextRequest(SamplingRequest):
    """The body of `POST /v1/completions`."""

    prompt_key: ClassVar[str] = "prompt"

    prompt: Annotated[str | list[TokenId] | list[str] | list[list[TokenId]], Field(union_mode="left_to_right")]
    """A text, or token ids, which are taken as they are; or a list of several prompts, each with choices of its own."""
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS)
    """Natural logarithms of the model's own distribution: of the sampled tokens, and of so many of the likeliest."""
    add_special_tokens: bool | None = True
    """Whether texts get the special tokens that the tokenizer puts around a text, a BOS mostly."""

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _in_one_sentence(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError:
            raise PydanticCustomError("prompt", "should be a text, a list of token ids, or a list of those") from None

    def prompts(self, tokens: ChatTokenizer) -> list[list[int]]:
        several: Sequence[Any] = self.prompt
        if isinstance(self.prompt, str) or not several or isinstance(several[0], int):
            several = [self.prompt]
        if len(several) * (self.n or 1) > MOST_CHOICES:
            raise RequestRefused(
                f"prompt holds {len(several)} prompts, with n {self.n or 1} each; allowed: {MOST_CHOICES} choices",
                param="prompt",
            )
        special = self.add_special_tokens is not False
        return [tokens.text(prompt, special) if isinstance(prompt, str) else prompt for prompt in several]

    def answer(self, prompts: Sequence[list[int]], tokens: ChatTokenizer) -> "TextAnswer":
        return TextAnswer(self, prompts, tokens)

    @property
    def alternatives(self) -> int:
        return self.logprobs or 0


class TextLogprobs(BaseModel):
    """One entry a sampled token; `top_logprobs` has the sampled token too, even where it is none of the likeliest."""

    model_config = STRICT

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(BaseModel):
    """A whole choice, or in a stream what it grew by."""

    model_config = STRICT

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(AnswerHead):
    """The answer to a text completion request, and each event of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class TextAnswer(Answer):
    """The prompt's ids stand in each choice: a request may have several prompts."""

    prefix, kind, event_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: TextRequest, prompts: Sequence[list[int]], tokens: ChatTokenizer) -> None:
        super().__init__(request, prompts, tokens)
        self._request = request
        self._offsets = [0] * len(prompts)

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "finish_reason": piece.finish_reason,
            "logprobs": None if self._request.logprobs is None else self._logprobs(index, piece),
            **self._ids(piece),
        }

    def _grown(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        return self._choice(index, piece)

    def _tell_prompt(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        choice["prompt_token_ids"] = self._prompts[choice["index"]]

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        names = [self._name(token.id) for token in piece.tokens]
        offsets = []
        for token in piece.tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._tokens.piece(token.id)[0])
        top = [
            {self._name(other): logprob for other, logprob in token.top or ()} | {name: token.logprob}
            for name, token in zip(names, piece.tokens, strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in piece.tokens],
            "top_logprobs": top if self._request.alternatives else None,
            "text_offset": offsets,
        }
