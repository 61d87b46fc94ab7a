"""What answers have in common, of chats and of texts alike: OpenAI's spelling, what vLLM adds, and the version."""

import secrets
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from insitu.backend.inference.lane import Piece
from insitu.backend.inference.requests import SamplingRequest
from insitu.backend.inference.tokens import ChatTokenizer

STRICT = ConfigDict(extra="forbid")


class Usage(BaseModel):
    model_config = STRICT

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerHead(BaseModel):
    """All of an answer, or of one event of it, but its choices."""

    model_config = STRICT

    id: str
    created: int
    model: str
    policy_version: int
    usage: Usage | None = None


class Answer:
    """Spells the answer to one request. Plain dicts: they are built for every token of every stream."""

    prefix: ClassVar[str]
    """How ids of this kind of answer begin."""
    kind: ClassVar[str]
    """The `object` of an answer."""
    event_kind: ClassVar[str]
    """The `object` of one event of a stream."""

    def __init__(self, request: SamplingRequest, prompts: Sequence[list[int]], tokens: ChatTokenizer) -> None:
        """`prompts` holds one for each choice."""
        self._asked = request
        self._prompts = prompts
        self._tokens = tokens
        self._base = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }
        self._begun: set[int] = set()
        self._completion_tokens = 0

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def _grown(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        """What a choice grew by."""
        raise NotImplementedError

    def _tell_prompt(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        """Put the ids of the prompt where a choice is told for the first time."""
        raise NotImplementedError

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The body of an answer that is not streamed, from one finished piece a choice."""
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        body: dict[str, Any] = {
            **self._base,
            "object": self.kind,
            "policy_version": pieces[0].version,
            "choices": choices,
            "usage": self._usage(sum(len(piece.tokens) for piece in pieces)),
        }
        if self._asked.return_token_ids:
            for choice in choices:
                self._tell_prompt(body, choice)
        return body

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The body of one event of a stream."""
        first = index not in self._begun
        self._begun.add(index)
        self._completion_tokens += len(piece.tokens)
        choice = self._grown(index, piece, first)
        body = {**self._base, "object": self.event_kind, "policy_version": piece.version, "choices": [choice]}
        if first and self._asked.return_token_ids:
            self._tell_prompt(body, choice)
        return body

    def usage_chunk(self, version: int) -> dict[str, Any]:
        """The last event of a stream whose request asks for its cost."""
        usage = self._usage(self._completion_tokens)
        return {**self._base, "object": self.event_kind, "policy_version": version, "choices": [], "usage": usage}

    def _ids(self, piece: Piece) -> dict[str, Any]:
        return {"token_ids": [token.id for token in piece.tokens]} if self._asked.return_token_ids else {}

    def _name(self, token_id: int) -> str:
        """A token as logprobs name it."""
        return f"token_id:{token_id}" if self._asked.return_tokens_as_token_ids else self._tokens.piece(token_id)[0]

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(map(len, self._prompts[:: self._asked.n or 1]))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
