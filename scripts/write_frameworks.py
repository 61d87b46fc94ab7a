"""Writes docs/frameworks.md from what `make test-frameworks` has found, the modules and the examples."""

import ast
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests_frameworks" / "results"
PAGE = ROOT / "docs" / "frameworks.md"
MODES = ("whole", "streamed")
HEAD = """# Agent frameworks

`builder.get_llm(name, wrapper_type=NAME)` gives a framework's own model object, and everything it samples is captured
for training. Each line was tested by `make test-frameworks` with the real package against a real `insitu backend`: an
agent with one tool, 12 episodes at once, token ids and log-probabilities compared with what the backend had sampled,
every call and every tool run in the episode that made it, and one training job that moved the version of the policy.
To one of three questions the tool raises: its TOOL_END tells the error, and the framework either tells it to the model
and goes on, or ends its run, which then is a failed episode.

| framework | `wrapper_type` | package | version | streaming | tool steps | a tool that raises | calls at once |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
## Anything else

An agent that talks to a model over HTTP needs none of this: [external agents](guides/external-agents.md) have an
address for each episode. Neither does a framework that takes an official OpenAI or Anthropic client: give it that of
`wrapper_type="openai"` or `"anthropic"`.

A model that is not reached over HTTP has no wire to be captured at. Its calls are in the episode's steps where its
framework reports them: LangChain's and LlamaIndex's do as soon as `insitu.frameworks.langchain` or `.llama_index` is
imported. `parse_to_openai_messages` makes the dialogue of them, and of ADK's requests and responses, for a trajectory
builder of [your own](guides/extend.md#a-trajectory-builder):

```python
from langchain_core.language_models import FakeListChatModel

import insitu.frameworks.langchain
from insitu.toolkit.parsers.base_parser import parse_to_openai_messages
from insitu.workflow.context import EpisodeScope

with EpisodeScope() as episode:
    FakeListChatModel(responses=["blue"]).invoke("What colour is the sky?")
asked, answer = parse_to_openai_messages(episode.steps)
assert (asked["content"], answer["content"]) == ("What colour is the sky?", "blue")
```
"""


def page() -> str:
    found = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    names = sorted(found, key=lambda name: found[name]["framework"].lower())
    lines, sections = (_line(name, found[name]) for name in names), (_section(name, found[name]) for name in names)
    return HEAD + "".join(lines) + "".join(sections) + TAIL


def _line(name: str, found: dict[str, Any]) -> str:
    cells = [
        f"[{found['framework']}](#{found['framework'].lower().replace(' ', '-')})",
        f"`{name}`",
        f"`pip install 'insitu[{name.replace('_', '-')}]'`",
        f"{found['package']} {found['version']}",
        "yes" if "streamed" in found else "no",
        "yes",
        "is told to the model" if found["goes_on"] else "ends the run",
        str(max(found[mode]["calls_at_once"] for mode in MODES if mode in found)),
    ]
    return f"| {' | '.join(cells)} |\n"


def _section(name: str, found: dict[str, Any]) -> str:
    example = Path("examples/frameworks") / f"{name}_agent.py"
    return (
        f"\n## {found['framework']}\n\n{_prose(ROOT / f'src/insitu/frameworks/{name}.py')}\n\n"
        f"```python from={example}\n{_agent(ROOT / example)}```\n\n[The whole example](../{example}).\n"
    )


def _prose(module: Path) -> str:
    """A module's docstring without its title and without code."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    first, *others = docstring.split("\n\n")
    about = " ".join(first.split()).partition(": ")[2]
    prose = [
        f"`insitu.frameworks.{module.stem}`: {about}",
        *(" ".join(other.split()) for other in others if not _is_code(other)),
    ]
    return "\n\n".join(textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) for text in prose)


def _is_code(text: str) -> bool:
    try:
        compile(textwrap.dedent(text), "", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return False
    return True


def _agent(example: Path) -> str:
    """What of an example is about insitu: its imports, and the function that makes the agent, without its frame."""
    source = example.read_text()
    tree = ast.parse(source)
    made = next(n for n in tree.body if isinstance(n, ast.AsyncFunctionDef) and n.name == "agent")
    body = source.splitlines()[made.body[0].lineno - 1 : made.body[-1].lineno - 1]  # to the `yield` that ends it
    return "".join(_imports(tree)) + textwrap.dedent("\n".join(body)).rstrip() + "\n"


def _imports(tree: ast.Module) -> Iterator[str]:
    found = [n for n in tree.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("insitu.frameworks")]
    yield from (f"{ast.unparse(node)}\n" for node in found)
    if found:
        yield "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
