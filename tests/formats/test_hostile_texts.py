"""Texts that no model should write: they are parsed in linear time, and alike however a stream cuts them."""

import time
from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_formats import ALL_FAMILIES, TOOLS, completion, message

from insitu.formats.parser import MessageFormats, Piece, message_parser
from insitu.formats.registry import NONE, REASONING, reasoning_format, tool_format
from insitu.formats.registry import TOOLS as FORMATS
from insitu.schemas.parts import names

REASONING_OF = {family.tools: family.reasoning for family in ALL_FAMILIES.values()}
SPECIAL = ("<|im_end|>", "<|start|>", "<|eom|>")
TEMPLATE = "response_template"
PARTS = [
    *(
        "{",
        "a",
        " ",
        "[",
        '"',
        "'",
        "(",
        "a.",
        "-",
        "{}",
        "; ",
        "1 ",
        " \n",
        "\\",
        "lambda:",
        "weather(a=1), ",
        '{"name":',
        "not ",
    ),
    *("<function=weather>", "<parameter=a>", "</function>", '<invoke name="weather">', '<parameter name="a">'),
    *("<arg_key>", "<arg_key>a</arg_key><arg_value>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]"),
    *('<|"|>', "call:", ",a:", "<|python_end|>", "<|message|>", "\n```json\n"),
]
each_format = pytest.mark.parametrize("name", [*names(FORMATS), TEMPLATE])


def formats_of(name: str, reasoning: str | None = None) -> MessageFormats:
    if name != TEMPLATE:
        return MessageFormats(name, reasoning or REASONING_OF.get(name, NONE))
    call = {"type": "function", "function": "{content}"}
    fields = {
        "content": {"content": "text", "repeats": True, "join": ""},
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True, "transform": call},
    }
    return MessageFormats.of("", {"start_anchor": "<|im_start|>assistant\n", "fields": fields})


def parsed(formats: MessageFormats, text: str, cuts: tuple[int, ...] = (), special: tuple[str, ...] = ()) -> Piece:
    parser = message_parser(formats, "", TOOLS, special)
    pieces = [parser.feed(text[start:end]) for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    pieces.append(parser.finish())
    calls = tuple(call["function"] for call in pieces[-1].calls)
    content, reasoning = ("".join(getattr(piece, key) for piece in pieces) for key in ("content", "reasoning"))
    return Piece(content, reasoning, calls, pieces[-1].malformed)


def delimiters(name: str, reasoning: str) -> list[str]:
    regions = (("<call>", "</call>"),)
    if name != TEMPLATE:
        regions = (*tool_format(name).regions, *tool_format(name).bare_regions(TOOLS))
    form = None if reasoning == NONE else reasoning_format(reasoning)
    thought = () if form is None else chain(form.start, form.end, *(form.content or ()))
    return [*filter(None, chain(*regions)), *thought]


def starts(name: str) -> list[str]:
    return [*"[{"] if name == TEMPLATE or not tool_format(name).regions else [tool_format(name).regions[0][0]]


def hostile(name: str) -> Iterator[tuple[str, str]]:
    """The beginning of a text, and what it repeats."""
    formats = formats_of(name)
    marks = delimiters(name, NONE)
    yield from (("", mark) for mark in marks)
    yield from (("", start + end) for start, end in zip(marks[::2], marks[1::2], strict=False))
    yield from ((start, part) for start in starts(name) for part in PARTS)
    if formats.template is None and tool_format(name).whole:
        yield from ((tool_format(name).whole[0], part) for part in PARTS)


def seconds(formats: MessageFormats, text: str, size: int) -> float:
    began = time.thread_time()
    parsed(formats, text, tuple(range(size, len(text), size)))
    return time.thread_time() - began


@pytest.mark.parametrize(
    ("name", "reasoning"),
    [*((name, None) for name in (TEMPLATE, *names(FORMATS))), ("hermes", "harmony"), ("openai", "harmony")],
)
def test_four_times_the_text_takes_no_sixteen_times_as_long(name: str, reasoning: str | None) -> None:
    formats = formats_of(name, reasoning)
    for start, part in hostile(name):
        short, long = (f"{start}{part * n} x y!" for n in (250, 1000))
        for size in (16, 10**6):
            for _ in range(3):  # an interrupted measurement is repeated
                if (slow := seconds(formats, long, size)) < 0.05 or slow < 10 * (
                    quick := seconds(formats, short, size)
                ):
                    break
            else:
                pytest.fail(
                    f"{start}{part} ... in pieces of {size}: {quick:.3f} s, {slow:.3f} s for four times as much"
                )


@each_format
@given(data=st.data())
def test_a_text_is_read_alike_at_every_cut(name: str, data: st.DataObject) -> None:
    reasoning = data.draw(st.sampled_from([REASONING_OF.get(name, NONE), *names(REASONING)]))
    formats, special = formats_of(name, reasoning), () if name == TEMPLATE else SPECIAL
    marks = delimiters(name, "think" if name == TEMPLATE else reasoning)
    calls = [
        completion(family, message("", [("weather", {"city": " B "})]))[1]
        for family in ALL_FAMILIES.values()
        if family.tools == name
    ] or ['<call>{"name": "weather", "arguments": {"city": " B "}}</call>']
    part = st.sampled_from([*marks, *calls, *special, *PARTS, " ", "\n", "  \n", "Bern", "[", "{"])
    parts = data.draw(st.lists(part | st.sampled_from(marks or calls).map(lambda mark: mark[:-1]), max_size=7))
    text = "".join(parts)
    whole = parsed(formats, text, (), special)
    assert parsed(formats, text, tuple(range(1, len(text))), special) == whole
    for cut in range(1, min(len(text), 60)):
        assert parsed(formats, text, (cut,), special) == whole
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    assert parsed(formats, text, tuple(cuts), special) == whole
