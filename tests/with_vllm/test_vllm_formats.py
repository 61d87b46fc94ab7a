"""What vLLM's parsers make of the outputs of each family, well-formed and not, and where they differ from ours.

Where they differ, ours follow the documentation of the model, or lose nothing of what was sampled.
"""

import json
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from message_formats import ALL_FAMILIES, TOOLS, Family
from message_strategies import NUM_OUTPUTS, Output, outputs
from taught_models import cut_off, tokenizer_of

from insitu.formats.parser import MessageFormats, message_parser

REASONING = {
    "harmony": "openai_gptoss",
    "mistral": "mistral",
    "granite": "granite",
    "think": "deepseek_r1",  # of those for <think>: the one without assumptions about a template
}
TOOL_PARSERS = {"deepseek_v31": "deepseek_v31", "gemma3": "pythonic", "llama4_json": "llama4_json"}
"""vLLM's names, where they are not ours: it has two for DeepSeek, and recommends `pythonic` for Gemma 3."""
COMPARED = [name for name in ALL_FAMILIES if name != "gemma4"]
"""vLLM's parser of Gemma 4 needs its tokens, and reads numbers with an exponent as text."""
OTHER: dict[str, tuple[Callable[[Output], bool], str]] = {
    "phi4": (lambda output: bool(output.calls), "the model card has <|tool_call|>, vLLM reads functools only"),
    "phi4_functools": (
        lambda output: bool(output.calls),
        "vLLM drops text before the calls, and cuts the list at its first closing bracket",
    ),
    "llama3_ipython": (lambda output: bool(output.calls and output.content), "vLLM drops text before <|python_tag|>"),
    "llama4_json": (
        lambda output: len(output.calls) > 1 or bool(output.calls and output.content),
        "the template of Llama 4 puts no semicolon between calls, and vLLM drops text before them",
    ),
    "llama4": (lambda output: bool(output.calls and output.content), "for vLLM a message with text has no calls"),
}
"""Well-formed outputs that vLLM reads otherwise, by family, and why ours is right."""


class Parts(NamedTuple):
    """A message; white space around its texts is left out: vLLM keeps it, the code of the models' cards does not."""

    content: str
    reasoning: str
    calls: list[tuple[str, Any]]


def ours(family: Family, text: str, prompt: str = "") -> tuple[Parts, bool]:
    """And whether it has malformed calls."""
    parser = message_parser(MessageFormats.of(family.source), prompt, TOOLS)
    first, last = parser.feed(text), parser.finish()
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in last.calls]
    content, reasoning = first.content + last.content, first.reasoning + last.reasoning
    return Parts(content.strip(), reasoning.strip(), calls), last.malformed


class Theirs:
    """vLLM's parser of a family, as its server makes it."""

    def __init__(self, name: str) -> None:
        with warnings.catch_warnings(action="ignore"):
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.parser.parser_manager import ParserManager
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        family = ALL_FAMILIES[name]
        tools = TOOL_PARSERS.get(name, family.tools)
        self._kinds = {
            reasons: ParserManager.get_parser(
                tools,
                REASONING[family.reasoning] if reasons else None,
                enable_auto_tools=True,
                is_harmony=family.tools == "openai",
            )
            for reasons in {family.reasoning == "harmony", family.reasoning != "none"}
        }
        self._tokenizer = tokenizer_of(family)
        self._tokenizer.add_tokens(["<|python_tag|>"], special_tokens=True)  # without it there is no parser of Llama
        if family.tools == "openai":
            from openai_harmony import load_harmony_encoding

            encoding = load_harmony_encoding("HarmonyGptOss")
            self._ids = lambda text: encoding.encode(text, allowed_special="all")
        else:
            self._ids = lambda text: self._tokenizer.encode(text, add_special_tokens=False)
        self._request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "Well?"}], tools=TOOLS)

    def __call__(self, text: str, *, reasons: bool) -> Parts:
        """The parsers of <think> take a text without it as reasoning, so that they get outputs with reasoning only."""
        kind = self._kinds[reasons if reasons in self._kinds else not reasons]
        with warnings.catch_warnings(action="ignore"):
            reasoning, content, calls = kind(self._tokenizer, self._request.tools).parse(
                text, self._request, enable_auto_tools=True, model_output_token_ids=self._ids(text)
            )
        parsed = [(call.name, _json(call.arguments)) for call in calls or []]
        return Parts((content or "").strip(), (reasoning or "").strip(), parsed)


def _json(text: str) -> Any:
    """Arguments that are no JSON stay text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize("name", COMPARED)
def test_well_formed_outputs_are_what_vllm_reads(name: str) -> None:
    theirs, family = Theirs(name), ALL_FAMILIES[name]
    is_other, _ = OTHER.get(name, (lambda output: False, ""))
    equal, other = 0, 0

    @settings(
        max_examples=NUM_OUTPUTS,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
    )
    @given(data=st.data())
    def compare(data: st.DataObject) -> None:
        nonlocal equal, other
        output = data.draw(outputs(name))
        mine, malformed = ours(family, output.text, output.prompt)
        assert mine == (output.content, output.reasoning, output.calls)
        assert not malformed
        if is_other(output):
            other += 1
        else:
            equal += 1
            assert theirs(output.text, reasons=bool(output.reasoning)) == mine

    compare()
    assert equal >= NUM_OUTPUTS // 10
    print(f"{name}: {equal} equal, {other} of a kind that vLLM reads otherwise")


KEPT, PARTIAL, LOST, BROKEN = "kept", "partial", "lost", "broken"
MALFORMED = {
    "qwen3_coder": PARTIAL,
    "glm45": PARTIAL,
    "minimax_m2": PARTIAL,
    "deepseek_v3": LOST,
    "deepseek_text": LOST,
    "deepseek_v31": LOST,
    "phi4_functools": LOST,
    "mistral": BROKEN,
    "gpt_oss": BROKEN,
    "granite": BROKEN,
    "kimi_k2": BROKEN,
}
"""What vLLM makes of a call that ends too early: text as ours do, a call with the arguments that are complete, nothing,
or a call whose arguments are no JSON. An agent would act on half a call, or fail; and training could not count it."""


@pytest.mark.parametrize("name", COMPARED)
def test_a_call_that_ends_too_early(name: str) -> None:
    text = cut_off(ALL_FAMILIES[name])
    assert ours(ALL_FAMILIES[name], text) == ((text.strip(), "", []), True)
    content, _, calls = Theirs(name)(text, reasons=False)
    if not calls:
        kind = KEPT if '"日本", null' in content else LOST
    else:
        ((called, arguments),) = calls
        assert called == "weather"
        kind = BROKEN if isinstance(arguments, str) else PARTIAL
    assert kind == MALFORMED.get(name, KEPT), (content, calls)
