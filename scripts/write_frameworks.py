"""Writes docs/frameworks.md from the results of `make test WITH=frameworks`, the framework modules and the examples."""

import ast
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from insitu.errors import install_command

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests/with_frameworks" / "results"
PAGE = ROOT / "docs" / "frameworks.md"
MODES = ("whole", "streamed")
HEAD = """# Agent frameworks

`builder.get_llm(name, wrapper_type=NAME)` returns a framework's native model object, and every completion it samples is
captured for training. The packages are extras of insitu; install them in the root of the clone, with `.venv` activated.

| framework | `wrapper_type` | package | tested version | streaming | tool steps | if a tool raises | concurrent calls |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
## What is tested

`make test WITH=frameworks` tests each row of the table with the real package against a real `insitu backend`: an agent
with one tool runs 12 episodes concurrently, the captured token ids and logprobs are compared with what the backend
sampled, every model call and tool run must belong to its own episode, and one training job must change the policy
version. The tool raises an exception for one of three questions. Its `TOOL_END` step carries the error; the framework
either reports it to the model and continues, or ends its run, which fails the episode.

## Other frameworks

An agent that calls its model over HTTP needs none of this: see [external agents](guides/external-agents.md). For a
framework that accepts an official OpenAI or Anthropic client, pass it the client from `wrapper_type="openai"` or
`"anthropic"`.

If a model is not called over HTTP, its calls are taken from the steps that the framework reports. LangChain and
LlamaIndex report them once `insitu.integrations.frameworks.langchain` or `.llama_index` is imported.
`parse_to_openai_messages` converts these steps, and those of ADK, into a conversation for [your own trajectory
builder](guides/extend.md#a-trajectory-builder):

```python
from langchain_core.language_models import FakeListChatModel

import insitu.integrations.frameworks.langchain
from insitu.integrations.nat.base_parser import parse_to_openai_messages
from insitu.workflow.context import EpisodeScope

with EpisodeScope() as episode:
    FakeListChatModel(responses=["blue"]).invoke("What colour is the sky?")
question, answer = parse_to_openai_messages(episode.steps)
assert (question["content"], answer["content"]) == ("What colour is the sky?", "blue")
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
        f"`{install_command(name.replace('_', '-'))}`",
        f"{found['package']} {found['version']}",
        "yes" if "streamed" in found else "no",
        "yes",
        "reported to the model" if found["goes_on"] else "ends the run",
        str(max(found[mode]["calls_at_once"] for mode in MODES if mode in found)),
    ]
    return f"| {' | '.join(cells)} |\n"


def _section(name: str, found: dict[str, Any]) -> str:
    example = Path("examples/frameworks") / f"{name}_agent.py"
    return (
        f"\n## {found['framework']}\n\n{_prose(ROOT / f'src/insitu/integrations/frameworks/{name}.py')}\n\n"
        f"```python from={example}\n{_agent(ROOT / example)}```\n\n[Full example](../{example}).\n"
    )


def _prose(module: Path) -> str:
    """Returns a module's docstring without title and code."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    first, *others = docstring.split("\n\n")
    about = " ".join(first.split()).partition(": ")[2]
    prose = [
        f"`insitu.integrations.frameworks.{module.stem}`: {about}",
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
    """Returns the parts of an example that use insitu: its imports and the body of the `agent` factory."""
    source = example.read_text()
    tree = ast.parse(source)
    made = next(n for n in tree.body if isinstance(n, ast.AsyncFunctionDef) and n.name == "agent")
    body = source.splitlines()[made.body[0].lineno - 1 : made.body[-1].lineno - 1]  # to the `yield` that ends it
    return "".join(_imports(tree)) + textwrap.dedent("\n".join(body)).rstrip() + "\n"


def _imports(tree: ast.Module) -> Iterator[str]:
    found = [
        n
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("insitu.integrations.frameworks")
    ]
    yield from (f"{ast.unparse(node)}\n" for node in found)
    if found:
        yield "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
