"""Writes docs/frameworks.md from what `make test-frameworks` has found."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests_frameworks" / "results"
PAGE = ROOT / "docs" / "frameworks.md"
HEAD = """# Agent frameworks

`builder.get_llm(name, wrapper_type=NAME)` gives a framework's own model object, and everything it samples is captured
for training. Each line was tested by `make test-frameworks` with the real package against a real `insitu backend`: an
agent with one tool, 8 episodes at once, token ids and log-probabilities compared with what the backend had sampled,
every call in the episode that made it, and one training job that moved the version of the policy.

| framework | `wrapper_type` | package | version | streaming | tool steps | calls at once | example |
|---|---|---|---|---|---|---|---|
"""


def page() -> str:
    return HEAD + "".join(map(_line, sorted(RESULTS.glob("*.json"))))


def _line(file: Path) -> str:
    name, found = file.stem, json.loads(file.read_text())
    runs = [found[mode] for mode in ("whole", "streamed") if mode in found]
    cells = [
        found["framework"],
        f"`{name}`",
        f"`pip install 'insitu[{name.replace('_', '-')}]'`",
        f"{found['package']} {found['version']}",
        "yes" if "streamed" in found else "no",
        "yes" if all(run["tools"] for run in runs) else "no",
        str(max(run["calls_at_once"] for run in runs)),
        f"[{name}_agent.py](../examples/frameworks/{name}_agent.py)",
    ]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
