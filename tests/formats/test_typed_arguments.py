"""Arguments of formats that write them without their types, which the tool's schema says."""

import json
from typing import Any

import llguidance
import pytest
from llguidance import LLMatcher, LLTokenizer
from message_formats import ALL_FAMILIES
from taught_models import tokenizer_of

from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.formats.parser import MessageFormats, forced_grammar, message_parser
from insitu.formats.registry import NONE, TOOLS
from insitu.schemas.parts import names

TEXTS = {"$ref": "#/$defs/texts"}
DEFINITIONS = {"texts": {"type": "string", "enum": ["1", "true", "x"]}, "number": {"type": "integer"}}
CIRCLE = {"allOf": [{"$ref": "#/$defs/circle"}]}
FORMS = {
    "qwen3_coder": ("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
    "glm45": ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">',
        "</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
}
each_form = pytest.mark.parametrize("name", FORMS)


def tools(**parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}]


def argument(name: str, text: str, **parameters: Any) -> Any:
    start, end = FORMS[name]
    parser = message_parser(MessageFormats(name, "none"), "", tools(**parameters))
    parser.feed(start + text + end)
    (call,) = parser.finish().calls
    return json.loads(call["function"]["arguments"])["a"]


@each_form
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXTS, "1", "1"),
        ({"anyOf": [TEXTS, {"type": "null"}], "default": None}, "1", "1"),
        ({"anyOf": [TEXTS, {"type": "null"}]}, "true", "true"),
        ({"anyOf": [TEXTS, {"type": "null"}]}, "null", None),
        ({"oneOf": [TEXTS, {"$ref": "#/$defs/number"}]}, "1", 1),
        ({"anyOf": [{"anyOf": [{"allOf": [TEXTS]}]}, {"type": "null"}]}, "1", "1"),
        ({"allOf": [TEXTS], "description": "d"}, "1", "1"),
        ({"type": ["string", "null"]}, "x", "x"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"oneOf": [{"const": f"{number}"} for number in range(300)]}, "1", "1"),
    ],
)
def test_an_argument_has_a_type_of_its_schema(name: str, schema: Any, text: str, value: Any) -> None:
    parameters: dict[str, Any] = {"properties": {"a": schema}, "required": ["a"], "$defs": DEFINITIONS}
    assert repr(argument(name, text, **parameters)) == repr(value)
    assert accepts(name, text, **parameters)


@each_form
@pytest.mark.parametrize(("text", "fits"), [('{"b":1}', False), ('{"c":1}', False), ('{"c":1,"b":1}', True)])
@pytest.mark.parametrize("base", [{"allOf": [{"$ref": "#/$defs/base"}]}, {"$ref": "#/$defs/base"}])
def test_a_schema_and_one_that_it_extends_are_both_matched(name: str, text: str, fits: bool, base: Any) -> None:
    extended = {**base, "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    definitions = {"base": {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]}}
    parameters: dict[str, Any] = {"properties": {"a": extended}, "required": ["a"], "$defs": definitions}
    assert accepts(name, text, **parameters) is fits


def accepts(name: str, text: str, **parameters: Any) -> bool:
    """Whether the grammar of a forced call has this argument."""
    tokenizer = tokenizer_of(ALL_FAMILIES[name])
    markers = ChatTokenizer(tokenizer).markers
    grammar = forced_grammar(MessageFormats(name, "none"), tools(**parameters), "", markers, several=False)
    tokens = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=tokenizer.eos_token_id)
    matcher = LLMatcher(tokens, llguidance.grammar_from("grammar", grammar), log_level=0)
    assert not matcher.get_error()
    written = tokenizer.encode(text.join(FORMS[name]), add_special_tokens=False)
    return matcher.validate_tokens(written) == len(written)


@each_form
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": ["a"]},
        {"properties": {"a": ["string"]}},
        {"properties": {"a": {"type": 5, "anyOf": 5, "oneOf": {}, "enum": 5, "allOf": []}}},
        {"properties": {"a": {"type": [["string"]], "anyOf": [5, {"$ref": 5}]}}},
        {"properties": {"a": CIRCLE}, "$defs": {"circle": {"anyOf": [CIRCLE, CIRCLE]}}},
        {"properties": {"a": {"$ref": "#/$defs/circle"}}, "$defs": {"circle": {"$ref": "#/$defs/circle"}}},
        {"properties": {"a": TEXTS}, "$defs": 5},
    ],
)
def test_of_a_schema_that_is_none_an_argument_is_json(name: str, parameters: Any) -> None:
    assert argument(name, "1", **parameters) == 1


@each_form
@pytest.mark.parametrize("text", ["def f():\n    pass\n", "\n\nx", "x", "\n", ""])
def test_a_text_keeps_its_line_breaks(name: str, text: str) -> None:
    assert argument(name, text, properties={"a": {"type": "string"}}) == text


@pytest.mark.parametrize("name", names(TOOLS))
@pytest.mark.parametrize("tool", [{"function": [[]]}, {"function": 5}, {}])
def test_a_tool_that_is_none_is_no_reason_to_fail(name: str, tool: Any) -> None:
    for text in ("<function=f></function>", "<tool_call>f</tool_call>", "[f(1)]", '{"name": "f", "arguments": {}}'):
        parser = message_parser(MessageFormats(name, NONE), "", [tool])
        assert not parser.feed(text).malformed
        parser.finish()
