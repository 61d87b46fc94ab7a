"""Chat completions: the request, its prompt through the chat template, and the message of the response."""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field, PrivateAttr

from insitu.backend.http import StopAtFirstError
from insitu.backend.inference.sampler import MAX_TOP_LOGPROBS, OutputDelta, SampledToken
from insitu.backend.inference.structured import Grammar
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.protocols.openai.bridge import Continuation, bridged_prompt
from insitu.backend.protocols.openai.text import RequestModel, ResponseFormatter, SamplingRequest
from insitu.backend.protocols.openai.tool_choice import ToolChoice
from insitu.errors import RequestRefused
from insitu.formats.parser import (
    MALFORMED,
    MessageFormats,
    Parser,
    Piece,
    forced_grammar,
    format_problem,
    message_parser,
    unknown_format,
)
from insitu.formats.registry import NONE

_PROMPT_END = 512
"""Tokens at the end of a prompt in which the beginning of the message is looked for."""
Objects = Annotated[list[dict[str, Any]], StopAtFirstError()]


class Message(RequestModel):
    """One message; further keys are passed to the chat template."""

    role: str
    content: str | Objects | None = None
    tool_calls: Objects | None = None


def template_messages(messages: Sequence[Message], *, objects: bool = True) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content as text, arguments of tool calls as objects, or as JSON.

    Reasoning has the names that templates read it by.
    """
    formatted = []
    for index, message in enumerate(messages):
        keys = {"role": message.role, "content": _text(message.content, index), **(message.model_extra or {})}
        if reasoning := keys.get("reasoning_content") or keys.get("reasoning"):
            keys |= {"reasoning_content": reasoning, "thinking": reasoning}
        if message.tool_calls:
            keys["tool_calls"] = [_template_tool_call(call) if objects else call for call in message.tool_calls]
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


class ChatFormatter(ResponseFormatter):
    """The prompt's token ids appear once, in the body: all choices share the prompt."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsers: dict[int, Parser] = {}

    def _choice(self, index: int, output: OutputDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        choice = {"index": index, "message": message, **self._outcome(output)}
        if self.request.is_parsed:
            piece = self._parse(index, output)
            message["content"] = piece.content or (None if piece.calls or piece.reasoning else "")
            self._add_parts(choice, message, piece)
        if self.request._prompt_ids_in_choices:
            choice["prompt_token_ids"] = self.prompts[index]
        return choice

    def _delta_choice(self, index: int, output: OutputDelta, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {**({"role": "assistant"} if first else {}), "content": output.text}
        choice = {"index": index, "delta": delta, **self._outcome(output)}
        if self.request.is_parsed:
            piece = self._parse(index, output)
            delta["content"] = piece.content
            calls = tuple({"index": number, **call} for number, call in enumerate(piece.calls))
            self._add_parts(choice, delta, piece._replace(calls=calls))
        return choice

    def _parse(self, index: int, output: OutputDelta) -> Piece:
        """What is final of a message with this text."""
        parser = self._parsers.get(index)
        if parser is None:
            end = _end_of(self.prompts[index], self.tokenizer)
            tools = self.request.enabled_tools or ()
            special = self.tokenizer.special_tokens if self.request.skip_special_tokens is not False else ()
            parser = self._parsers[index] = message_parser(self.request._formats, end, tools, special)
        piece = parser.feed(output.text)
        if output.finish_reason is None:
            return piece
        rest = parser.finish()
        return rest._replace(content=piece.content + rest.content, reasoning=piece.reasoning + rest.reasoning)

    @staticmethod
    def _add_parts(choice: dict[str, Any], message: dict[str, Any], piece: Piece) -> None:
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.malformed:
            choice[MALFORMED] = True
        if piece.calls:
            message["tool_calls"] = list(piece.calls)
            if choice["finish_reason"] == "stop":  # a message with calls that was cut off keeps `length`
                choice["finish_reason"] = "tool_calls"

    def _add_prompt_ids(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        if len(self._started) < 2:  # the first event of a stream, or all choices
            body["prompt_token_ids"] = self.prompts[0]

    def _outcome(self, output: OutputDelta) -> dict[str, Any]:
        fields = {**self._end(output), "logprobs": None, **self._token_ids(output)}
        if not self.request.logprobs:
            return fields
        logprobs = {"token_logprobs": output.tokens.logprobs} if self.compact else self._logprobs(output)
        fields |= {"logprobs": logprobs, **self._temperature}
        forced = self.request.forced if self.says_processed and output.finish_reason is not None else None
        return fields | ({} if forced is None else {"structured_outputs": {forced.kind: forced.text}})

    def _logprobs(self, output: OutputDelta) -> dict[str, Any]:
        return {"content": [self._token_logprob(token) for token in output.tokens], "refusal": None}

    def _token_logprob(self, token: SampledToken) -> dict[str, Any]:
        top = [self._logprob(*alternative) for alternative in token.top or []]
        return {**self._logprob(token.id, token.logprob), "top_logprobs": top}

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        text_bytes = self.tokenizer.decode_token(token_id)[1]
        return {"token": self._token_text(token_id), "logprob": logprob, "bytes": text_bytes}


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
    parallel_tool_calls: bool | None = None
    """Whether `tool_choice: required` may be several calls."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: str | None = None
    """The variable of the chat template that has this name."""
    tool_format: str | None = None
    """How the model writes tool calls, instead of what its chat template says."""
    reasoning_format: str | None = None
    """How the model writes reasoning, instead of what its chat template says."""
    continues: Continuation | None = None
    """What was sampled of the conversation: the prompt begins with these tokens, if the template allows it."""
    _forced: Grammar | None = PrivateAttr(default=None)
    _formats: MessageFormats = PrivateAttr(default=MessageFormats(NONE, NONE))
    """How the model writes the parts of a message; known once the prompt is."""
    _prompt_ids_in_choices: bool = PrivateAttr(default=False)
    """Clients that keep only the choices would lose them in the body."""

    @cached_property
    def choice(self) -> ToolChoice:
        """The tools that the model is offered, and those that it must call. Raises RequestRefused."""
        tools = self.tools or []
        return ToolChoice.of(self.tool_choice, tools) if tools or self.tool_choice is not None else ToolChoice(tools)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestRefused("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.choice.forced and super().grammar is not None:
            raise RequestRefused("tool_choice and structured output exclude each other", param="tool_choice")
        stated = self.tool_format, self.reasoning_format
        if stated != (None, None) and (found := format_problem(*stated)) is not None:
            raise RequestRefused(found[1], param=found[0])

    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        self._formats = tokenizer.formats
        if self.tool_format or self.reasoning_format:
            self._formats = self._formats.replaced(self.tool_format, self.reasoning_format)
        if self.enabled_tools and self._formats.tools is None:
            raise RequestRefused(unknown_format("the model"), param="tools", code="unsupported")
        variables = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        variables |= self.chat_template_kwargs or {}

        def render(messages: Sequence[dict[str, Any]]) -> str:
            return tokenizer.render(messages, self.enabled_tools, variables)

        messages = template_messages(self.messages)
        try:
            text = render(messages)
        except RequestRefused:  # some templates add arguments to text
            if not any(message.tool_calls for message in self.messages):
                raise
            messages = template_messages(self.messages, objects=False)
            text = render(messages)
        bridged = bridged_prompt(self.continues, messages, render, tokenizer) if self.continues is not None else None
        prompt = tokenizer.encode(text, add_special_tokens=False) if bridged is None else bridged
        if self.choice.forced:
            self._forced = self._forced_grammar(tokenizer, prompt)
        return [prompt]

    def _forced_grammar(self, tokenizer: ChatTokenizer, prompt: Sequence[int]) -> Grammar:
        end, several = _end_of(prompt, tokenizer), not self.choice.one and self.parallel_tool_calls is not False
        try:
            text = forced_grammar(self._formats, self.choice.forced, end, tokenizer.markers, several=several)
        except ValueError as error:
            raise RequestRefused(f"tool_choice: {error}", param="tool_choice", code="unsupported") from None
        except (TypeError, AttributeError, RecursionError):  # keywords of other types than JSON schema has, or circles
            raise RequestRefused("tools has parameters that are no JSON schema", param="tools") from None
        return Grammar("grammar", text, "tool_choice")

    @property
    def forced(self) -> Grammar | None:
        """The calls that `tool_choice` forces; known once the prompt is."""
        return self._forced

    @property
    def grammar(self) -> Grammar | None:
        return self._forced or super().grammar

    @property
    def is_constrained(self) -> bool:
        return bool(self.choice.forced) or super().is_constrained

    @property
    def is_parsed(self) -> bool:
        """Whether the text of a completion may be more than content."""
        return bool(self.enabled_tools and self._formats.tools != NONE) or self._formats.reasoning != NONE

    @property
    def needs_special_tokens(self) -> bool:
        return super().needs_special_tokens or self.is_parsed

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
        return self.choice.offered or None


def _end_of(prompt: Sequence[int], tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
