"""The dtype that a model is loaded in if the file names none, and that a run keeps."""

import json
from pathlib import Path

import pytest
import torch
from factories import digits_project, read_lines
from processes import run_project
from safetensors import safe_open
from tiny_models import save_tiny_model

from insitu.backend.model import cpu_dtype, cpu_flags, load_model

LARGE = 135_000_000


@pytest.mark.parametrize(
    ("flags", "frozen", "expected"),
    [
        ({"avx2", "avx512_f", "avx512_bf16"}, LARGE, torch.float32),
        ({"avx512_f", "amx_bf16"}, LARGE, torch.bfloat16),
        ({"avx512_bf16", "amx_bf16"}, 100_000_000, torch.float32),
        ({"amx_bf16"}, 0, torch.float32),  # all weights are trained
        ({"avx2", "avx512_f", "avx512_fp16", "amx_tile"}, LARGE, torch.float32),
        (set(), LARGE, torch.float32),
    ],
)
def test_a_cpu_gets_bfloat16_for_large_frozen_weights_if_it_multiplies_it(
    flags: set[str], frozen: int, expected: torch.dtype
) -> None:
    assert cpu_dtype(flags, frozen) == expected


def test_the_flags_are_those_of_this_machine(tmp_path: Path) -> None:
    """By the names of the kernel."""
    info = Path("/proc/cpuinfo")
    if not info.is_file() or "avx2" not in info.read_text():
        pytest.skip("no x86 processor under Linux")
    words = info.read_text().split()
    assert {name: name in cpu_flags() for name in ("avx2", "avx512_bf16", "amx_bf16")} == {
        name: name in words for name in ("avx2", "avx512_bf16", "amx_bf16")
    }
    assert load_model(str(save_tiny_model(tmp_path)), frozen=True).dtype == torch.float32


@pytest.mark.slow
def test_a_run_keeps_its_dtype_on_another_machine(tmp_path: Path) -> None:
    """This machine loads it in float32; one that multiplies bfloat16 may have started it."""
    lora = {"learning_rate": 1e-3, "lora": {"rank": 2, "alpha": 4}}
    model = save_tiny_model(tmp_path / "model")
    digits_project(tmp_path, rows=4, model=str(model), training=lora)
    code, _, err = run_project(tmp_path, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    (run,) = (path.parent for path in tmp_path.rglob("run.json"))
    started = run / "backend/started_from.json"
    assert json.loads((run / "run.json").read_text())["dtype"] == "float32"
    assert json.loads(started.read_text())["dtype"] == "float32"
    started.write_text(started.read_text().replace("float32", "bfloat16"))
    code, _, err = run_project(tmp_path, "--resume", "-o", "finetuning.num_epochs", "2")
    assert code == 0, err
    assert json.loads(started.read_text())["dtype"] == "bfloat16"
    assert len(read_lines(run / "training_metrics.jsonl")) == 2
    with safe_open(run / "backend/checkpoints/step_000002/optimizer.safetensors", framework="pt") as file:
        assert any(name.startswith("weights.") for name in file.keys())  # noqa: SIM118 - masters beside bfloat16
