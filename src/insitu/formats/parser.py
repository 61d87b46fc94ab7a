"""The parts of a message from the text of a completion, whole or in pieces.

    parser = message_parser(formats, prompt, tools)
    for piece in pieces:
        parser.feed(piece)          # content and reasoning that are final
    parser.finish()                 # the rest, and the tool calls

`regions` finds the regions of a message; what is in the regions of calls is parsed here, so that calls that cannot be
parsed remain text. A tokenizer's own response template is left to `transformers`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from insitu.errors import BackendError
from insitu.formats.forced_calls import Reasoning, forced_calls
from insitu.formats.regions import CONTENT, REASONED, UNDECIDED, Held, Kind, RegionScanner, regions
from insitu.formats.registry import NONE, REASONING, TOOLS, reasoning_format, recognize, renders_tools, tool_format
from insitu.formats.tool_calls import Tools, call_id, mentions_call, parsed_call, tool_names
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
            tools = recognize(TOOLS, text) or (None if renders_tools(text) else NONE)
        return cls(tools, reasoning or recognize(REASONING, text) or NONE)

    def replaced(self, tools: str | None, reasoning: str | None) -> "MessageFormats":
        if tools is None and reasoning is None:
            return self
        others = self if self.template is None else MessageFormats(NONE, NONE)
        return MessageFormats(tools or others.tools, reasoning or others.reasoning)


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
_PART = 256
"""Characters that a parser of transformers gets at once."""


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

    def __init__(
        self, formats: MessageFormats, prompt: str, tools: Tools, special: tuple[str, ...], *, bare: bool = True
    ) -> None:
        name = formats.tools if tools and formats.tools is not None else NONE
        self._format = tool_format(name) if name != NONE else None
        self._tools = tools
        self._without_reasoning = partial(RegionParser, MessageFormats(name, NONE), "", tools, special)
        is_open = bool(opened_reasoning(formats.reasoning, prompt))
        self._bare = dict(self._format.bare_regions(tools)) if self._format and bare else {}
        calls = (*(self._format.regions if self._format else ()), *self._bare.items())
        self._regions = partial(regions, calls, formats.reasoning, special)
        self._scanner = RegionScanner(self._regions(undecided=True), REASONED if is_open else CONTENT)
        self._undecided: list[str] = []
        """Text of reasoning from the beginning of a call on, and the end of the reasoning."""
        self._content, self._reasoning = Held(None, from_start=False), Held("\n", from_start=True)
        self._bodies: list[list[str]] = []
        """The texts of the regions of calls, in pieces."""
        self._is_open = False
        """Whether the last of these has not ended."""
        self._raw: list[str] = []
        """All text from the first call on."""
        self._after: list[str] = []
        """Content after the first call."""
        self._may_be_calls = self._format is not None and bool(self._format.whole)
        """Whether the content, which has not begun, may be calls as a whole."""
        self._is_whole = self._is_bare = False
        """Whether they are, and whether any calls are without the delimiters of their format."""

    def feed(self, text: str) -> Piece:
        return self._read(self._scanner, text, final=False)

    def finish(self) -> Piece:
        content, reasoning, _, _ = self._read(self._scanner, "", final=True)
        if self._undecided:
            rest = self._reread(CONTENT if self._are_calls("".join(self._undecided)) else REASONED)
            content, reasoning = content + rest.content, reasoning + rest.reasoning
        if not self._raw:
            return Piece(content + self._content.space, reasoning)
        raw = "".join(self._raw)
        try:
            calls = self._calls(raw)
        except ValueError:
            malformed = not self._is_bare or mentions_call(raw, self._tools)
            if not self._bare:
                return Piece(content + self._content.space + raw, reasoning, malformed=malformed)
            first, last = self._parsed(raw, bare=False)
            content += self._content.add(first.content)
            content += last.content if last.calls else self._content.space + last.content
            return Piece(content, reasoning, last.calls, malformed=malformed and not last.calls)
        after = "" if self._is_whole else "".join(self._after).strip()
        return Piece(content + (after and f"\n{after}"), reasoning, tuple(calls))

    def _reread(self, region: str) -> Piece:
        """Reads the undecided text as one that begins in a region."""
        text, self._undecided = "".join(self._undecided), []
        return self._read(RegionScanner(self._regions(undecided=False), region), text, final=True)

    def _read(self, scanner: RegionScanner, text: str, *, final: bool) -> Piece:
        content, reasoning = [], []
        for region, kind, part in scanner.read(text, final=final):
            if region == UNDECIDED:
                self._undecided.append(part)
                if kind is Kind.END:
                    reasoning.append(self._reread(REASONED).reasoning)
            elif region.isdigit():
                self._raw.append(part)
                self._is_open = kind is not Kind.END
                if kind is Kind.START:
                    self._bodies.append([part] if part in self._bare else [])
                    self._is_bare = self._is_bare or bool(self._bodies[-1])
                elif kind is Kind.TEXT:
                    self._bodies[-1].append(part)
            elif region == REASONED:
                self._content.from_start = True
                if kind is Kind.TEXT:
                    reasoning.append(self._reasoning.add(part))
            elif kind is Kind.TEXT:
                content.append(self._read_content(part))
            elif kind is Kind.SPECIAL and self._raw and not self._is_whole:
                self._raw.append(part)
        return Piece("".join(content), "".join(reasoning))

    def _read_content(self, text: str) -> str:
        if self._raw:
            self._raw.append(text)
            self._after.append(text)
            return ""
        if self._may_be_calls and (start := text.lstrip()):
            self._may_be_calls = False
            assert self._format is not None
            self._is_whole = self._is_bare = start[0] in self._format.whole
            if self._is_whole:
                self._raw.append(start)
                text = text.removesuffix(start)
        return self._content.add(text)

    def _are_calls(self, text: str) -> bool:
        """Whether text within reasoning is nothing but calls of the request's tools, which end it."""
        first, last = self._parsed(text, bare=True)
        names = {call["function"]["name"] for call in last.calls}
        return bool(names) and names <= tool_names(self._tools) and not first.content and not last.content

    def _parsed(self, text: str, *, bare: bool) -> tuple[Piece, Piece]:
        """What is before the calls of a text without reasoning, and the rest of it."""
        parser = self._without_reasoning(bare=bare)
        return parser.feed(text), parser.finish()

    def _calls(self, raw: str) -> list[dict[str, Any]]:
        """Raises ValueError if a call cannot be parsed."""
        assert self._format is not None
        if self._is_open and self._format.needs_end:
            raise ValueError("the last call is cut off")
        texts = [raw] if self._is_whole else map("".join, self._bodies)
        calls = [call for text in texts for call in self._format.calls(text, self._tools)]
        if self._is_bare and not {call.name for call in calls} <= tool_names(self._tools):
            raise ValueError("not calls of the request's tools")
        return [call.openai(self._format.new_id()) for call in calls]


class TemplateParser(Parser):
    """Parses completions by the response template of a tokenizer."""

    def __init__(self, formats: MessageFormats, prompt: str, tools: Tools, special: tuple[str, ...]) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        fields = formats.template.get("fields", {}) if isinstance(formats.template, dict) else {}
        arguments = {name: each.get("content_args", {}) for name, each in fields.items() if isinstance(each, dict)}
        strip = {name: arguments.get(name, {}).get("strip", True) for name in ("content", *_REASONING)}
        self._strips = {name: None if is_stripped else "" for name, is_stripped in strip.items()}
        self._new_parser = partial(ResponseParser, formats.template, prompt, tools=[*map(dict, tools)])
        words = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        self._special = re.compile(words)
        self._part = re.compile(f"(?:{words}|.){{1,{_PART}}}", re.DOTALL)
        self._character = re.compile(f"{words}|.", re.DOTALL)
        self._text = ""
        self._returned = Piece()
        """All content and reasoning that have been returned."""
        self._is_broken = False
        self._restart()

    def _restart(self) -> None:
        self._parser: Any = self._new_parser()
        self._held = {name: Held(characters, from_start=True) for name, characters in self._strips.items()}
        self._at = 0
        """Where the text ends that is content or reasoning."""
        self._calls: list[dict[str, Any]] = []
        self._found = Piece()
        """All content and reasoning that are final."""

    def feed(self, text: str) -> Piece:
        for part in self._part.findall(text):  # the parser searches all that it gets for each delimiter
            self._read(self._parser.feed, part)
        return self._unread()

    def finish(self) -> Piece:
        self._read(lambda _: self._parser.finalize()[1], "")
        piece = self._unread()
        return piece._replace(malformed=True) if self._is_broken else piece._replace(calls=tuple(self._calls))

    def _unread(self) -> Piece:
        """What has not been returned before."""
        before, self._returned = self._returned, self._found
        return Piece(self._found.content[len(before.content) :], self._found.reasoning[len(before.reasoning) :])

    def _read(self, read: Callable[[str], list[dict[str, Any]]], part: str) -> None:
        before, self._text = self._text, self._text + part
        if self._is_broken:
            self._add("content", part)
            return
        try:
            self._add_events(read(part))
        except (ValueError, RecursionError):  # what the template expects to be calls are none
            self._is_broken = True
            self._reread(before, part)

    def _reread(self, before: str, part: str) -> None:
        """Adds the events that the parser found in a part before its error, and lost; then the rest as content."""
        self._restart()
        with suppress(ValueError, RecursionError):
            for text in (*self._part.findall(before), *self._character.findall(part)):
                self._add_events(self._parser.feed(text))
        self._add("content", self._held["content"].space + self._text[self._at :])

    def _add(self, name: str, text: str) -> None:
        key = "content" if name == "content" else "reasoning"
        self._found = self._found._replace(**{key: getattr(self._found, key) + text})

    def _add_events(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            name, text = event["field"], event.get("text", "")
            if event["type"] == "region_close" and name == "tool_calls":
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                self._calls += [self._call(value) for value in values]
            if text and name in self._held:
                self._at = self._text.find(text, self._at) + len(text)
                self._add(name, self._held[name].add(self._special.sub("", text)))

    @staticmethod
    def _call(value: Any) -> dict[str, Any]:
        """Raises ValueError if a template gives something else than a call in OpenAI's form."""
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict):
            raise ValueError("not a call")
        return parsed_call(function, value.get("id")).openai(call_id())


def message_parser(
    formats: MessageFormats, prompt: str = "", tools: Tools = (), special: tuple[str, ...] = ()
) -> Parser:
    """A parser of one completion. `prompt` is the end of the prompt's text; `special` are tokens that are not text.

    Raises BackendError if the installed transformers has no response templates.
    """
    kind = RegionParser if formats.template is None else TemplateParser
    try:
        return kind(formats, prompt, tools, special)
    except ImportError:
        raise BackendError("the response template of the tokenizer needs transformers 5.16 or later") from None
