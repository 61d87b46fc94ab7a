"""A training run of an agent against the real backend, and what it must have left behind."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factories import records_of
from looker import answer_of
from processes import LOGGED_BACKEND
from tiny_models import byte_tokenizer

from insitu.runs.records import restore_calls
from insitu.schemas.episodes import ModelCall

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples/frameworks"
GENERATIONS = 4
TEMPERATURE = 0.3  # at which the model says what it has learnt by heart, but is not certain of it
_TOKENIZER = byte_tokenizer()


@dataclass(frozen=True)
class Left:
    """What a run has left behind.

    `log` is what the backend sampled, `calls` are by episode, `steps` by the number of its question as the witness
    inside the episode saw them.
    """

    log: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    calls: dict[str, list[ModelCall]]
    steps: dict[str, list[dict[str, Any]]]
    epoch: dict[str, Any]
    served_version: int

    @property
    def every_call(self) -> list[ModelCall]:
        return [call for calls in self.calls.values() for call in calls]


def train(
    python: str | Path, model: Path, folder: Path, agent: Mapping[str, Any], things: Collection[str], plugins: list[str]
) -> Left:
    """Train with one job, with all episodes in flight; the question of each row is about one of `things`."""
    return finetune(python, model, folder, "out", lambda address: [_write(folder, address, agent, things, plugins)])


def finetune(
    python: str | Path, model: Path, folder: Path, output_dir: str, arguments: Callable[[str], Sequence[str | Path]]
) -> Left:
    """Runs `insitu finetune` in `folder` with `arguments(address of the backend)`; it must train one epoch."""
    with _backend(model, folder / "backend") as address:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "ANTHROPIC_"))}
        quiet = {"CREWAI_DISABLE_TELEMETRY": "true", "XDG_DATA_HOME": str(folder)}
        done = subprocess.run(
            [python, "-m", "insitu", "finetune", *arguments(address)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=folder,
            env={**kept, **quiet, "PYTHONPATH": f"{HERE}:{EXAMPLES}"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with urllib.request.urlopen(f"{address}/v1/models/policy") as answer:
            served = json.load(answer)
    by_episode = defaultdict(list)
    for record in records_of(folder / output_dir / "calls.jsonl.gz"):
        by_episode[record["episode"]].append(record)
    witness = folder / "witness.jsonl"
    (epoch,) = records_of(folder / output_dir / "training_metrics.jsonl")
    return Left(
        log=records_of(folder / "backend/samples.jsonl"),
        episodes=records_of(folder / output_dir / "episodes.jsonl.gz"),
        calls={key: restore_calls(records) for key, records in by_episode.items()},
        steps={line["number"]: line["steps"] for line in records_of(witness)} if witness.exists() else {},
        epoch=epoch,
        served_version=served["policy_version"],
    )


@contextmanager
def _backend(model: Path, folder: Path) -> Iterator[str]:
    options = ["--model", model, "--port", "0", "--output_dir", folder]
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, LOGGED_BACKEND, folder / "samples.jsonl", *options], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ready = re.search(r"ready at (\S+)", process.stdout.readline())
            assert ready, "the backend did not start"
            yield ready[1]
        finally:
            process.terminate()


def _write(folder: Path, address: str, agent: Mapping[str, Any], things: Collection[str], plugins: list[str]) -> Path:
    rows = [{"id": thing, "question": f"What colour is the {thing}?"} for thing in things]
    (folder / "rows.json").write_text(json.dumps(rows))
    episodes = len(rows) * GENERATIONS
    file = folder / "train.yml"
    file.write_text(f"""
general: {{plugins: {json.dumps(["witness", *plugins])}}}
llms:
  player: {{_type: policy, temperature: {TEMPERATURE}, max_tokens: 100}}
functions:
  agent: {json.dumps({**agent, "llm": "player"})}
workflow: {{_type: witness, agent: agent, episodes: {episodes}, file: {folder}/witness.jsonl}}
eval:
  general:
    max_concurrency: {episodes}
    dataset: {{_type: json, file_path: rows.json}}
  evaluators:
    number: {{_type: number}}
trajectory_builders:
  episodes: {{_type: insitu_traj_builder, num_generations: {GENERATIONS}}}
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


def check_capture(left: Left, stream: bool) -> None:
    """Every call is captured as it was sampled, in the episode that made it."""
    check_sampled(left, stream)
    for call in left.every_call:
        assert (call.error, call.llm, call.policy_version) == (None, "player", 0)
        assert call.functions == ("<workflow>", "agent")
        assert call.sampling["temperature"] == TEMPERATURE
    numbers = [{number_in(call) for call in calls} for calls in left.calls.values()]
    assert all(len(mentioned) == 1 for mentioned in numbers)
    assert set.union(*numbers) == left.steps.keys()
    assert len(numbers) == len(left.steps) == len(left.episodes)


def check_sampled(left: Left, stream: bool, rehearsed: int = 0) -> None:
    """The captured calls are those that the backend sampled after the first `rehearsed` ones."""
    captured = Counter(_sampled(call.prompt_token_ids, call.token_ids, call.logprobs) for call in left.every_call)
    log = Counter(
        _sampled(line["prompt_token_ids"], line["token_ids"], line["logprobs"]) for line in left.log[rehearsed:]
    )
    assert captured == log
    assert {line["streamed"] for line in left.log} == {stream}


def check_answer(left: Left, episode: dict[str, Any]) -> tuple[ModelCall, ModelCall]:
    """The agent has asked twice and answered; gives its calls."""
    assert episode["outcome"] == "ok", episode["error"]
    first, second = left.calls[episode["episode"]]
    assert episode["output"] == f"[{number_in(first)}] {answer_of(episode['row_id'])}"
    assert f"What colour is the {episode['row_id']}?" in json.dumps(first.messages)
    assert first.ended <= second.started
    said = first.prompt_token_ids + first.token_ids
    assert second.prompt_token_ids[: len(said)] == said, "the second call does not go on from the first"
    return first, second


def check_training(left: Left) -> None:
    """One job has trained on every token of the episodes that answered, and moved the version."""
    assert left.epoch["policy_version"] == left.served_version == 1
    answered = [episode for episode in left.episodes if episode["outcome"] == "ok"]
    sampled = sum(len(call.token_ids) for episode in answered for call in left.calls[episode["episode"]])
    assert (left.epoch["tokens"], left.epoch["rows"]) == (sampled, len(answered))
    assert left.epoch["grad_norm"] > 0


def number_in(call: ModelCall) -> str:
    """The number of its episode's question, as it stands in the prompt."""
    (number,) = set(re.findall(r"\[(\d{4})\]", _TOKENIZER.decode(call.prompt_token_ids)))
    return number


def _sampled(prompt: list[int], completion: list[int], logprobs: list[float]) -> tuple[Any, ...]:
    return tuple(prompt), tuple(completion), tuple(round(number, 5) for number in logprobs)


def most_at_once(calls: list[ModelCall]) -> int:
    """How many calls were in flight at most."""
    edges = sorted([(call.started, 1) for call in calls] + [(call.ended, -1) for call in calls])
    now = most = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most
