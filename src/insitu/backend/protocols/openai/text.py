"""Text completions (`POST /v1/completions`): prompts without a chat template, and the response."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator
from pydantic_core import PydanticCustomError

from insitu.backend.http import StopAtFirstError
from insitu.backend.inference.sampler import MAX_TOP_LOGPROBS, OutputDelta
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.protocols.openai.base import ResponseFormatter, SamplingRequest
from insitu.errors import RequestRefused

MAX_CHOICES = 1024
"""Choices of a request over all its prompts."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], StopAtFirstError()]


class TextFormatter(ResponseFormatter):
    """The prompt's token ids are in each choice: a request may have several prompts."""

    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._offsets = [0] * len(self._prompts)

    def _choice(self, index: int, output: OutputDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": output.text,
            "finish_reason": output.finish_reason,
            "logprobs": None if self._request.logprobs is None else self._logprobs(index, output),
            **self._token_ids(output),
        }

    def _delta_choice(self, index: int, output: OutputDelta, first: bool) -> dict[str, Any]:
        return self._choice(index, output)

    def _add_prompt_ids(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        choice["prompt_token_ids"] = self._prompts[choice["index"]]

    def _logprobs(self, index: int, output: OutputDelta) -> dict[str, Any]:
        texts = [self._token_text(token.id) for token in output.tokens]
        offsets = []
        for token in output.tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._tokenizer.decode_token(token.id)[0])
        top = [
            {self._token_text(other): logprob for other, logprob in token.top or ()} | {text: token.logprob}
            for text, token in zip(texts, output.tokens, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in output.tokens],
            "top_logprobs": top if self._request.num_top_logprobs else None,
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
