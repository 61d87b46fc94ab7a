"""Runs trained on samples of real vLLM servers, which are killed meanwhile."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from factories import digits_project, read_lines
from processes import TESTS, wait_until
from real_model import real_model
from real_project import EPOCHS as REAL_EPOCHS
from real_project import GENERATIONS, ROWS, project
from tiny_models import save_tiny_model
from vllm_server import EXAMPLES, VllmServer

from insitu.backend.model import load_model

EPOCHS = 4
GAP = 1e-4
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def finetune(folder: Path, config: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "insitu", "finetune", "--config_file", str(config), *options]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "VLLM_CPU_KVCACHE_SPACE": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def wait_for(process: "subprocess.Popen[str]", holds: Any) -> None:
    wait_until(lambda: holds() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]


def epochs_done(run: Path) -> int:
    path = run / "training_metrics.jsonl"
    return len(read_lines(path)) if path.exists() else 0


def tic_tac_toe_options(folder: Path, model: Path, sampler: dict[str, Any], lora: bool, **trainer: Any) -> list[str]:
    rows = (EXAMPLES / "tic_tac_toe/train.jsonl").read_text().splitlines()[:32]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    values = {
        "trainer_adapters.backend.model": str(model),
        "trainer_adapters.backend.sampler": json.dumps(sampler),
        "trainer_adapters.backend.keep": json.dumps({"every": 1}),
        "finetuning.num_epochs": str(EPOCHS),
        "finetuning.validation": json.dumps({"dataset": str(folder / "rows.jsonl"), "interval": 2}),
        "finetuning.output_dir": str(folder / "run"),
        "eval.general.dataset.file_path": str(folder / "rows.jsonl"),
        "eval.general.episode_timeout": "600",
    }
    if lora:
        values["trainer_adapters.backend.training.lora"] = json.dumps({"rank": 8, "alpha": 16})
    values |= {f"trainers.grpo.{key}": json.dumps(value) for key, value in trainer.items()}
    if trainer.get("staleness"):
        values["trainer_adapters.backend.training.old_logprobs"] = "rollout"
    return [text for key, value in values.items() for text in ("-o", key, value)]


@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "all weights"])
def test_a_run_survives_the_death_of_vllm(tmp_path: Path, player: Path, servers: list[VllmServer], lora: bool) -> None:
    """With adapters there is another server; with all weights the run waits for the only one."""
    used = servers if lora else servers[:1]
    victim, survivor = used[0], used[-1]
    sampler = {"_type": "vllm", "addresses": [server.address for server in used]}
    options = tic_tac_toe_options(tmp_path, player, sampler, lora)
    run, before = tmp_path / "run", victim.num_completed()
    with finetune(tmp_path, EXAMPLES / "tic_tac_toe/grpo.yml", *options) as process:
        wait_for(process, lambda: epochs_done(run) == 1)
        counts = [server.num_completed() for server in used]
        wait_for(process, lambda: victim.num_completed() > counts[0] + 20)
        assert epochs_done(run) == 1
        victim.kill()
        if survivor is not victim:
            wait_for(process, lambda: survivor.num_completed() > counts[-1] + 60)
        victim.start()
        victim.wait()
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert counts[0] > before
    log = (run / "backend/backend.log").read_text()
    assert f"the server at {victim.address} is left out: " in log
    metrics = read_lines(run / "training_metrics.jsonl")
    assert [each["policy_version"] for each in metrics] == [*range(1, EPOCHS + 1)]
    assert all(each["logprob_gap"] < GAP for each in metrics)
    assert all(each["num_trajectories"] == 32 * 8 for each in metrics), "episodes were lost"
    check_versions(run, player)
    if lora:
        (latest,) = [name for name in survivor.models() if name != "base"]
        assert latest.endswith(f"v{EPOCHS}")
    else:
        assert f"the server at {victim.address} is used again" in log
        assert victim.num_completed() > 0


OVERLAPPING: dict[str, tuple[bool, dict[str, Any]]] = {
    "streamed, adapters": (True, {"stream": True}),
    "streamed, all weights": (False, {"stream": True}),
    "an epoch ahead, newest weights": (False, {"staleness": 1, "versions": "latest"}),
}
"""Adapters of two versions at once are tested against a stand-in (tests/test_staleness_runs): vLLM 0.32 on a CPU ends
when a batch has calls of both (`einsum(): subscript b has size 64 for operand 1 which does not broadcast ...`)."""


@pytest.mark.parametrize("case", OVERLAPPING)
def test_runs_that_overlap(tmp_path: Path, player: Path, servers: list[VllmServer], case: str) -> None:
    lora, trainer = OVERLAPPING[case]
    sampler = {"_type": "vllm", "addresses": [servers[0].address]}
    options = tic_tac_toe_options(tmp_path, player, sampler, lora, **trainer)
    with finetune(tmp_path, EXAMPLES / "tic_tac_toe/grpo.yml", *options) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    metrics = read_lines(tmp_path / "run/training_metrics.jsonl")
    assert [each["policy_version"] for each in metrics] == [*range(1, EPOCHS + 1)]
    assert all(each["num_trajectories"] == 32 * 8 for each in metrics)
    staleness = trainer.get("staleness", 0)
    ages = {age for each in metrics for age in each.get("age", {})}
    assert ages == ({str(age) for age in range(staleness + 1)} if staleness else set())
    check_versions(tmp_path / "run", player, staleness)


def test_a_run_with_a_real_model(tmp_path: Path) -> None:
    """Its adapters are sampled by a vLLM that the backend starts, in the versions that they were trained to."""
    args = {"enforce-eager": True, "max-model-len": 512}
    project(tmp_path, "LoRA", adapter={"max_length": 512, "sampler": {"_type": "vllm", "args": args}})
    with finetune(tmp_path, Path("config.yml")) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    metrics = read_lines(tmp_path / "run/training_metrics.jsonl")
    assert [each["policy_version"] for each in metrics] == [*range(1, REAL_EPOCHS + 1)]
    assert all(each["num_trajectories"] == ROWS * GENERATIONS for each in metrics)
    assert all(each["logprob_gap"] < GAP for each in metrics)
    check_versions(tmp_path / "run", real_model(), epochs=REAL_EPOCHS)


def check_versions(run: Path, player: Path, staleness: int = 0, epochs: int = EPOCHS) -> None:
    """Log-probabilities are those of the version that a call and its epoch name, and of no other.

    Of the first calls of episodes, whose prompts are recorded whole; `logprob_gap` is of all that were trained.
    """
    calls: dict[int, list[Any]] = defaultdict(list)
    for call in read_lines(run / "calls.jsonl.gz")[1:]:
        epoch, version = int(call["episode"].split("/")[1]), int(call["policy_version"])
        assert max(0, epoch - 1 - staleness) <= version <= epoch - 1
        if call["index"] == 0:
            calls[version].append(call)
    checkpoints = {version: run / f"backend/checkpoints/step_{version:06d}" for version in calls}
    models = {v: load_model(str(folder if v else player), "cpu") for v, folder in checkpoints.items()}
    assert sorted(calls) == [*range(epochs)] or staleness
    for version, made in calls.items():
        chosen = made[:: max(1, len(made) // 50)]
        gaps = {other: max(gap(model.module, call) for call in chosen) for other, model in models.items()}
        assert gaps[version] < GAP, gaps
        assert all(value > GAP for other, value in gaps.items() if other != version), gaps


def gap(module: Any, call: dict[str, Any]) -> float:
    prompt, ids = call["prompt_token_ids"], call["token_ids"]
    with torch.inference_mode():
        logits = module(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return float((logprobs - torch.tensor(call["logprobs"])).abs().max())


def vllm_processes(run: Path) -> list[psutil.Process]:
    """The processes that have the log of the run's vLLM open."""
    log, found = str(run / "backend/vllm.log"), []
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1") == log:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def test_a_vllm_that_the_backend_starts(tmp_path: Path) -> None:
    """It is started again after its death, and nothing of it outlives the backend."""
    model = save_tiny_model(tmp_path / "model", **HEADS)
    digits_project(tmp_path, model=str(model), rows=6)
    run = tmp_path / "run"
    options = {
        "trainer_adapters.backend.sampler": json.dumps({"_type": "vllm", "args": {"enforce-eager": True}}),
        "trainer_adapters.backend.training.lora": json.dumps({"rank": 4}),
        "finetuning.num_epochs": "1000",
        "eval.general.episode_timeout": "600",
    }
    arguments = [text for key, value in options.items() for text in ("-o", key, value)]
    with finetune(tmp_path, Path("config.yml"), *arguments) as process:
        wait_for(process, lambda: epochs_done(run) >= 2)
        (server,) = [p for p in vllm_processes(run) if p.cmdline()[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]]
        server.kill()
        done = epochs_done(run)
        wait_for(process, lambda: epochs_done(run) >= done + 3)
        left = vllm_processes(run)
        assert server not in left
        assert left
        process.kill()
    assert "the vLLM server was ended by SIGKILL; the end of its log" in (run / "backend/backend.log").read_text()
    wait_until(lambda: not any(each.is_running() for each in left))
    metrics = read_lines(run / "training_metrics.jsonl")
    assert [each["policy_version"] for each in metrics] == [*range(1, len(metrics) + 1)]
    assert all(each["logprob_gap"] < GAP for each in metrics if each["logprob_gap"] is not None)
