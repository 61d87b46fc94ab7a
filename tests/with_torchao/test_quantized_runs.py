"""Whole runs whose model has weights of 8 or 4 bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from equal_runs import differences
from factories import MODEL, digits_project, read_lines
from processes import TESTS, wait_until

LORA = ("-o", "trainer_adapters.backend.training.lora", '{"rank": 4}')


def quantized(kind: str) -> tuple[str, ...]:
    return (*LORA, "-o", "trainer_adapters.backend.quantization", kind)


def finetune(folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "error", "-m", "insitu", "finetune", "--config_file", "config.yml", *options]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def ended(folder: Path, *options: str, code: int = 0) -> str:
    process = finetune(folder, *options)
    _, err = process.communicate()
    assert process.returncode == code, err
    return err


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_run_that_is_killed_is_resumed_to_the_bit(tmp_path: Path, kind: str) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        digits_project(tmp_path / name, rows=6)
    options = (*quantized(kind), "-o", "finetuning.num_epochs", "4")
    ended(tmp_path / "whole", *options)
    whole, killed = tmp_path / "whole/run", tmp_path / "killed/run"

    process = finetune(tmp_path / "killed", *options)
    wait_until((killed / "training_metrics.jsonl").exists)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(read_lines(killed / "training_metrics.jsonl")) < 4
    ended(tmp_path / "killed", *options, "--resume")
    assert [line for line in differences(whole, killed, {"digest"}) if "event resumed" not in line] == []
    assert max(line["kl"] for line in read_lines(whole / "training_metrics.jsonl")) > 1e-4
    assert all(abs(line["logprob_gap"]) < 1e-4 for line in read_lines(whole / "training_metrics.jsonl"))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_two_processes_train_as_one_does(tmp_path: Path, kind: str) -> None:
    digits_project(tmp_path, rows=6)
    metrics = []
    for processes in ("1", "2"):
        ended(tmp_path, *quantized(kind), "-o", "trainer_adapters.backend.learner.processes", processes)
        metrics.append(read_lines(tmp_path / "run/training_metrics.jsonl"))
    for one, two in zip(*metrics, strict=True):
        for name in ("loss", "grad_norm", "kl", "avg_reward", "logprob_gap"):
            assert two[name] == pytest.approx(one[name], abs=1e-5), name


def test_a_run_is_not_resumed_with_other_bits(tmp_path: Path) -> None:
    digits_project(tmp_path, rows=6)
    ended(tmp_path, *quantized("int8"))
    err = ended(tmp_path, *quantized("nf4"), "-o", "finetuning.num_epochs", "3", "--resume", code=2)
    assert "trainer_adapters.backend.quantization" in err


def test_a_trained_adapter_is_exported_and_merged_into_ordinary_weights(tmp_path: Path) -> None:
    digits_project(tmp_path, rows=6)
    ended(tmp_path, *quantized("nf4"))
    command = [sys.executable, "-m", "insitu", "export", "run", "merged", "--merge"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "merged/model.safetensors").exists()


def test_vllm_does_not_sample_for_quantized_weights() -> None:
    command = [sys.executable, "-m", "insitu", "backend", "--model", str(MODEL), "--port", "0", "--sampler", "vllm"]
    done = subprocess.run([*command, "--quantization", "int8"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "insitu backend: quantization: vLLM would sample from other weights" in done.stderr
