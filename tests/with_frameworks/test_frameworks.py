"""Each agent framework, in its own environment, against the real backend: an agent with a tool is trained with it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from harness import (
    EXAMPLES,
    HERE,
    ROOT,
    Left,
    check_answer,
    check_capture,
    check_training,
    most_at_once,
    number_in,
    train,
)
from harness import finetune as train_project
from looker import COLOURS, NIGHT, SEEN

from insitu.schemas.episodes import ModelCall

MODES = ("whole", "streamed")
AT_ONCE = 8  # of the 12 episodes, which all begin together
RUNS = [(name, stream) for name, case in CASES.items() for stream in ([False, True] if case.streams else [False])]


def test_every_example_is_a_case() -> None:
    assert {file.name.removesuffix("_agent.py") for file in EXAMPLES.glob("*_agent.py")} == CASES.keys()


def python_of(name: str) -> Path:
    return ROOT / ".environments/frameworks" / name / "bin/python"


@pytest.mark.parametrize(("name", "stream"), RUNS, ids=[f"{name}{'-stream' * stream}" for name, stream in RUNS])
def test_an_agent_is_trained(name: str, stream: bool, model: Path, tmp_path: Path) -> None:
    """Model calls are captured, tool runs are steps, and what a tool raises is reported by them."""
    agent = {"_type": f"{name}_agent", "stream": stream}
    left = train(python_of(name), model, tmp_path, agent, SEEN, [f"{name}_agent"])
    check_capture(left, stream)
    check_training(left)
    assert most_at_once(left.every_call) >= AT_ONCE
    for episode in left.episodes:
        calls = left.calls[episode["episode"]]
        if episode["row_id"] == NIGHT and not CASES[name].goes_on:
            assert NIGHT in episode["error"]
            assert len(calls) == 1
        else:
            check_answer(left, episode)
        check_steps(left.steps[number_in(calls[0])], calls, episode["row_id"], CASES[name].error_text)
    write_result(name, stream, left)


@pytest.mark.parametrize("name", CASES)
def test_a_new_project_trains(name: str, tmp_path: Path) -> None:
    """What `insitu init --framework NAME` writes, with the model that comes with it."""
    python = python_of(name)
    subprocess.run([python, "-m", "insitu", "init", "desk", "--framework", name], cwd=tmp_path, check=True)
    project = tmp_path / "desk"

    def arguments(address: str) -> list[str]:
        training = {"learning_rate": 1.5e-3, "mini_batch_size": 28}
        adapter = {"_type": "insitu_trainer_adapter", "url": address, "training": training}
        changed = {"trainer_adapters.backend": adapter, "finetuning.num_epochs": 1, "finetuning.validation": None}
        overrides = [part for key, value in changed.items() for part in ("-o", key, json.dumps(value))]
        return ["config.yml", *overrides]

    left = train_project(python, project / "model", project, "runs/desk", arguments)
    assert left.epoch["job"] == "completed"
    assert left.epoch["avg_reward"] > 0.5
    assert not left.epoch["dropped"].keys() - {"no_variance"}
    asked = [json.loads(line)["question"] for line in (project / "train.jsonl").read_text().splitlines()]
    assert len(left.episodes) == 8 * len(asked)
    assert len(left.every_call) > 1.9 * len(left.episodes)  # a call of a tool, and then the answer


def check_steps(steps: list[dict[str, Any]], calls: list[ModelCall], thing: str, error_text: str) -> None:
    """A pair of steps for each model call, with what it sampled, and one for the tool in between."""
    model, tool = ["LLM_START", "LLM_END"], ["TOOL_START", "TOOL_END"]
    assert [step["type"] for step in steps] == model + tool + model * (len(calls) - 1)
    sampled = [step["token_ids"] for step in steps if step["type"] == "LLM_END"]
    assert sampled == [call.token_ids for call in calls]
    started, ended = (step for step in steps if step["type"].startswith("TOOL"))
    assert started["name"] == ended["name"] == "look"
    assert ended["input"] == {"at": thing}
    if thing == NIGHT:
        assert error_text in ended["error"]
    else:
        assert COLOURS[thing] in ended["output"]
        assert ended["error"] is None


def write_result(name: str, stream: bool, left: Left) -> None:
    """Adds to what docs/frameworks.md is written from."""
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    asked = [python_of(name), "-c", code, CASES[name].distribution]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    file = HERE / "results" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    known = json.loads(file.read_text()) if file.exists() else {}
    head = {"framework": CASES[name].title, "package": CASES[name].distribution, "version": version}
    runs = {mode: known[mode] for mode in MODES if mode in known and known["version"] == version}
    runs[MODES[stream]] = {"episodes": len(left.episodes), "calls_at_once": most_at_once(left.every_call)}
    found = {**head, "goes_on": CASES[name].goes_on, **{mode: runs[mode] for mode in MODES if mode in runs}}
    file.write_text(json.dumps(found, indent=2) + "\n")
