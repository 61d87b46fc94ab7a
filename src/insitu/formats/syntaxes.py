"""How each family of models writes the tool calls that a request forces.

A family that writes calls in several ways has several syntaxes, of which the model chooses one.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from insitu.formats.forced_calls import CallGrammar, CallSyntax, ToolFunction, python_name


def _json_call(
    key: str, grammar: CallGrammar, function: ToolFunction, *, start: str = "", end: str = "", has_id: bool = False
) -> str:
    """`{"name": NAME, KEY: ARGUMENTS}` between `start` and `end`."""
    opening = grammar.text(f'{start}{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{key}": ')
    parts = [opening, grammar.json(function.parameters), grammar.text("}" + end)]
    if has_id:
        before, after = grammar.text(', "id": "'), grammar.text('"')
        parts.insert(2, f"({before} /[A-Za-z0-9]{{9}}/ {after})?")
    return " ".join(parts)


def _around(start: str, end: str, grammar: CallGrammar, function: ToolFunction) -> str:
    """The arguments as JSON; `start` has NAME for the name."""
    head = grammar.text(start.replace("NAME", function.word))
    return f"{head} {grammar.json(function.parameters)} {grammar.text(end) if end else ''}"


def _numbered(grammar: CallGrammar, function: ToolFunction) -> str:
    """A call of Kimi, whose id counts the calls of the conversation."""
    arguments = f"{grammar.text('<|tool_call_argument_begin|>')} {grammar.json(function.parameters)}"
    start = f"<|tool_call_begin|>functions.{function.word}:"
    return f"{grammar.text(start)} /[0-9]{{1,3}}/ {arguments} {grammar.text('<|tool_call_end|>')}"


def _tagged(
    start: str,
    argument: tuple[str, str, str],
    end: str,
    without: tuple[str, ...],
    grammar: CallGrammar,
    function: ToolFunction,
) -> str:
    """Tags around each value, and what follows them; NAME and KEY are those of the function and the argument."""
    opening, closing, after = argument

    def write(key: str, schema: Mapping[str, Any]) -> str:
        value = grammar.value(schema, closing, without)
        return f"{grammar.text(opening.replace('KEY', key))} {value} {grammar.text(after)}"

    return f"{grammar.text(start.replace('NAME', function.word))} {function.arguments(write)} {grammar.text(end)}"


def _glm(newline: str, grammar: CallGrammar, function: ToolFunction) -> str:
    """GLM 4.5 writes line breaks between the parts of a call, later ones write none."""
    argument = f"<arg_key>KEY</arg_key>{newline}<arg_value>", "</arg_value>", newline
    without = "</arg_value>", "</tool_call>"
    return _tagged(f"<tool_call>NAME{newline}", argument, "</tool_call>", without, grammar, function)


def _python(grammar: CallGrammar, function: ToolFunction) -> str:
    def write(key: str, schema: Mapping[str, Any]) -> str:
        return f"{grammar.text(python_name(key) + '=')} {grammar.json(schema)}"

    arguments = function.arguments(write, grammar.text(", "))
    return f"{grammar.text(python_name(function.name) + '(')} {arguments} {grammar.text(')')}"


def _list(start: str, end: str = "") -> CallSyntax:
    return CallSyntax(partial(_json_call, "arguments"), (f"{start}[",), (", ",), f"]{end}")


HERMES = (
    CallSyntax(partial(_json_call, "arguments", start="<tool_call>\n", end="\n</tool_call>"), between=("\n", "")),
)
GRANITE = (_list("<|tool_call|>"), *HERMES)
XLAM = (_list(""),)
PHI4 = (_list("<|tool_call|>", "<|/tool_call|>"), _list("functools"))
LLAMA3 = (CallSyntax(partial(_json_call, "parameters"), ("", "<|python_tag|>"), ("; ",)),)
PYTHONIC = (CallSyntax(_python, ("[",), (", ",), "]"),)
GEMMA3 = (*PYTHONIC, CallSyntax(_python, ("```tool_code\n[",), (", ",), "]\n```"))
LLAMA4 = (
    *PYTHONIC,
    CallSyntax(_python, ("<|python_start|>[",), (", ",), "]<|python_end|>"),
    CallSyntax(partial(_json_call, "parameters"), ("<|python_start|><|python_end|>", ""), ("; ", "")),
)
MISTRAL = (
    CallSyntax(partial(_json_call, "arguments", has_id=True), ("[TOOL_CALLS][", "[TOOL_CALLS] ["), (", ",), "]"),
    CallSyntax(partial(_around, "[TOOL_CALLS]NAME[ARGS]", ""), between=("",)),
)
OPENAI = (CallSyntax(partial(_around, "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "")),)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>",), ("", "\n"), "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_V3 = (
    CallSyntax(partial(_around, f"{_CALL}NAME{_SEPARATOR}", _END), *_DEEPSEEK),
    CallSyntax(partial(_around, f"{_CALL}function{_SEPARATOR}NAME\n```json\n", f"\n```{_END}"), *_DEEPSEEK),
)
KIMI_K2 = (CallSyntax(_numbered, ("<|tool_calls_section_begin|>",), ("",), "<|tool_calls_section_end|>"),)
QWEN3_CODER = (
    CallSyntax(
        partial(
            _tagged,
            "<tool_call>\n<function=NAME>\n",
            ("<parameter=KEY>\n", "\n</parameter>", "\n"),
            "</function>\n</tool_call>",
            ("</parameter>", "</function>", "</tool_call>"),
        ),
        between=("\n", ""),
    ),
)
GLM45 = (CallSyntax(partial(_glm, "\n"), between=("\n", "")), CallSyntax(partial(_glm, ""), between=("\n", "")))
MINIMAX_M2 = (
    CallSyntax(
        partial(
            _tagged,
            '<invoke name="NAME">\n',
            ('<parameter name="KEY">', "</parameter>", "\n"),
            "</invoke>\n",
            ("</parameter>", "</invoke>", "</minimax:tool_call>"),
        ),
        ("<minimax:tool_call>\n",),
        ("",),
        "</minimax:tool_call>",
    ),
)
