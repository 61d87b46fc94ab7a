"""Writes docs/frameworks.md from the results of `make test WITH=frameworks`, the framework modules and the examples."""

import ast
import json
import textwrap
from pathlib import Path
from typing import Any

from insitu.errors import install_command

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests/with_frameworks" / "results"
PAGE = ROOT / "docs" / "frameworks.md"
AGENTS = Path("src/insitu/starter/agents")
"""What `insitu init --framework` writes."""
MODES = ("whole", "streamed")
HEAD = """# Agent frameworks

`insitu init NAME --framework NAME` writes a project with one of the agents below. Its file names the function that
builds the agent, and the framework whose model object the function is given:

```text
workflow: {_type: python, function: "agent:build", framework: langgraph, model: student}
```

Every completion that the model object samples is captured for training. In a [component of your
own](guides/extend.md#register-a-component), `builder.get_llm(name, wrapper_type=NAME)` returns the object, as in the
full examples. The packages are extras of insitu; install them in the root of the clone, with `.venv` activated. Some
exclude one another: [two environments](#two-environments) serve one run.

| framework | `wrapper_type` | package | tested version | streaming | tool steps | if a tool raises | concurrent calls |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
## What is tested

`make test WITH=frameworks`: each row of the table with the real package and a real backend. 12 concurrent episodes have
a tool that raises for one question in three; the captured token ids and logprobs are those that the backend sampled,
every call and tool run belongs to its own episode, and a job changes the policy version.

## Two environments

crewai, autogen, verifiers, openenv, inspect and vllm need versions of packages that some of the others exclude;
`[tool.uv]` in `pyproject.toml` lists the pairs. The agent and the control plane are in one environment, the backend in
another, `insitu backend --model ... --output_dir ...`, to which the file's trainer adapter has the `url` in place of
`model`. vLLM can have [its own](guides/scale.md#sample-by-vllm), and an agent too, as [a
program](guides/external-agents.md).

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
    example, agent = (Path("examples/frameworks") / f"{name}_agent.py", AGENTS / f"{name}.py.txt")
    return (
        f"\n## {found['framework']}\n\n{_prose(ROOT / f'src/insitu/integrations/frameworks/{name}.py')}\n\n"
        f"```python from={agent}\n{(ROOT / agent).read_text()}```\n\n[With `get_llm`](../{example}).\n"
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


if __name__ == "__main__":
    PAGE.write_text(page())
