"""Runs of `nat finetune` in the environments of the official ART clients, and what they send."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import LOGGED_BACKEND
from wiretap import Wiretap

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSITU = Path(sys.executable).with_name("insitu")
RELEASES = ["0.5.4", "0.5.18"]
NEWEST = "0.5.23"
"""Needs Python 3.12, which `make test WITH=art` looks for."""
if (ROOT / ".environments/art" / NEWEST / ".installed").exists():
    RELEASES.append(NEWEST)
each_release = pytest.mark.parametrize("release", RELEASES)


@contextmanager
def serving(*command: object) -> Iterator[str]:
    """The address of a command that serves."""
    env = os.environ | {"PYTHONPATH": str(HERE)}
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            ready = re.search(r"ready at (\S+)", process.stdout.readline())
            assert ready, "it did not start"
            yield ready[1]
        finally:
            process.terminate()


def backend(model: Path, folder: Path, *options: str, log: Path | None = None) -> AbstractContextManager[str]:
    """A backend's address; `log` gets what it samples."""
    insitu = [INSITU, "backend"] if log is None else [sys.executable, LOGGED_BACKEND, log]
    return serving(*insitu, "--model", model, "--port", "0", "--output_dir", folder, *options)


def starting(
    release: str, file: Path, *options: str, folder: Path | None = None, command: str = "finetune", **env: str
) -> subprocess.Popen[str]:
    insitu = ROOT / ".environments/art" / release / "bin" / "nat"
    return subprocess.Popen(
        [insitu, command, "--config_file", file, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(HERE), "WANDB_MODE": "offline", "WEAVE_DISABLED": "true"} | env,
    )


def finetune(release: str, file: Path, *options: str, **others: Any) -> subprocess.CompletedProcess[str]:
    with starting(release, file, *options, **others) as process:
        try:
            out, err = process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess([], process.returncode, out, err)


def set_keys(**values: object) -> list[str]:
    return [part for key, value in values.items() for part in ("-o", key.replace("__", "."), str(value))]


QUESTION = "What colour is the sky?"
TURNS = (
    '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call><|im_end|>',
    "\n<|im_start|>tool\nblue<|im_end|>\n<|im_start|>assistant\n",
    "It is blue.<|im_end|>",
)


def write_file(folder: Path, tap: Wiretap, name: str, base_model: str, **more: str) -> Path:
    """The documented YAML, its names and address adapted; `more` are further lines of some blocks."""
    (folder / "rows.json").write_text(json.dumps([{"id": n, "question": QUESTION} for n in range(3)]))
    port = tap.address.rpartition(":")[2]
    text = f"""
    general: {{plugins: [tool_agent]}}
    llms:
      training_llm:
        _type: openai
        model_name: {name}
        base_url: {tap.address}/v1
        api_key: default
        temperature: 0.02
        max_tokens: 80
    workflow: {{_type: tool_agent, llm: training_llm}}
    eval:
      general:
        max_concurrency: 16
        output_dir: {folder}/eval
        dataset: {{_type: json, file_path: {folder}/rows.json}}
      evaluators:
        my_reward: {{_type: odd_seed}}
    trajectory_builders:
      art_builder: {{_type: openpipe_art_traj_builder, num_generations: 4}}
    trainer_adapters:
      art_adapter:
        _type: openpipe_art_trainer_adapter
        backend:
          ip: localhost
          port: {port}
          name: {name}
          project: my_project
          base_model: {base_model}
          api_key: default
          {more.get("backend", "")}
        training: {{learning_rate: 1e-6{more.get("training", "")}}}
    trainers:
      art_trainer: {{_type: openpipe_art_trainer}}
    finetuning:
      enabled: true
      trainer: art_trainer
      trajectory_builder: art_builder
      trainer_adapter: art_adapter
      reward_function: {{name: my_reward}}
      num_epochs: 2
      output_dir: {folder}/out
    """
    file = folder / "art.yml"
    file.write_text("\n".join(line[4:] for line in text.splitlines()))
    return file


def turns_of(training: dict) -> list[dict]:
    trajectories = [t for group in training["trajectory_groups"] for t in group["trajectories"]]
    return [turn for t in trajectories for turn in t["messages_and_choices"]]


def ids_of(choice: dict) -> tuple[int, ...]:
    return tuple(int(entry["token"].removeprefix("token_id:")) for entry in choice["logprobs"]["content"])
