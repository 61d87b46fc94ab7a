"""Chat completions: what a request may say, how its messages become a prompt, and how the answer is spelt."""

from collections.abc import Sequence
from typing import Any, ClassVar

import orjson
from pydantic import BaseModel, Field, PrivateAttr

from insitu.backend.inference.answers import STRICT, Answer, AnswerHead
from insitu.backend.inference.lane import Piece, Token
from insitu.backend.inference.requests import LENIENT, FinishReason, SamplingRequest
from insitu.backend.inference.sampling import TOP_LOGPROBS
from insitu.backend.inference.tokens import ChatTokenizer
from insitu.backend.inference.toolcalls import OPENING, split_tool_calls
from insitu.errors import RequestRefused


class Message(BaseModel):
    """One message; further keys reach the chat template as they are."""

    model_config = LENIENT

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatRequest(SamplingRequest):
    """The body of `POST /v1/chat/completions`."""

    prompt_key: ClassVar[str] = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    """Natural logarithms of the model's own distribution, before temperature and top_p."""
    top_logprobs: int | None = Field(default=0, ge=0, le=TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    _taken_back: bool = PrivateAttr(default=False)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestRefused("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.tool_choice not in (None, "auto", "none"):
            raise RequestRefused("tool_choice can be auto or none here", param="tool_choice", code="unsupported")

    def prompts(self, tokens: ChatTokenizer) -> list[list[int]]:
        return [tokens.prompt(template_messages(self.messages), self.usable_tools, self.chat_template_kwargs)]

    def answer(self, prompts: Sequence[list[int]], tokens: ChatTokenizer) -> "ChatAnswer":
        return ChatAnswer(self, prompts, tokens)

    def ask_for_ids(self) -> None:
        self.logprobs = self._taken_back = True
        if self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = True

    @property
    def choices_carry_prompt(self) -> bool:
        """Whether each choice has `prompt_token_ids`, which survive where a client keeps choices alone."""
        return self._taken_back

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else 0

    @property
    def usable_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content as text, the arguments of tool calls as objects."""
    return [_template_message(message, number) for number, message in enumerate(messages)]


def _template_message(message: Message, number: int) -> dict[str, Any]:
    plain = {"role": message.role, "content": _text(message.content, number), **(message.model_extra or {})}
    if message.tool_calls:
        plain["tool_calls"] = [_template_tool_call(call) for call in message.tool_calls]
    return plain


def _text(content: str | list[dict[str, Any]] | None, number: int) -> str:
    if isinstance(content, str):
        return content
    for part in content or []:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestRefused(
                f"messages.{number}.content has a part of type {part.get('type')!r}; only text is supported",
                param=f"messages.{number}.content",
                code="unsupported",
            )
    return "".join(part["text"] for part in content or [])


def _template_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or b"{}")
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class TopLogprob(BaseModel):
    model_config = STRICT

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    model_config = STRICT

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    model_config = STRICT

    name: str
    arguments: str


class ToolCall(BaseModel):
    model_config = STRICT

    id: str
    type: str
    function: FunctionCall
    index: int | None = None


class AnswerMessage(BaseModel):
    """A whole message, or in a chunk what it grew by."""

    model_config = STRICT

    role: str | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class Choice(BaseModel):
    model_config = STRICT

    index: int
    message: AnswerMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChunkChoice(BaseModel):
    model_config = STRICT

    index: int
    delta: AnswerMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None


class ChatCompletion(AnswerHead):
    """The answer to a chat completion request."""

    object: str = "chat.completion"
    prompt_token_ids: list[int] | None = None
    choices: list[Choice]


class ChatCompletionChunk(AnswerHead):
    """One event of a streamed answer."""

    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | None = None
    choices: list[ChunkChoice]


class ChatAnswer(Answer):
    """The prompt's ids stand once in the body: all choices have the same prompt."""

    prefix, kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, prompts: Sequence[list[int]], tokens: ChatTokenizer) -> None:
        super().__init__(request, prompts, tokens)
        self._request = request
        self._held: dict[int, str] = {}
        self._prompt_told = False

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        finish_reason = piece.finish_reason
        if self._request.usable_tools:
            message["content"], calls = split_tool_calls(piece.text)
            if calls:
                message["tool_calls"], finish_reason = calls, _with_calls(finish_reason)
        choice = {"index": index, "message": message, "finish_reason": finish_reason, **self._sampled(piece)}
        if self._request.choices_carry_prompt:
            choice["prompt_token_ids"] = self._prompts[index]
        return choice

    def _grown(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        finish_reason = self._grow(index, piece, delta)
        return {"index": index, "delta": delta, "finish_reason": finish_reason, **self._sampled(piece)}

    def _tell_prompt(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        if not self._prompt_told:
            self._prompt_told, body["prompt_token_ids"] = True, self._prompts[0]

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

    def _sampled(self, piece: Piece) -> dict[str, Any]:
        told = [self._logprob(token) for token in piece.tokens] if self._request.logprobs else None
        return {"logprobs": None if told is None else {"content": told, "refusal": None}, **self._ids(piece)}

    def _logprob(self, token: Token) -> dict[str, Any]:
        top = [self._spelt(*alternative) for alternative in token.top or []]
        return {**self._spelt(token.id, token.logprob), "top_logprobs": top}

    def _spelt(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token_id), "logprob": logprob, "bytes": self._tokens.piece(token_id)[1]}


def _with_calls(finish_reason: str | None) -> str | None:
    """A message that ended by itself with calls ended for them; one that was cut off was still cut off."""
    return "tool_calls" if finish_reason == "stop" else finish_reason


def _possible_opening(text: str) -> int:
    """Where a tool call begins in `text`, or may begin with its last characters, white space before it included."""
    longest = range(min(len(text), len(OPENING) - 1), 0, -1)
    begun = len(text) - next((n for n in longest if text.endswith(OPENING[:n])), 0)
    return len(text[: text.find(OPENING) if OPENING in text else begun].rstrip())
