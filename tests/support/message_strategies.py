"""Messages of models for hypothesis: `outputs(name)` for a family of `message_formats`."""

import os
from typing import Any, NamedTuple

from hypothesis import strategies as st
from message_formats import ALL_FAMILIES, completion, message

NUM_OUTPUTS = int(os.environ.get("INSITU_FORMAT_OUTPUTS", "8"))
"""Outputs of each family that are generated."""
_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<>[]{}`|｜"), max_size=12)
_PLAIN = st.from_regex(r"[A-Za-zäöü日🙂][A-Za-z äöü日🙂,.!]{0,12}[a-z.]", fullmatch=True)
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e6, 1e6, width=32) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_WEATHER = st.fixed_dictionaries(
    {},
    optional={
        "city": _TEXT,
        "days": st.integers(-(2**40), 2**40),
        "scale": st.floats(-1e6, 1e6, width=32),
        "brief": st.booleans(),
        "places": st.lists(_VALUE, max_size=3),
        "options": st.dictionaries(_TEXT, _VALUE, max_size=3),
    },
)
_CALL = st.tuples(st.just("weather"), _WEATHER) | st.tuples(
    st.just("lookup_name"), st.fixed_dictionaries({"query": _TEXT})
)


class Output(NamedTuple):
    """A message, and its text after a prompt."""

    content: str
    calls: list[tuple[str, dict[str, Any]]]
    reasoning: str
    prompt: str
    text: str


@st.composite
def outputs(draw: st.DrawFn, name: str) -> Output:
    """What a model of the family may write: such a message has content or calls, and reasoning if the family has it."""
    family = ALL_FAMILIES[name]
    content, calls = draw(st.just("") | _PLAIN), draw(st.lists(_CALL, max_size=3))
    reasoning = draw(st.just("") | _PLAIN) if family.reasoning != "none" else ""
    if calls and family.is_whole:
        content = ""
    if name == "gpt_oss":
        calls = calls[:1]  # a call ends the message
    return Output(content, calls, reasoning, *completion(family, message(content, calls, reasoning)))
