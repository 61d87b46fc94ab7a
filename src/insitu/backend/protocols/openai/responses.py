"""Response formatting shared by chat and text completions: OpenAI's format, vLLM's token ids, the policy version."""

import secrets
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from insitu.backend.inference.scheduler import OutputDelta
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.protocols.openai.requests import SamplingRequest
from insitu.http_format import format_token_id


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ResponseBase(ResponseModel):
    """A response, or an event of one, without its choices."""

    id: str
    created: int
    model: str
    policy_version: int
    usage: Usage | None = None


class ResponseFormatter:
    """Formats the response to one request, as plain dicts: they are built for every token of every stream."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    """`object` of the events of a stream."""

    def __init__(self, request: SamplingRequest, prompts: Sequence[list[int]], tokenizer: ChatTokenizer) -> None:
        """`prompts` holds the prompt of each choice."""
        self._options = request
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._base = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }
        self._started: set[int] = set()
        self._completion_tokens = 0

    def _choice(self, index: int, output: OutputDelta) -> dict[str, Any]:
        """A complete choice."""
        raise NotImplementedError

    def _delta_choice(self, index: int, output: OutputDelta, first: bool) -> dict[str, Any]:
        """A choice of a stream's event."""
        raise NotImplementedError

    def _add_prompt_ids(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        """Adds the prompt's token ids; called once per choice."""
        raise NotImplementedError

    def response(self, outputs: Sequence[OutputDelta]) -> dict[str, Any]:
        """The body of a response without streaming, from one complete output per choice."""
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        body: dict[str, Any] = {
            **self._base,
            "object": self.object,
            "policy_version": outputs[0].version,
            "choices": choices,
            "usage": self._usage(sum(len(output.tokens) for output in outputs)),
        }
        if self._options.return_token_ids:
            for choice in choices:
                self._add_prompt_ids(body, choice)
        return body

    def chunk(self, index: int, output: OutputDelta) -> dict[str, Any]:
        """The body of one event of a stream."""
        first = index not in self._started
        self._started.add(index)
        self._completion_tokens += len(output.tokens)
        choice = self._delta_choice(index, output, first)
        body = {**self._base, "object": self.chunk_object, "policy_version": output.version, "choices": [choice]}
        if first and self._options.return_token_ids:
            self._add_prompt_ids(body, choice)
        return body

    def usage_chunk(self, version: int) -> dict[str, Any]:
        """The last event of a stream with `include_usage`."""
        usage = self._usage(self._completion_tokens)
        return {**self._base, "object": self.chunk_object, "policy_version": version, "choices": [], "usage": usage}

    def _token_ids(self, output: OutputDelta) -> dict[str, Any]:
        return {"token_ids": [token.id for token in output.tokens]} if self._options.return_token_ids else {}

    def _token_text(self, token_id: int) -> str:
        """A token as it is written in logprobs."""
        if self._options.return_tokens_as_token_ids:
            return format_token_id(token_id)
        return self._tokenizer.decode_token(token_id)[0]

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(map(len, self._prompts[:: self._options.n or 1]))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
