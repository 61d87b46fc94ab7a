"""The parts of a message from the text of a completion, whole or in pieces.

    parser = message_parser(formats, prompt, tools)
    for piece in pieces:
        parser.feed(piece)          # content and reasoning that are final
    parser.finish()                 # the rest, and the tool calls

`transformers` finds the regions of a message (its response templates); what is in the regions of calls is parsed here,
so that calls that cannot be parsed remain text.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from insitu.errors import BackendError
from insitu.formats.forced_calls import Reasoning, forced_calls
from insitu.formats.registry import (
    NONE,
    REASONING,
    TOOLS,
    reasoning_format,
    recognize_reasoning,
    recognize_tools,
    renders_tools,
    tool_format,
)
from insitu.formats.tool_calls import Tools, call_id, parsed_call
from insitu.schemas.parts import names

MALFORMED = "tool_call_malformed"
"""Why calls of a message are text."""
_TEMPLATE = "response_template"
"""The format of a tokenizer that has a response template: both formats are what that says."""


class MessageFormats(NamedTuple):
    """The formats of a model by name; None: the template renders tools, but in no known format.

    `template` is the tokenizer's response template, if it has one.
    """

    tools: str | None
    reasoning: str
    template: Any = None

    @classmethod
    def of(
        cls, chat_template: Any, template: Any = None, tools: str | None = None, reasoning: str | None = None
    ) -> "MessageFormats":
        """Returns the stated formats; one that is not stated is recognized from the chat template, or those by name."""
        if template is not None and tools is None and reasoning is None:
            return cls(_TEMPLATE, _TEMPLATE, template)
        text = "\n".join(chat_template.values()) if isinstance(chat_template, Mapping) else chat_template or ""
        if tools is None:
            tools = recognize_tools(text) or (None if renders_tools(text) else NONE)
        return cls(tools, reasoning or recognize_reasoning(text) or NONE)

    def replaced(self, tools: str | None, reasoning: str | None) -> "MessageFormats":
        if tools is None and reasoning is None:
            return self
        stated = (
            tools or (NONE if self.template else self.tools),
            reasoning or (NONE if self.template else self.reasoning),
        )
        return MessageFormats(*stated)


def unknown_format(source: str) -> str:
    """The problem of a model without a known tool format."""
    return (
        f"the chat template of {source} renders tools, but its tool calls have none of the known formats; set "
        f"tool_format to one of {', '.join(names(TOOLS))}, or to {NONE} to leave them in the text"
    )


def check_format(kind: str, name: str) -> str:
    """Raises ValueError for a name that no installed package has declared. `kind` is TOOLS or REASONING."""
    if name != NONE and name not in (known := names(kind)):
        raise ValueError(f"{name!r} does not exist; available: {', '.join([*known, NONE])}")
    return name


def format_problem(tools: str | None, reasoning: str | None) -> tuple[str, str] | None:
    """The key of a stated format that does not exist, and the message for it."""
    for key, kind, name in (("tool_format", TOOLS, tools), ("reasoning_format", REASONING, reasoning)):
        try:
            if name is not None:
                check_format(kind, name)
        except ValueError as error:
            return key, f"{key}: {error}"
    return None


ToolFormatName = Annotated[str, AfterValidator(partial(check_format, TOOLS))]
ReasoningFormatName = Annotated[str, AfterValidator(partial(check_format, REASONING))]


class Piece(NamedTuple):
    """Text that is final, and at the end of a message its tool calls, in OpenAI's form.

    `malformed`: there were calls that could not be parsed, whose text is content.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    malformed: bool = False


@cache
def _template(tools: str, reasoning: str) -> Any:
    """The response template of two formats. Fields of calls are numbered as the regions of their format."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    text = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
    fields: dict[str, Any] = {"content": text}
    if reasoning != NONE:
        form = reasoning_format(reasoning)
        fields["reasoning_content"] = {**text, "open": list(form.start), "close": list(form.end)}
        if form.content is not None:
            fields["answer"] = {**text, "open": list(form.content[0]), "close": list(form.content[1])}
    for number, (start, end) in enumerate(tool_format(tools).regions if tools != NONE else ()):
        fields[f"{number}"] = {**text, "open": start, **({"close": end} if end else {})}
    return load_response_template({"start_anchor_pattern": "^", "fields": fields})


def opened_reasoning(name: str, prompt: str) -> str:
    """The delimiter with which the prompt, or the format itself, has begun reasoning; empty if none has."""
    if name == NONE:
        return ""
    form = reasoning_format(name)
    start = max(form.start, key=prompt.rfind)
    at = prompt.rfind(start)
    if at >= 0 and not prompt[at + len(start) :].strip():
        return start
    closed = any(prompt.rstrip().endswith(end) for end in form.end)
    return form.start[0] if form.begins and not closed else ""


def forced_grammar(
    formats: MessageFormats, tools: Tools, prompt: str, markers: Mapping[str, int], *, several: bool
) -> str:
    """The grammar of a message that is a call of these tools, or calls if `several`, after reasoning if it has that.

    `prompt` is the end of the prompt's text; `markers` are tokens that are no text, and their ids. Raises ValueError if
    the format cannot write calls, or not of these tools.
    """
    syntaxes = {name: tool_format(name).syntaxes for name in names(TOOLS)}
    if not (chosen := syntaxes.get(formats.tools or NONE)):
        able = ", ".join(name for name, forms in syntaxes.items() if forms)
        raise ValueError(f"calls cannot be forced in the tool format {formats.tools}, but in {able}")
    return forced_calls(chosen, tools, _reasoning(formats.reasoning, prompt), markers, several=several)


def _reasoning(name: str, prompt: str) -> Reasoning | None:
    """The reasoning that may follow a prompt."""
    if name not in names(REASONING):
        return None
    form = reasoning_format(name)
    if opened_reasoning(name, prompt):
        return Reasoning((), form.end[0], form.after, is_open=True)
    if prompt.rstrip().endswith(form.end):
        return None
    starts = {start[max(n for n in range(len(start)) if prompt.endswith(start[:n])) :] for start in form.start}
    return Reasoning(tuple(sorted(starts)), form.end[0], form.after)


_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field of reasoning in response templates."""


class _Held:
    """Text without white space at its ends, which is held until more text follows."""

    def __init__(self, characters: str | None, *, from_start: bool) -> None:
        self._characters = characters
        self.from_start = from_start
        """Whether white space at the beginning is dropped."""
        self.space = ""

    def add(self, text: str) -> str:
        text = self.space + text
        text = text.lstrip(self._characters) if self.from_start else text
        kept = text.rstrip(self._characters)
        self.space = text[len(kept) :]
        self.from_start = self.from_start and not kept
        return kept


class Parser(ABC):
    """Parses one completion."""

    @abstractmethod
    def feed(self, text: str) -> Piece:
        """The content and reasoning that are final."""

    @abstractmethod
    def finish(self) -> Piece:
        """The rest of the message."""


class RegionParser(Parser):
    """Parses completions in the formats of the registry."""

    def __init__(self, formats: MessageFormats, prompt: str, tools: Tools, special: re.Pattern[str] | None) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        name = formats.tools if tools and formats.tools is not None else NONE
        self._format = tool_format(name) if name != NONE else None
        self._tools, self._special = tools, special
        self._parser = ResponseParser(_template(name, formats.reasoning), opened_reasoning(formats.reasoning, prompt))
        self._content, self._reasoning = _Held(None, from_start=False), _Held("\n", from_start=True)
        self._bodies: list[str] = []
        """The texts of the regions of calls."""
        self._raw = ""
        """All text from the first call on."""
        self._after = ""
        """Content after the first call."""
        self._may_be_calls = self._format is not None and bool(self._format.whole)
        """Whether the content, which has not begun, may be calls as a whole."""
        self._is_whole = False

    def feed(self, text: str) -> Piece:
        return self._read(self._parser.feed(text), final=False)

    def finish(self) -> Piece:
        content, reasoning, _, _ = self._read(self._parser.finalize()[1], final=True)
        if not self._raw:
            return Piece(content + self._content.space, reasoning)
        try:
            calls = self._calls()
        except ValueError:
            malformed = not self._is_whole or any(name in self._raw for name in self._names())
            return Piece(content + self._content.space + self._raw, reasoning, malformed=malformed)
        after = self._after.strip()
        return Piece(content + (after and f"\n{after}"), reasoning, tuple(calls))

    def _read(self, events: list[dict[str, Any]], *, final: bool) -> Piece:
        content, reasoning = "", ""
        for event in events:
            name, text = event["field"], event.get("text", "")
            if name.isdigit():
                self._read_call(event, int(name), final)
            elif name == "reasoning_content":
                self._content.from_start = True
                reasoning += self._reasoning.add(self._clean(text))
            elif text:
                content += self._read_content(text)
        return Piece(content, reasoning)

    def _read_call(self, event: dict[str, Any], number: int, final: bool) -> None:
        assert self._format is not None
        start, end = self._format.regions[number]
        if event["type"] == "region_open":
            self._bodies.append("")
            self._raw += start
        elif event["type"] == "region_chunk":
            self._bodies[-1] += event["text"]
            self._raw += event["text"]
        elif not final:  # else the message has ended, and not the region
            self._raw += end or ""

    def _read_content(self, text: str) -> str:
        if self._raw:
            self._raw += text
            self._after += text
            return ""
        text = self._clean(text)
        if self._may_be_calls and text.strip():
            self._may_be_calls = False
            assert self._format is not None
            self._is_whole = text.lstrip()[0] in self._format.whole
            if self._is_whole:
                self._raw = text
                return ""
        return self._content.add(text)

    def _calls(self) -> list[dict[str, Any]]:
        """Raises ValueError if a call cannot be parsed."""
        assert self._format is not None
        texts = [self._raw] if self._is_whole else self._bodies
        calls = [call for text in texts for call in self._format.calls(text, self._tools)]
        if self._is_whole:
            if not {call.name for call in calls} <= self._names():
                raise ValueError("not calls of the request's tools")
            self._after = ""
        return [call.openai(self._format.new_id()) for call in calls]

    def _names(self) -> set[str]:
        return {str((tool.get("function") or {}).get("name")) for tool in self._tools}

    def _clean(self, text: str) -> str:
        return self._special.sub("", text) if self._special is not None else text


class TemplateParser(Parser):
    """Parses completions by the response template of a tokenizer."""

    def __init__(self, formats: MessageFormats, prompt: str, tools: Tools, special: re.Pattern[str] | None) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser: Any = ResponseParser(formats.template, prompt, tools=[*map(dict, tools)])
        self._special = special
        strip = {name: field.get("content_args", {}).get("strip", True) for name, field in self._fields(formats)}
        names = {name: (None if strip.get(name, True) else "") for name in ("content", *_REASONING)}
        self._held = {name: _Held(characters, from_start=True) for name, characters in names.items()}
        self._text, self._at = "", 0
        """All text, and where the text ends that has been returned."""
        self._calls: list[dict[str, Any]] = []
        self._is_broken = False

    def feed(self, text: str) -> Piece:
        self._text += text
        return self._read(lambda: self._parser.feed(text))

    def finish(self) -> Piece:
        piece = self._read(lambda: self._parser.finalize()[1])
        if self._is_broken:
            return piece._replace(malformed=True)
        return piece._replace(calls=tuple(self._calls))

    def _read(self, read: Callable[[], list[dict[str, Any]]]) -> Piece:
        content, reasoning = "", ""
        try:
            for event in [] if self._is_broken else read():
                name, text = event["field"], event.get("text", "")
                if event["type"] == "region_close" and name == "tool_calls":
                    values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                    self._calls += [self._call(value) for value in values]
                if text and name in ("content", *_REASONING):
                    self._at = self._text.find(text, self._at) + len(text)
                    text = self._held[name].add(self._special.sub("", text) if self._special is not None else text)
                    content, reasoning = (
                        (content + text, reasoning) if name == "content" else (content, reasoning + text)
                    )
        except (ValueError, RecursionError):  # what the template expects to be calls are none
            self._is_broken = True
        if self._is_broken:
            content += self._held["content"].space + self._text[self._at :]
            self._held["content"].space, self._at = "", len(self._text)
        return Piece(content, reasoning)

    @staticmethod
    def _fields(formats: MessageFormats) -> list[tuple[str, dict[str, Any]]]:
        fields = formats.template.get("fields", {}) if isinstance(formats.template, dict) else {}
        return [(name, field) for name, field in fields.items() if isinstance(field, dict)]

    @staticmethod
    def _call(value: Any) -> dict[str, Any]:
        """Raises ValueError if a template gives something else than a call in OpenAI's form."""
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict):
            raise ValueError("not a call")
        return parsed_call(function, value.get("id")).openai(call_id())


def message_parser(
    formats: MessageFormats, prompt: str = "", tools: Tools = (), special: re.Pattern[str] | None = None
) -> Parser:
    """A parser of one completion. `prompt` is the end of the prompt's text; `special` matches what is never content.

    Raises BackendError if the installed transformers has no response templates.
    """
    kind = RegionParser if formats.template is None else TemplateParser
    try:
        return kind(formats, prompt, tools, special)
    except ImportError:
        raise BackendError("tool calls and reasoning need transformers 5.15 or later") from None
