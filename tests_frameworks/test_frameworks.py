"""Each agent framework, in its own environment, against the real backend: an agent with a tool is trained with it."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from looker import COLOURS, save_looker
from tiny_models import byte_tokenizer

from insitu.schemas.episodes import ModelCall
from insitu.training.store import restore_calls

HERE = Path(__file__).parent
ROOT = HERE.parent
EXAMPLES = ROOT / "examples/frameworks"
EPISODES = 8
RUNS = [(name, stream) for name, case in CASES.items() for stream in ([False, True] if case.streams else [False])]


def test_every_example_is_a_case() -> None:
    assert {file.name.removesuffix("_agent.py") for file in EXAMPLES.glob("*_agent.py")} == CASES.keys()


@pytest.fixture(scope="session")
def model() -> Path:
    """Learns for half a minute; kept until its recipe changes."""
    folder, recipe = ROOT / ".venv-frameworks/looker", HERE / "looker.py"
    weights = folder / "model.safetensors"
    if not weights.exists() or weights.stat().st_mtime < recipe.stat().st_mtime:
        save_looker(folder)
    return folder


@contextmanager
def backend(model: Path, folder: Path) -> Iterator[str]:
    options = ["--model", model, "--port", "0", "--output_dir", folder, "--log_samples", folder / "samples.jsonl"]
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "insitu", "backend", *options], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ready = re.search(r"ready at (\S+)", process.stdout.readline())
            assert ready, "the backend did not start"
            yield ready[1]
        finally:
            process.terminate()


def write_file(folder: Path, name: str, address: str, stream: bool) -> Path:
    rows = [{"id": thing, "question": f"What colour is the {thing}?"} for thing in COLOURS]
    (folder / "rows.json").write_text(json.dumps(rows))
    file = folder / "train.yml"
    file.write_text(f"""
general: {{plugins: [witness, {name}_agent]}}
llms:
  player: {{_type: policy, temperature: 0.2, max_tokens: 100}}
functions:
  agent: {{_type: {name}_agent, llm: player, stream: {str(stream).lower()}}}
workflow: {{_type: witness, agent: agent, episodes: {EPISODES}, file: {folder}/witness.jsonl}}
eval:
  general:
    max_concurrency: {EPISODES}
    dataset: {{_type: json, file_path: rows.json}}
  evaluators:
    number: {{_type: number}}
trajectory_builders:
  episodes: {{_type: insitu_traj_builder, num_generations: {EPISODES // len(rows)}}}
trainer_adapters:
  backend: {{_type: insitu_trainer_adapter, url: "{address}", training: {{learning_rate: 1.0e-6}}}}
trainers:
  grpo: {{_type: insitu_trainer}}
finetuning:
  enabled: true
  trainer: grpo
  trajectory_builder: episodes
  trainer_adapter: backend
  reward_function: {{name: number}}
  num_epochs: 1
  output_dir: out
""")
    return file


def python_of(name: str) -> Path:
    return ROOT / ".venv-frameworks" / name / "bin/python"


def finetune(name: str, file: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "ANTHROPIC_"))}
    return subprocess.run(
        [python_of(name), "-m", "insitu", "finetune", "--config_file", file],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=file.parent,
        env=env | {"PYTHONPATH": f"{HERE}:{EXAMPLES}"},
    )


def lines(file: Path) -> list[dict[str, Any]]:
    return [record for line in file.read_text().splitlines() if "format" not in (record := json.loads(line))]


def sampled(prompt: list[int], completion: list[int], logprobs: list[float]) -> tuple[Any, ...]:
    return tuple(prompt), tuple(completion), tuple(round(number, 5) for number in logprobs)


def most_at_once(calls: list[ModelCall]) -> int:
    """How many calls were in flight at most."""
    edges = sorted([(call.started, 1) for call in calls] + [(call.ended, -1) for call in calls])
    now = most = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize(("name", "stream"), RUNS, ids=[f"{name}{'-stream' * stream}" for name, stream in RUNS])
def test_an_agent_is_trained(name: str, stream: bool, model: Path, tmp_path: Path) -> None:
    """Every call is captured as it was sampled, in the episode that made it, and one job moves the version."""
    with backend(model, tmp_path / "backend") as address:
        done = finetune(name, write_file(tmp_path, name, address, stream))
        assert done.returncode == 0, done.stdout + done.stderr
        with urllib.request.urlopen(f"{address}/v1/models") as answer:
            served = json.load(answer)
    (epoch,) = lines(tmp_path / "out/training_metrics.jsonl")
    assert epoch["policy_version"] == 1, served

    log = lines(tmp_path / "backend/samples.jsonl")
    by_episode = defaultdict(list)
    for record in lines(tmp_path / "out/calls.jsonl"):
        by_episode[record["episode"]].append(record)
    calls = {key: restore_calls(records) for key, records in by_episode.items()}
    every = [call for episode in calls.values() for call in episode]
    captured = Counter(sampled(call.prompt_token_ids, call.token_ids, call.logprobs) for call in every)
    assert captured == Counter(sampled(line["prompt_token_ids"], line["token_ids"], line["logprobs"]) for line in log)
    assert all(call.error is None for call in every)

    tokenizer = byte_tokenizer()
    seen = {line["number"]: line for line in lines(tmp_path / "witness.jsonl")}
    episodes = lines(tmp_path / "out/episodes.jsonl")
    assert len(episodes) == len(seen) == EPISODES
    for episode in episodes:
        number, said = re.fullmatch(r"\[(\d{4})\] (.*)", episode["output"]).groups()
        thing = episode["row_id"]
        assert said == f"It is {COLOURS[thing]}."
        first, second = calls[episode["episode"]]
        for call in (first, second):
            prompt = tokenizer.decode(call.prompt_token_ids)
            assert set(re.findall(r"\[(\d{4})\]", prompt)) == {number}
        (asked,) = first.message["tool_calls"]
        assert asked["id"] in json.dumps(second.messages), "the second call goes on from the first"
        started, ended = seen[number]["tools"][:2]
        assert (started["type"], ended["type"]) == ("TOOL_START", "TOOL_END")
        assert started["name"] == ended["name"] == "look"
        assert arguments(ended["in"]) == {"at": thing}
        assert COLOURS[thing] in ended["out"]
    write_result(name, stream, most_at_once(every))


def arguments(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


def write_result(name: str, stream: bool, at_once: int) -> None:
    """Adds to what docs/frameworks.md is written from."""
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    asked = [python_of(name), "-c", code, CASES[name].distribution]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    file = HERE / "results" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    known = json.loads(file.read_text()) if file.exists() else {}
    if known.get("version") != version:
        known = {}
    kept = {mode: known[mode] for mode in ("whole", "streamed") if mode in known}
    kept["streamed" if stream else "whole"] = {"episodes": EPISODES, "tools": True, "calls_at_once": at_once}
    head = {"framework": CASES[name].title, "package": CASES[name].distribution, "version": version}
    file.write_text(json.dumps(head | kept, indent=2) + "\n")
