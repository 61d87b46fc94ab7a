"""The formats of tool calls and of reasoning by name, and those that a chat template asks for.

An installed package adds its own as entry points of the groups `insitu.tool_formats` and `insitu.reasoning_formats`.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from insitu.formats import syntaxes, tool_calls
from insitu.formats.forced_calls import CallSyntax
from insitu.formats.tool_calls import ToolCall, Tools, call_id, tool_names
from insitu.schemas.parts import load_named, names

_TAGS_OF_TEMPLATE = re.compile(r"{[{%](.*?)[%}]}", re.DOTALL)
_STRINGS = re.compile(r"'(?:\\.|[^'\\])*'" + r'|"(?:\\.|[^"\\])*"', re.DOTALL)
TOOLS, REASONING = "tool_formats", "reasoning_formats"
NONE = "none"
"""Leaves tool calls, or reasoning, in the text."""
Delimiters = tuple[tuple[str, str | None], ...]
"""Of regions: how they begin and end; without an end, a region lasts until the message does."""


@dataclass(frozen=True)
class ToolFormat:
    """How tool calls are written. `parse` gets the text of a region and the tools of the request.

    `regions` are the delimiters around calls. Content that begins with a character of `whole` is calls if it can be
    parsed as calls of the request's tools.
    """

    markers: tuple[str, ...]
    """A chat template is for this format if it has all words of one of these."""
    parse: Callable[[str, Tools], Iterable[ToolCall]]
    regions: Delimiters = ()
    whole: str = ""
    new_id: Callable[[], str] = call_id
    syntaxes: tuple[CallSyntax, ...] = ()
    """How calls are written that a request forces; empty if it cannot force any."""
    needs_end: bool = False
    """Whether a region without its end is no calls, as `parse` cannot see that they are cut off."""
    bare: Delimiters = ()
    """Of calls of the request's tools that begin with the first delimiter, in which `NAME` is that of a tool.

    They are text beside calls in `regions` if they cannot be parsed.
    """

    def bare_regions(self, tools: Tools) -> Delimiters:
        known = sorted(tool_names(tools))
        return tuple(dict.fromkeys((start.replace("NAME", name), end) for start, end in self.bare for name in known))

    def calls(self, text: str, tools: Tools) -> list[ToolCall]:
        """The calls in the text of a region. Raises ValueError if it is not complete calls."""
        try:
            return [*self.parse(text, tools)]
        except RecursionError:
            raise ValueError("nested too deeply") from None


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is written: between one of `start` and one of `end`.

    `content` are such delimiters of text that is content; what stands between them and reasoning is content too. With
    `begins`, a message begins in the midst of reasoning.
    """

    markers: tuple[str, ...]
    """A chat template is for this format if it has all words of one of these."""
    start: tuple[str, ...]
    end: tuple[str, ...]
    content: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    begins: bool = False
    after: str = ""
    """Stands between the end of reasoning and the calls."""


_TAGS = (("<tool_call>", "</tool_call>"),)
_TURN = "<|start|>assistant"
_CHANNELS = [f"{turn}<|channel|>{name}" for turn in (_TURN, "") for name in ("commentary", "analysis")]
OPENAI = ToolFormat(
    ("<|channel|> <|start|>",),
    tool_calls.harmony_calls,
    tuple((f"{before} to=functions.", "<|call|>") for before in (_TURN, *_CHANNELS, "")),
    syntaxes=syntaxes.OPENAI,
)
_SECTION = (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),)
KIMI_K2 = ToolFormat(
    ("<|tool_calls_section_begin|>", "<|im_middle|>"), tool_calls.kimi_calls, _SECTION, syntaxes=syntaxes.KIMI_K2
)
_CALLS = (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),)
DEEPSEEK_V3 = ToolFormat(("<｜tool▁calls▁begin｜>",), tool_calls.deepseek_calls, _CALLS, syntaxes=syntaxes.DEEPSEEK_V3)
_MINIMAX_TAGS = (("<minimax:tool_call>", "</minimax:tool_call>"),)
_minimax_calls = partial(tool_calls.tagged_calls, tool_calls.MINIMAX)
MINIMAX_M2 = ToolFormat(("<minimax:tool_call>",), _minimax_calls, _MINIMAX_TAGS, syntaxes=syntaxes.MINIMAX_M2)
QWEN3_CODER = ToolFormat(
    ("<tool_call> <function= <parameter=",),
    partial(tool_calls.tagged_calls, tool_calls.QWEN),
    _TAGS,
    bare=(("<function=NAME>", "</tool_call>"),),
    syntaxes=syntaxes.QWEN3_CODER,
)
GLM45 = ToolFormat(("<arg_key>",), tool_calls.glm_calls, _TAGS, needs_end=True, syntaxes=syntaxes.GLM45)
MISTRAL = ToolFormat(
    ("[TOOL_CALLS]",),
    tool_calls.mistral_calls,
    (("[TOOL_CALLS]", None),),
    new_id=tool_calls.short_id,
    syntaxes=syntaxes.MISTRAL,
)
_OPENING = [f"{space}{bracket}" for space in ("", " ", "  ", "\n", "\n\n", "\t") for bracket in "[{"]
PHI4_MINI_JSON = ToolFormat(
    ("functools[", "<|tool_call|>", "<|tool|> <|/tool|>"),
    tool_calls.phi_calls,
    (("<|tool_call|>", "<|/tool_call|>"), *((f"functools{each}", None) for each in _OPENING)),
    syntaxes=syntaxes.PHI4,
)
GRANITE = ToolFormat(
    ("<|start_of_role|>",), tool_calls.json_calls, (("<|tool_call|>", None), *_TAGS), syntaxes=syntaxes.GRANITE
)
HERMES = ToolFormat(("<tool_call>",), tool_calls.json_calls, _TAGS, syntaxes=syntaxes.HERMES)
LLAMA4_PYTHONIC = ToolFormat(
    ("<|header_start|>", "<|python_start|>"),
    tool_calls.llama4_calls,
    (("<|python_start|>", None),),
    whole="[{",
    syntaxes=syntaxes.LLAMA4,
)
_HEADER = "<|start_header_id|>"
LLAMA3_JSON = ToolFormat(
    ("<|python_tag|>", f'{_HEADER} "parameters":', rf"{_HEADER} \"parameters\":", '"parameters": dictionary'),
    tool_calls.json_calls,
    (("<|python_tag|>", None),),
    whole="{",
    syntaxes=syntaxes.LLAMA3,
)
GEMMA3 = ToolFormat(
    ("tool_code", "<start_of_turn>"),
    tool_calls.python_calls,
    (("```tool_code\n", "```"),),
    whole="[",
    syntaxes=syntaxes.GEMMA3,
)
GEMMA4 = ToolFormat(("<|tool_call>",), tool_calls.gemma4_calls, (("<|tool_call>", "<tool_call|>"),))
PYTHONIC = ToolFormat(("[func_name1(",), tool_calls.python_calls, whole="[", syntaxes=syntaxes.PYTHONIC)
XLAM = ToolFormat(('"tool_call_name"',), tool_calls.json_calls, whole="[", syntaxes=syntaxes.XLAM)

THINK = ReasoningFormat(("<think>",), ("<think>",), ("</think>",))
DEEPSEEK_R1 = ReasoningFormat((), ("<think>",), ("</think>",), begins=True)
MAGISTRAL = ReasoningFormat(("[THINK]",), ("[THINK]",), ("[/THINK]",))
GRANITE_THOUGHT = ReasoningFormat(
    ("Here is my thought process:",),
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
GEMMA4_THOUGHT = ReasoningFormat(("<|channel>thought",), ("<|channel>thought\n",), ("<channel|>",))
_ENDS = ("<|end|>", "<|return|>")
_CONTENT_TYPES = ("", " <|constrain|>json", "<|constrain|>json", " json")
_ANSWERS = [f"{name}{kind}" for name in ("final", "commentary") for kind in _CONTENT_TYPES]
HARMONY = ReasoningFormat(
    ("<|channel|> <|start|>",),
    tuple(f"{turn}<|channel|>analysis<|message|>" for turn in (_TURN, "")),
    _ENDS,
    (tuple(f"{turn}<|channel|>{name}<|message|>" for turn in (_TURN, "") for name in _ANSWERS), _ENDS),
    after=_TURN,
)


tool_format: Callable[[str], ToolFormat] = partial(load_named, TOOLS)  # type: ignore[assignment]
reasoning_format: Callable[[str], ReasoningFormat] = partial(load_named, REASONING)  # type: ignore[assignment]
"""These raise PluginError if the package that declares the format cannot be imported."""

_ORDER = {
    TOOLS: (
        *("openai", "kimi_k2", "deepseek_v3", "minimax_m2", "qwen3_coder", "glm45", "mistral", "granite"),
        *("phi4_mini_json", "hermes", "llama4_pythonic", "llama3_json", "gemma4", "gemma3", "pythonic", "xlam"),
    ),
    REASONING: ("harmony", "mistral", "granite", "gemma4", "think"),
}
"""The order in which formats are compared with a template; those of other packages come first."""


def recognize(kind: str, template: str) -> str | None:
    """The format, of tool calls or of reasoning, that a chat template is for."""
    ranks = {name: rank for rank, name in enumerate(_ORDER[kind])}
    for name in sorted(names(kind), key=lambda name: ranks.get(name, -1)):
        form = tool_format(name) if kind == TOOLS else reasoning_format(name)
        if any(all(word in template for word in marker.split(" ")) for marker in form.markers):
            return name
    return None


def format_of(text: str, tools: Tools) -> str | None:
    """The first format in which a text has calls of these tools; None if it has none."""
    known = tool_names(tools)
    for name in names(TOOLS):
        form = tool_format(name)
        bare = form.bare_regions(tools)
        parts = [
            (start if (start, end) in bare else "")
            + re.split(re.escape(end) if end else "$^", text.partition(start)[2], maxsplit=1)[0]
            for start, end in (*form.regions, *bare)
            if start in text
        ]
        if text.lstrip()[:1] in [*form.whole]:
            parts.append(text)
        for part in parts:
            with suppress(ValueError):
                if {call.name for call in form.calls(part, tools)} & known:
                    return name
    return None


def renders_tools(template: str) -> bool:
    """Whether a chat template reads the tools of a request; it may know them, and not write them into the prompt."""
    return any(re.search(r"\btools\b", _STRINGS.sub("", tag)) for tag in _TAGS_OF_TEMPLATE.findall(template))


def no_tool_template(source: str) -> str:
    """The problem of a model whose chat template leaves out tools."""
    return f"the chat template of {source} has no tools; set chat_template to a file with a template that shows them"
