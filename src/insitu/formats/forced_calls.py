"""Grammars of tool calls that a request forces: what a model writes for calls of these functions, and nothing else.

    ToolFormat(..., syntaxes=(CallSyntax(call, start="<calls>", end="</calls>"),))

    def call(grammar: CallGrammar, function: ToolFunction) -> str:
        return f"{grammar.text(f'{function.name}: ')} {grammar.json(function.parameters)}"

Grammars are in Lark's syntax as llguidance reads it: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

import itertools
import json
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from insitu.formats.tool_calls import DESCRIPTIONS, Tools, resolved

JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n {0,20}"}
"""Optional between the parts of JSON. Were it unlimited, a model that does not know JSON would write little else."""
ANY_TEXT = "(?s:.*)"
_DEFINITIONS = ("$defs", "definitions")
_WHOLE = DESCRIPTIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
"""Keys of parameters that formats may have which write arguments one by one."""
_COMPOSED = frozenset(("allOf", "anyOf", "oneOf", "$ref", "patternProperties"))
_NOT_TEXT = re.compile(r"[\s<>{}\[\]()\"'`]")


class ToolFunction(NamedTuple):
    """A function that may be called. Its arguments are an object that matches the JSON schema `parameters`."""

    name: str
    parameters: dict[str, Any]

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> "ToolFunction":
        """Raises ValueError for a tool whose arguments are no object. Arguments that are not declared are not allowed,
        unless the parameters say so.
        """
        function = tool["function"]
        schema = {"type": "object", "properties": {}} if function.get("parameters") is None else function["parameters"]
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise ValueError(f"the parameters of {function['name']!r} are not the schema of an object")
        is_plain = "properties" in schema and not schema.keys() & _COMPOSED
        closed = {"additionalProperties": False} if is_plain else {}
        return cls(function["name"], {"type": "object", **closed, **schema})

    @property
    def word(self) -> str:
        """The name, in formats without quotes. Raises ValueError if it has characters that end a name there."""
        return _word(self.name)

    def arguments(self, write: Callable[[str, Any], str], separator: str = "") -> str:
        """The arguments one after another, which `write` writes from name and schema; optional ones may be left out.

        Raises ValueError if the parameters are more than a list of properties.
        """
        if unknown := sorted(self.parameters.keys() - _WHOLE):
            raise ValueError(f"the parameters of {self.name!r} have {unknown[0]}, which this format cannot write")
        required = dict.fromkeys(self.parameters.get("required") or ())
        properties = {name: {} for name in required} | (self.parameters.get("properties") or {})
        shared = {key: self.parameters[key] for key in _DEFINITIONS if key in self.parameters}
        arguments = {
            name: write(_word(name), {**resolved(schema, self.parameters), **shared})
            for name, schema in properties.items()
        }
        first = f" {separator} ".join(arguments[name] for name in required)
        others = [text for name, text in arguments.items() if name not in required]
        if first or not separator:
            return " ".join([first, *(f"({separator} {other})?" for other in others)])
        starts = (
            " ".join([other, *(f"({separator} {later})?" for later in others[number + 1 :])])
            for number, other in enumerate(others)
        )
        return f"({' | '.join(starts)})?" if others else ""


def _word(name: str) -> str:
    if not name or _NOT_TEXT.search(name):
        raise ValueError(f"the name {name!r} cannot be written in this format")
    return name


def python_name(name: str) -> str:
    """Raises ValueError for what is no name in Python."""
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise ValueError(f"{name!r} is no name in Python")
    return name


class CallGrammar:
    """The rules of a grammar; methods return expressions. `markers` are tokens that are no text, and their ids."""

    def __init__(self, markers: Mapping[str, int]) -> None:
        self._markers = markers
        words = sorted(map(re.escape, markers), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(words) or '(?!)'})")
        self._rules: dict[str, str] = {}
        """Names of rules and terminals by what they stand for."""

    def __str__(self) -> str:
        return "".join(f"{name}: {body}\n" for body, name in self._rules.items())

    def rule(self, body: str, kind: str = "r") -> str:
        """The name of a rule; of a terminal with kind `T`."""
        return self._rules.setdefault(body, f"{kind}{len(self._rules)}")

    def text(self, *texts: str) -> str:
        """One of these texts."""
        return f"({' | '.join(map(self._text, texts))})" if len(texts) > 1 else self._text(texts[0])

    def _text(self, text: str) -> str:
        return " ".join(map(self._terminal, filter(None, self._pattern.split(text)))) or '""'

    def _terminal(self, part: str) -> str:
        marker = self._markers.get(part)
        return json.dumps(part, ensure_ascii=False) if marker is None else f"<[{marker}]>"

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that matches a schema."""
        return self.rule("%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}))

    def until(self, end: str, patterns: Iterable[str] = (ANY_TEXT,), without: Iterable[str] = ()) -> str:
        """Text that matches all patterns, followed by `end`; it has neither that nor one of the texts `without`."""
        plain, *rest = self._pattern.split(end, maxsplit=1)
        avoided = "|".join(map(_escaped, {end, *without}))
        terms = [f"/(?:{_inside(pattern)}){_escaped(plain)}/" for pattern in patterns]
        terms.append(f"~/{ANY_TEXT}(?:{avoided}){'(?s:.+)' if plain else ANY_TEXT}/")
        return f"{self.rule(' & '.join(terms), 'T')} {self._text(''.join(rest)) if rest else ''}"

    def value(self, schema: Mapping[str, Any], end: str, without: Iterable[str] = ()) -> str:
        """A string as it is, or JSON of another type, followed by `end`: values of formats that need the schema."""
        branches = [*itertools.islice(_branches(schema), _MOST_BRANCHES + 1)]
        if len(branches) > _MOST_BRANCHES:
            raise ValueError(f"a union of more than {_MOST_BRANCHES} schemas cannot be written")
        is_union = len(branches) > 1
        values = (self._value(branch, end, without, is_union=is_union) for branch in branches)
        return f"({' | '.join(values)})"

    def _value(self, schema: Mapping[str, Any], end: str, without: Iterable[str], *, is_union: bool) -> str:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            if not values:
                raise ValueError("an enum without values cannot be written")
            return self.text(*((each if isinstance(each, str) else json.dumps(each)) + end for each in values))
        if schema.get("type") != "string" and schema.keys() - DESCRIPTIONS - {*_DEFINITIONS}:
            return f"{self.json(schema)} {self.text(end)}"
        patterns = [f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"]
        if isinstance(pattern := schema.get("pattern"), str):
            start, stop = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
            inner = pattern[start : len(pattern) - stop]
            patterns.append(f"{'' if start else ANY_TEXT}(?:{inner}){'' if stop else ANY_TEXT}")
        if is_union:
            patterns.append(r'(?:[^\s\[{"0-9-](?s:.*))?')  # else it might be JSON of another type
        return self.until(end, patterns, without)


_MOST_BRANCHES = 4096


def _branches(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas of single types that a schema allows, each with its definitions."""
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    for key in ("anyOf", "oneOf"):
        if key in schema:
            for branch in schema[key]:
                yield from _branches({**resolved(branch, schema), **shared})
            return
    types = schema.get("type")
    yield from ({**schema, "type": each} for each in types) if isinstance(types, list) else [{**schema}]


def _escaped(text: str) -> str:
    return "".join(each if each.isascii() and each.isalnum() else rf"\x{{{ord(each):x}}}" for each in text)


def _inside(pattern: str) -> str:
    """A pattern as it is written between slashes."""
    escapes = {"/": r"\x2f", r"\/": r"\x2f", "\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda match: escapes.get(match[0], match[0]), pattern)


@dataclass(frozen=True)
class CallSyntax:
    """How a format writes calls: each by `call`, all of them after one of `start` and before `end`.

    One of `between` stands between two calls; empty if a message has a single call.
    """

    call: Callable[[CallGrammar, ToolFunction], str]
    start: tuple[str, ...] = ("",)
    between: tuple[str, ...] = ()
    end: str = ""


class Reasoning(NamedTuple):
    """What may come before the calls: text after one of `start`, up to `end`, and then `after`."""

    start: tuple[str, ...]
    end: str
    after: str = ""
    is_open: bool = False
    """Whether the prompt has begun it."""


def forced_calls(
    syntaxes: Sequence[CallSyntax],
    tools: Tools,
    reasoning: Reasoning | None,
    markers: Mapping[str, int],
    *,
    several: bool,
) -> str:
    """The grammar of one call of these tools, or of one or more if `several`.

    Raises ValueError for tools that the format cannot write.
    """
    grammar = CallGrammar(markers)
    functions = [ToolFunction.of(tool) for tool in tools]
    forms = []
    for syntax in syntaxes:
        call = grammar.rule(" | ".join(syntax.call(grammar, function) for function in functions))
        next_calls = f"({grammar.text(*syntax.between)} {call})*" if several and syntax.between else ""
        forms.append(f"{grammar.text(*syntax.start)} {call} {next_calls} {grammar.text(syntax.end)}")
    before = ""
    if reasoning is not None:
        parts = grammar.until(reasoning.end), grammar.text(reasoning.after), grammar.text("\n\n", "\n", "")
        text = " ".join(parts)
        before = text if reasoning.is_open else f"({grammar.text(*reasoning.start)} {text})?"
    return f"start: {before} ({' | '.join(forms)})\n{grammar}"
