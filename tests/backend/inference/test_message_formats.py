"""Tool calls and reasoning in the forms that families of models write them in."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_formats import ALL_FAMILIES, TOOLS
from message_strategies import NUM_OUTPUTS, outputs

from insitu.disk.model_files import chat_template
from insitu.formats.parser import MessageFormats, Piece, message_parser
from insitu.formats.templates import dropped_reasoning

each_family = pytest.mark.parametrize("name", ALL_FAMILIES)


def parsed(name: str, text: str, prompt: str = "", cuts: tuple[int, ...] = ()) -> Piece:
    """What the parser makes of a completion of a family, fed in pieces that end at `cuts`."""
    formats = MessageFormats.of(ALL_FAMILIES[name].source)
    parser = message_parser(formats, prompt, TOOLS)
    content = reasoning = ""
    for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        piece = parser.feed(text[start:end])
        content, reasoning = content + piece.content, reasoning + piece.reasoning
    last = parser.finish()
    return last._replace(content=content + last.content, reasoning=reasoning + last.reasoning)


@each_family
def test_formats_are_recognized(name):
    family = ALL_FAMILIES[name]
    assert MessageFormats.of(family.source) == (family.tools, family.reasoning, None)


_LLAMA = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}{{ tools | tojson }}"
_TOOLCALL = """{{ '<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}]</TOOLCALL>' }}"""


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (_LLAMA + """{{ '{"name": "' + c.name + '", ' }}{{ '"parameters": ' }}""", "llama3_json"),
        (_LLAMA + r"""{{ "{\"name\": function, \"parameters\": arguments}" }}""", "llama3_json"),
        (_LLAMA + '[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}, ...', "xlam"),
        (_LLAMA + "{{ 'in the format [func_name1(params_name1=params_value1...), func_name2(params)]' }}", "pythonic"),
        (_LLAMA + _TOOLCALL, None),
        (_LLAMA, None),
        ("{{ tools | tojson }}" + _TOOLCALL, None),
        ("""{{ tools }}{{ '<tool_calls>[{"name": "func_name1", "arguments": {"argument1": "value1"}}]' }}""", None),
        ("""{{ tools }}{{ '<tool_calls>\n{"name": <tool-name>, "arguments": <args-json-object>}' }}""", None),
        ("{{ tools }}<seed:tool_call>\n<function=f>\n<parameter=a>\nvalue_1\n</parameter>", None),
    ],
)
def test_formats_that_look_alike_in_templates(template, found):
    """As in the templates of Llama 3.2, xLAM 2, ToolACE, Nemotron (Super, Nano), Hunyuan-A13B, MiniMax-M1, Seed-OSS."""
    assert MessageFormats.of(template).tools == found


@each_family
@settings(max_examples=NUM_OUTPUTS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), cut=st.lists(st.integers(0, 400), max_size=6))
def test_what_a_template_renders_is_parsed(name, data, cut):
    output = data.draw(outputs(name))
    cuts = tuple(sorted(min(at, len(output.text)) for at in cut))
    piece = parsed(name, output.text, output.prompt, cuts)
    assert (piece.content, piece.reasoning, piece.malformed) == (output.content, output.reasoning, False)
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in piece.calls]
    assert found == output.calls
    assert len({call["id"] for call in piece.calls}) == len(output.calls)


@each_family
@settings(max_examples=NUM_OUTPUTS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), span=st.tuples(st.integers(0, 300), st.integers(0, 30)))
def test_a_damaged_output_is_read_alike_in_pieces_and_keeps_its_text(name, data, span):
    output, (start, length) = data.draw(outputs(name)), span
    text = output.text[:start] + output.text[start + length :]
    whole, pieces = (parsed(name, text, output.prompt, cuts) for cuts in ((), tuple(range(1, len(text)))))
    found = [[call["function"] for call in piece.calls] for piece in (whole, pieces)]
    assert found[0] == found[1]
    assert whole._replace(calls=()) == pieces._replace(calls=())
    assert not (whole.calls and whole.malformed)
    if not whole.calls and not output.reasoning and name != "gpt_oss":  # whose texts have delimiters, too
        assert whole.content == text.strip() or whole.content == text


_BARE = "<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>"
_MENTION = "I call <function=weather>."
_CUT_OFF = '<tool_call>{"name": "weather", "arguments": {"city": "Be'


@pytest.mark.parametrize(
    ("name", "text", "content", "calls", "malformed"),
    [
        ("hermes", "plain ", "plain ", 0, False),
        ("hermes", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", 0, True),
        ("hermes", f"I look. {_CUT_OFF}", f"I look. {_CUT_OFF}", 0, True),
        ("hermes", 'Now <tool_call>{"name": "go"}', "Now", 1, False),
        ("hermes", '<tool_call>{"name": "go"}</tool_call> and more', "\nand more", 1, False),
        (
            "hermes",
            '<tool_call>{"name": "go"}</tool_call>' + _CUT_OFF,
            '<tool_call>{"name": "go"}</tool_call>' + _CUT_OFF,
            0,
            True,
        ),
        ("hermes", '<tool_call>{"name": "go", "arguments": {"x": NaN}}</tool_call>', None, 0, True),
        ("hermes", '<tool_call>{"name": "go", "arguments": {"x": "\\ud800"}}</tool_call>', None, 0, True),
        ("hermes", '<tool_call>{"name": "go", "arguments": ' + "[" * 100_000, None, 0, True),
        ("llama3", '{"answer": 3}', '{"answer": 3}', 0, False),
        ("llama3", '{"name": "Bob"}', '{"name": "Bob"}', 0, False),
        ("llama3", '{"name": "weather", "parameters": {"ci', None, 0, True),
        ("llama3", '{"answer": "The weather is good"}', None, 0, False),
        ("llama3", '{"function": "weather", "ci', None, 0, True),
        ("xlam", '["weather", "news"]', None, 0, False),
        ("xlam", '[{"name":"weather"', None, 0, True),
        ("gemma3", "[1] This source describes weather in Bern.", None, 0, False),
        ("pythonic", "[Note: the weather is nice today (in Bern).]", None, 0, False),
        ("pythonic", "[weather(city='Be", None, 0, True),
        ("phi4_functools", "Use functools.lru_cache, then weather.", None, 0, False),
        ("phi4_functools", "functools[weather]", None, 0, True),
        ("phi4_functools", 'functools [{"name": "weather"}]', "", 1, False),
        ("phi4_functools", 'I look.\n\nfunctools\n[{"name": "weather"}]', "I look.", 1, False),
        ("phi4_functools", 'functools[{"name": "wea', None, 0, True),
        ("phi4_functools", 'functools[{"na', None, 0, True),
        ("phi4_functools", 'functools[{"name": "other"}, {"name": "weather"}]', "", 2, False),
        ("phi4_functools", 'functools\n\n{"name": "weather", "arguments": {"city": "Bern"}}', "", 1, False),
        ("qwen3_coder", "Use `<function=weather>` to begin.", None, 0, False),
        ("llama3", '{"name": "wea', None, 0, True),
        ("phi4_functools", 'functools[{"name": "weather", "arguments": {"city": "Be', None, 0, True),
        ("pythonic", "[1, 2]", "[1, 2]", 0, False),
        ("pythonic", "[weather('Bern')]", None, 0, True),
        ("pythonic", "[weather(city=open('x'))]", None, 0, True),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nBern", None, 0, True),
        ("qwen3_coder", f"I look.\n{_BARE}\n</tool_call>", "I look.", 1, False),
        ("qwen3_coder", f"{_BARE}\n{_BARE}", "", 2, False),
        ("qwen3_coder", "<function=weather></function>", "", 1, False),
        ("qwen3_coder", _BARE[:-5], None, 0, True),
        ("qwen3_coder", f"{_MENTION}\n<tool_call>{_BARE}</tool_call>", _MENTION, 1, False),
        ("qwen3_coder", f"Well.\n<tool_call>{_BARE}</tool_call>\n{_MENTION}", f"Well.\n{_MENTION}", 1, False),
        ("qwen3_coder", f"So:\n{_BARE}\n<tool_call>{_BARE}</tool_call>", f"So:\n{_BARE}", 1, False),
        ("qwen3_coder", f"{_MENTION}\n{_CUT_OFF}", None, 0, True),
        ("qwen3_coder", f"I look.\n{_CUT_OFF}", None, 0, True),
        ("qwen3_coder", _BARE.replace("weather", "go"), None, 0, False),
        ("qwen3_coder", f"<tool_call>{_BARE.replace('weather', 'go')}</tool_call>", "", 1, False),
        ("gpt_oss", "no channel", "no channel", 0, False),
        ("gpt_oss", ' to=functions.weather <|constrain|>json<|message|>{"city', None, 0, True),
        ("gpt_oss", " to=functions.weather, or to=functions.lookup_name<|message|>{}", None, 0, True),
        ("glm45", "<tool_call>weather</tool_call>", "", 1, False),
        ("glm45", "<tool_call>weather", None, 0, True),
        ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Bern</arg_value>\n", None, 0, True),
        ("glm45", '<tool_call>{"name": "weather", "arguments": {}}</tool_call>', None, 0, True),
        ("glm45", "<tool_call>{<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>", None, 0, True),
        ("glm45", "Write <tool_call> and </tool_call> around calls", None, 0, True),
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_what_is_no_complete_call_stays_in_the_text(name, text, content, calls, malformed, size):
    piece = parsed(name, text, cuts=tuple(range(size, len(text), size)) if len(text) < 1000 else ())
    assert piece.content == (text if content is None else content)
    assert (len(piece.calls), piece.malformed, piece.reasoning) == (calls, malformed, "")


@pytest.mark.parametrize(("name", "text"), [("qwen3_coder", "Use <function=go> and <parameter=city> tags.")])
def test_an_answer_about_calls_is_streamed(name, text):
    parser = message_parser(MessageFormats.of(ALL_FAMILIES[name].source), "", TOOLS)
    assert "".join(parser.feed(character).content for character in text) == text


_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
_KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)


@pytest.mark.parametrize(
    ("tools", "reasoning", "thoughts", "rest", "content", "calls"),
    [
        ("hermes", "think", "<think>Hm", f"\n{_CALL}{_CALL}", "", 2),
        ("kimi_k2", "think", "<think>Hm", _KIMI_CALL, "", 1),
        ("openai", "harmony", "<|channel|>analysis<|message|>Hm", " to=functions.weather<|message|>{}<|call|>", "", 1),
        ("hermes", "think", f"<think>As {_CALL}", "</think>No.", "No.", 0),
        ("hermes", "think", f"<think>As <tool_call> or {_CALL}", f"</think>So {_CALL}", "So", 1),
        ("hermes", "think", f"<think>As {_CALL} and", "", "", 0),
        ("hermes", "think", f"<think>As {_CALL[:30]}", "", "", 0),
        ("hermes", "think", f"<think>As {_CALL.replace('weather', 'go')}", "", "", 0),
        ("kimi_k2", "think", f"<think>As {_KIMI_CALL[:-5]}", "", "", 0),
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_a_call_ends_reasoning_if_nothing_else_does(tools, reasoning, thoughts, rest, content, calls, size):
    parser, text = message_parser(MessageFormats(tools, reasoning), "", TOOLS), thoughts + rest
    pieces = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(parser.finish())
    thought = re.sub(r"^<think>|.*<.message.>", "", thoughts)
    assert ("".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces)) == (
        thought,
        content,
    )
    assert (len(pieces[-1].calls), pieces[-1].malformed) == (calls, False)


_HARMONY = "<|channel|>analysis<|message|>", "As to=functions.lookup_name or another", "<|end|>"
_HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>"
_GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>'


@pytest.mark.parametrize(
    ("tools", "reasoning", "start", "thought", "end", "call"),
    [
        ("hermes", "think", "<think>", f"As {_CALL}", "</think>", _CALL),
        ("hermes", "think", "<think>", "As <tool_call> and", "</think>", ""),
        ("glm45", "think", "<think>", "As <tool_call> and", "</think>", ""),
        ("gemma4", "gemma4", "<|channel>thought\n", f"As {_GEMMA_CALL}", "<channel|>", _GEMMA_CALL),
        ("openai", "harmony", *_HARMONY, _HARMONY_CALL),
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_a_call_in_reasoning_that_ends_is_a_mention(tools, reasoning, start, thought, end, call, size):
    """Also if the delimiters of reasoning are no text; what follows is streamed."""
    parser = message_parser(MessageFormats(tools, reasoning), "", TOOLS, (start, end))
    text = start + thought + end + "So." * (tools != "openai") + call
    pieces = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(piece.reasoning for piece in pieces) == thought
    assert "".join(piece.content for piece in pieces) == "So." * (tools != "openai")
    last = parser.finish()
    assert (last.content, last.reasoning, last.malformed) == ("", "", False)
    assert [each["function"]["name"] for each in last.calls] == ["weather"] * bool(call)


@pytest.mark.parametrize("kind", ["", " <|constrain|>json", "<|constrain|>json", " json"])
@pytest.mark.parametrize("channel", ["final", "commentary"])
@pytest.mark.parametrize("size", [1, 10**6])
def test_content_of_gpt_oss_with_a_content_type(channel, kind, size):
    text = f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>{channel}{kind}<|message|>{{}}"
    piece = parsed("gpt_oss", text, "<|start|>assistant", tuple(range(size, len(text), size)))
    assert (piece.content, piece.reasoning, piece.calls, piece.malformed) == ("{}", "Hm", (), False)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Well. <think>Hm</think>So.", "Well. So."),
        ("Well.\n\n<think>Hm</think>\nSo.", "Well.\n\nSo."),
        ("Well.<think>Hm</think> So.", "Well. So."),
        ("Well<think>Hm</think>, so.", "Well, so."),
        ("\n<think>Hm</think>\n\nSo.", "So."),
    ],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_reasoning_between_two_parts_of_content_does_not_join_them(text, content, size):
    piece = parsed("hermes", text, cuts=tuple(range(size, len(text), size)))
    assert (piece.content, piece.reasoning) == (content, "Hm")


@pytest.mark.parametrize(
    ("parameters", "text", "calls"),
    [
        (None, "<|message|>", 1),
        ({"type": "object", "properties": {}}, " <|constrain|>json<|message|>\n", 1),
        ({"type": "object", "properties": {"zone": {}}}, "<|message|>", 1),
        ({"type": "object", "properties": {"zone": {}}, "required": ["zone"]}, "<|message|>", 0),
        (None, "", 0),
        (None, "adays<|message|>", 1),
        (None, " with a query<|channel|>commentary to=functions.now<|message|>", 0),
        (None, "<|channel|>commentary to=functions.then<|message|>", 0),
        (None, " <|constrain|>application/json<|message|>", 1),
        (None, " <|constrain|>write: edit file with content.<|message|>", 1),
        (None, "<|channel|>commentary<|channel|>commentary json<|message|>", 1),
        (None, "<|channel|>commentary to=functions.now <|constrain|>json<|message|>", 1),
    ],
)
def test_a_call_of_gpt_oss_without_text_for_arguments_is_cut_off_if_it_requires_some(parameters, text, calls):
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    parser = message_parser(MessageFormats("openai", "harmony"), "", tools)
    parser.feed(f"<|channel|>commentary to=functions.now{text}")
    piece = parser.finish()
    assert [call["function"]["arguments"] for call in piece.calls] == ["{}"] * calls
    assert piece.malformed is not bool(calls)


@pytest.mark.parametrize("folder", ["src/insitu/starter/model", "examples/help_desk/model"])
def test_models_of_this_repository_write_as_hermes(folder):
    root = Path(__file__).parents[3]
    assert MessageFormats.of(*chat_template(root / folder)) == ("hermes", "none", None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", f"[weather(days={'-' * 20_000}1)]"),
        ("pythonic", f"[{'a.' * 20_000}b(days=1)]"),
        ("qwen3_coder", "<tool_call>" + "<function=weather>" * 20_000),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>" * 20_000),
        ("hermes", "<tool_call>" + "1 " * 50_000),
    ],
)
def test_a_model_that_repeats_itself_is_read(name, text):
    """Recursion would end, and patterns that search from each beginning take minutes."""
    assert parsed(name, text).content == text


@pytest.mark.slow
def test_a_template_that_loops_is_left_alone():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert dropped_reasoning(endless) is None
