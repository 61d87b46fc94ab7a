"""Chat completions and their chunks, spelt as OpenAI does, with what vLLM adds and the version of the weights."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from insitu.backend.inference.chat import ChatRequest, FinishReason
from insitu.backend.inference.lane import Piece, Token
from insitu.backend.inference.tokens import ChatTokenizer
from insitu.backend.inference.toolcalls import OPENING, split_tool_calls

_STRICT = ConfigDict(extra="forbid")


class TopLogprob(BaseModel):
    model_config = _STRICT

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    model_config = _STRICT

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    model_config = _STRICT

    name: str
    arguments: str


class ToolCall(BaseModel):
    model_config = _STRICT

    id: str
    type: str
    function: FunctionCall
    index: int | None = None


class AnswerMessage(BaseModel):
    """A whole message, or in a chunk what it grew by."""

    model_config = _STRICT

    role: str | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class Choice(BaseModel):
    model_config = _STRICT

    index: int
    message: AnswerMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChunkChoice(BaseModel):
    model_config = _STRICT

    index: int
    delta: AnswerMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None


class Usage(BaseModel):
    model_config = _STRICT

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Answer(BaseModel):
    model_config = _STRICT

    id: str
    created: int
    model: str
    policy_version: int
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


class ChatCompletion(_Answer):
    """The answer to a chat completion request."""

    object: str = "chat.completion"
    choices: list[Choice]


class ChatCompletionChunk(_Answer):
    """One event of a streamed answer."""

    object: str = "chat.completion.chunk"
    choices: list[ChunkChoice]


class Answer:
    """Spells the answer to one request. Plain dicts: they are built for every token of every stream."""

    def __init__(self, request: ChatRequest, prompt: list[int], tokens: ChatTokenizer) -> None:
        self._request = request
        self._prompt = prompt
        self._tokens = tokens
        self._base = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": request.model}
        self._held: dict[int, str] = {}
        self._started: set[int] = set()
        self._completion_tokens = 0

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The body of an answer that is not streamed, from one finished piece a choice."""
        body: dict[str, Any] = {
            **self._base,
            "object": "chat.completion",
            "policy_version": pieces[0].version,
            "choices": [self._choice(index, piece) for index, piece in enumerate(pieces)],
            "usage": self._usage(sum(len(piece.tokens) for piece in pieces)),
        }
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompt
        return body

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The body of one event of a stream."""
        first_of_all, first = not self._started, index not in self._started
        self._started.add(index)
        self._completion_tokens += len(piece.tokens)
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        finish_reason = self._grow(index, piece, delta)
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish_reason}
        self._add_tokens(choice, piece)
        body = {
            **self._base,
            "object": "chat.completion.chunk",
            "policy_version": piece.version,
            "choices": [choice],
        }
        if first_of_all and self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompt
        return body

    def usage_chunk(self, version: int) -> dict[str, Any]:
        """The last event of a stream whose request asks for its cost."""
        usage = self._usage(self._completion_tokens)
        kind = {"object": "chat.completion.chunk", "policy_version": version}
        return {**self._base, **kind, "choices": [], "usage": usage}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        finish_reason = piece.finish_reason
        if self._request.usable_tools:
            message["content"], calls = split_tool_calls(piece.text)
            if calls:
                message["tool_calls"], finish_reason = calls, _with_calls(finish_reason)
        choice = {"index": index, "message": message, "finish_reason": finish_reason, "logprobs": None}
        self._add_tokens(choice, piece)
        if self._request.choices_carry_prompt:
            choice["prompt_token_ids"] = self._prompt
        return choice

    def _grow(self, index: int, piece: Piece, delta: dict[str, Any]) -> str | None:
        """Put the piece's text into `delta`; text that may be a tool call is held back until it is known."""
        if not self._request.usable_tools:
            delta["content"] = piece.text
            return piece.finish_reason
        text = self._held.pop(index, "") + piece.text
        if piece.finish_reason is not None:
            delta["content"], calls = split_tool_calls(text)
            if calls:
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
                return _with_calls(piece.finish_reason)
            return piece.finish_reason
        at = _possible_opening(text)
        delta["content"], self._held[index] = text[:at], text[at:]
        return None

    def _add_tokens(self, choice: dict[str, Any], piece: Piece) -> None:
        if self._request.logprobs:
            choice["logprobs"] = {"content": [self._logprob(token) for token in piece.tokens], "refusal": None}
        if self._request.return_token_ids:
            choice["token_ids"] = [token.id for token in piece.tokens]

    def _logprob(self, token: Token) -> dict[str, Any]:
        top = [self._spelt(*alternative) for alternative in token.top or []]
        return {**self._spelt(token.id, token.logprob), "top_logprobs": top}

    def _spelt(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._tokens.piece(token_id)
        if self._request.return_tokens_as_token_ids:
            text = f"token_id:{token_id}"
        return {"token": text, "logprob": logprob, "bytes": raw}

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = len(self._prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


def _with_calls(finish_reason: str | None) -> str | None:
    """A message that ended by itself with calls ended for them; one that was cut off was still cut off."""
    return "tool_calls" if finish_reason == "stop" else finish_reason


def _possible_opening(text: str) -> int:
    """Where a tool call begins in `text`, or may begin with its last characters, white space before it included."""
    longest = range(min(len(text), len(OPENING) - 1), 0, -1)
    begun = len(text) - next((n for n in longest if text.endswith(OPENING[:n])), 0)
    return len(text[: text.find(OPENING) if OPENING in text else begun].rstrip())
