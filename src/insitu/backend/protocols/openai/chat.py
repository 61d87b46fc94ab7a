"""Chat completions: the request, its prompt through the chat template, tool calls, and the response."""

import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field, PrivateAttr

from insitu.backend.http import StopAtFirstError
from insitu.backend.inference.sampler import MAX_TOP_LOGPROBS, OutputDelta, SampledToken
from insitu.backend.inference.tokenizer import ChatTokenizer, overlap
from insitu.backend.protocols.openai.text import RequestModel, ResponseFormatter, SamplingRequest
from insitu.errors import RequestRefused

TOOL_CALL_START = "<tool_call>"
_TOOL_CALL = re.compile(rf"{TOOL_CALL_START}(.*?)(?:</tool_call>|\Z)", re.DOTALL)


Objects = Annotated[list[dict[str, Any]], StopAtFirstError()]


class Message(RequestModel):
    """One message; further keys are passed to the chat template."""

    role: str
    content: str | Objects | None = None
    tool_calls: Objects | None = None


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content as text, arguments of tool calls as objects."""
    formatted = []
    for index, message in enumerate(messages):
        keys = {"role": message.role, "content": _text(message.content, index), **(message.model_extra or {})}
        if message.tool_calls:
            keys["tool_calls"] = [_template_tool_call(call) for call in message.tool_calls]
        formatted.append(keys)
    return formatted


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if isinstance(content, str):
        return content
    for part in content or []:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            key = f"messages.{index}.content"
            problem = f"{key} has a part of type {part.get('type')!r}; only text is supported"
            raise RequestRefused(problem, param=key, code="unsupported")
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


def split_tool_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """The content before the first tool call, and the calls.

    Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If one call cannot
    be parsed, the entire text is content: sampled text is never dropped.
    """
    calls = []
    for match in _TOOL_CALL.finditer(text):
        call = _parse_tool_call(match.group(1))
        if call is None:
            return text, []
        calls.append(call)
    return (text[: text.index(TOOL_CALL_START)].rstrip() or None) if calls else text, calls


def _parse_tool_call(text: str) -> dict[str, Any] | None:
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    arguments = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }


class ChatFormatter(ResponseFormatter):
    """The prompt's token ids appear once, in the body: all choices share the prompt."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._held_text: dict[int, str] = {}
        self._prompt_ids_sent = False

    def _choice(self, index: int, output: OutputDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        finish_reason = output.finish_reason
        if self._request.enabled_tools:
            message["content"], calls = split_tool_calls(output.text)
            if calls:
                message["tool_calls"], finish_reason = calls, _tool_finish_reason(finish_reason)
        choice = {"index": index, "message": message, "finish_reason": finish_reason, **self._token_fields(output)}
        if self._request._prompt_ids_in_choices:
            choice["prompt_token_ids"] = self._prompts[index]
        return choice

    def _delta_choice(self, index: int, output: OutputDelta, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        finish_reason = self._fill_delta(index, output, delta)
        return {"index": index, "delta": delta, "finish_reason": finish_reason, **self._token_fields(output)}

    def _add_prompt_ids(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        if not self._prompt_ids_sent:
            self._prompt_ids_sent, body["prompt_token_ids"] = True, self._prompts[0]

    def _fill_delta(self, index: int, output: OutputDelta, delta: dict[str, Any]) -> str | None:
        """Adds the text to `delta`, holding back what may be a tool call; returns the finish reason."""
        if not self._request.enabled_tools:
            delta["content"] = output.text
            return output.finish_reason
        text = self._held_text.pop(index, "") + output.text
        if output.finish_reason is not None:
            delta["content"], calls = split_tool_calls(text)
            if calls:
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
                return _tool_finish_reason(output.finish_reason)
            return output.finish_reason
        at = _tool_call_position(text)
        delta["content"], self._held_text[index] = text[:at], text[at:]
        return None

    def _token_fields(self, output: OutputDelta) -> dict[str, Any]:
        if not self._request.logprobs:
            return {"logprobs": None, **self._token_ids(output)}
        logprobs = self._compact_logprobs(output) if self.compact else self._logprobs(output)
        return {"logprobs": logprobs, **self._token_ids(output), **self._temperature}

    def _logprobs(self, output: OutputDelta) -> dict[str, Any]:
        return {"content": [self._token_logprob(token) for token in output.tokens], "refusal": None}

    def _token_logprob(self, token: SampledToken) -> dict[str, Any]:
        top = [self._logprob(*alternative) for alternative in token.top or []]
        return {**self._logprob(token.id, token.logprob), "top_logprobs": top}

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        text_bytes = self._tokenizer.decode_token(token_id)[1]
        return {"token": self._token_text(token_id), "logprob": logprob, "bytes": text_bytes}


def _tool_finish_reason(finish_reason: str | None) -> str | None:
    """A message with tool calls that was cut off keeps `length`."""
    return "tool_calls" if finish_reason == "stop" else finish_reason


def _tool_call_position(text: str) -> int:
    """Where a tool call starts, or may start at the end of `text`, including whitespace before it."""
    start = text.find(TOOL_CALL_START)
    return len(text[: start if start >= 0 else len(text) - overlap(text, TOOL_CALL_START)].rstrip())


class ChatRequest(SamplingRequest):
    """The body of `POST /v1/chat/completions`."""

    prompt_key: ClassVar[str] = "messages"
    formatter = ChatFormatter

    messages: Annotated[list[Message], StopAtFirstError()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    """Natural log-probabilities after temperature: `logprobs_temperature` of the choice, 1 where it is greedy."""
    top_logprobs: int | None = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    _prompt_ids_in_choices: bool = PrivateAttr(default=False)
    """Clients that keep only the choices would lose them in the body."""

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestRefused("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.tool_choice not in (None, "auto", "none"):
            raise RequestRefused("tool_choice must be auto or none", param="tool_choice", code="unsupported")

    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        messages = template_messages(self.messages)
        return [tokenizer.render_prompt(messages, self.enabled_tools, self.chat_template_kwargs)]

    def enable_token_ids(self) -> None:
        self.logprobs = self._prompt_ids_in_choices = True
        if self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = True

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else 0

    @property
    def enabled_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None
