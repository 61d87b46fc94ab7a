"""The dtype that a model is loaded in if the file names none, and that a run keeps."""

import json
import sys
from pathlib import Path

import pytest
import torch
from factories import digits_project, read_lines
from processes import run_project
from safetensors import safe_open
from tiny_models import save_tiny_model

from insitu.backend.model import load_model
from insitu.disk.processor import cpu_dtype, processor_words

LARGE = 135_000_000


@pytest.mark.parametrize(
    ("flags", "frozen", "expected"),
    [
        ({"GenuineIntel", "avx512f", "avx512_bf16"}, LARGE, "float32"),
        ({"AuthenticAMD", "avx512f", "avx512_bf16"}, LARGE, "bfloat16"),
        ({"AuthenticAMD", "avx512f"}, LARGE, "float32"),
        ({"avx512f", "amx_bf16"}, LARGE, "bfloat16"),
        ({"avx512_bf16", "amx_bf16"}, 100_000_000, "float32"),
        ({"amx_bf16"}, 0, "float32"),  # all weights are trained
        ({"avx2", "avx512f", "avx512_fp16", "amx_tile"}, LARGE, "float32"),
        (set(), LARGE, "float32"),
    ],
)
def test_a_cpu_gets_bfloat16_for_large_frozen_weights_if_it_multiplies_it(
    flags: set[str], frozen: int, expected: str
) -> None:
    assert cpu_dtype(flags, frozen) == expected


def test_the_flags_are_those_of_this_machine(tmp_path: Path) -> None:
    """As torch finds them."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    if not capabilities or sys.platform != "linux":
        pytest.skip("this release of torch cannot say, or there is no /proc/cpuinfo")
    names = ("avx2", "avx512_bf16", "amx_bf16")
    assert {name: name in processor_words() for name in names} == {
        name: capabilities.get(name, False) for name in names
    }
    assert processor_words(tmp_path / "none") == frozenset()
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
