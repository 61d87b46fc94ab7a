"""What a model takes, from its configuration: parameters, memory, and what makes a run fit."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import MODEL
from fake_hub import fake_hub
from model_families import tiny_config
from processes import run
from real_model import real_model
from safetensors import safe_open
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from insitu.algorithms.memory_budget import ModelShape, Workload, memory_budget, model_shape, operations, remedies
from insitu.backend.model import load_model
from insitu.disk.memory import MachineMemory
from insitu.disk.model_files import stored_model
from insitu.errors import BackendError, BackendUnavailable, ConfigError
from insitu.schemas.training_jobs import KeepConfig
from insitu.training.memory_plan import Epoch, MemoryPlan, check_memory, kept_versions

SMOL = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M-Instruct."""
QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""Qwen2.5-0.5B-Instruct."""


def shape_of(config: dict[str, Any]) -> ModelShape:
    shape = model_shape(config)
    assert shape is not None
    return shape


@pytest.mark.parametrize(("config", "parameters"), [(SMOL, 134_515_008), (QWEN, 494_032_768)])
def test_parameters_of_published_models(config: dict[str, Any], parameters: int) -> None:
    assert shape_of(config).parameters == parameters


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_parameters_of_small_models(architecture: str) -> None:
    config = tiny_config(architecture)
    counted = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert shape_of(config.to_dict()).parameters == counted


def test_lora_parameters_are_those_of_peft() -> None:
    from insitu.backend.learner.policy import build_policy
    from insitu.schemas.training_jobs import LoRASettings

    policy = build_policy(load_model(str(MODEL)), LoRASettings(rank=4), seed=0)
    shape = shape_of(json.loads((MODEL / "config.json").read_text()))
    assert 4 * shape.lora == sum(parameter.numel() for parameter in policy.trainable.values())


def test_parameters_of_a_folder_are_those_of_its_weights(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "gpt2")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        counted = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a mapping
    stored = stored_model(str(folder))
    assert stored is not None
    assert stored.parameters == counted
    shape = model_shape(stored.config, stored.parameters)
    assert shape is not None
    assert (shape.parameters, shape.layers) == (counted, stored.config["n_layer"])


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "hub/models--org--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("abc")
    save_tiny_model(model / "snapshots/abc")
    assert stored_model("org/name") is None
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    stored = stored_model("org/name")
    assert stored is not None
    assert stored.parameters
    assert stored_model("org/other") is None


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", b"{"), ("model.safetensors", b""), ("model.safetensors", b"\xff" * 16), ("config.json", b"[1]")],
)
def test_sizes_of_damaged_files_are_unknown(tmp_path: Path, name: str, content: bytes) -> None:
    """Loading the model reports them."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    assert stored_model(str(folder)) is not None
    (folder / name).write_bytes(content)
    assert stored_model(str(folder)) is None


def test_an_unknown_configuration_has_no_shape() -> None:
    assert model_shape({"model_type": "mamba", "hidden_size": 64}) is None


def test_bytes_of_all_weights() -> None:
    size = 4 * 134_515_008
    budget = memory_budget(shape_of(SMOL), Workload())
    assert (budget.weights, budget.trained, budget.optimizer, budget.served) == (size, size, 2 * size, size)
    assert budget.kv_token == 2 * 30 * 3 * 64 * 4
    assert budget.kv_wanted == 8 * 1280 * budget.kv_token, "five blocks of 256 tokens each"
    assert budget.needed == budget.fixed + 1280 * budget.kv_token
    assert budget.kv_bytes(budget.fixed + 10_000 * budget.kv_token) == 5_000 * budget.kv_token, "half of what is free"
    assert budget.kv_bytes(0) == 2304 * budget.kv_token, "one request of 1024 tokens at a time, and a margin"
    assert replace(budget, workload=Workload(kv_memory=10**9)).kv_bytes(0) == 10**9


@pytest.mark.parametrize(
    "values",
    [
        {"trains": False},
        {"lora_rank": 16},
        {"dtype": "bfloat16", "on_gpu": True},
        {"gradient_checkpointing": True},
        {"micro_batch_tokens": 256},
        {"job_tokens": 100},
        {"request_tokens": 100},
        {"concurrency": 1},
    ],
    ids=str,
)
def test_what_takes_less(values: dict[str, Any]) -> None:
    workload = Workload(request_tokens=300, prompt_tokens=100)
    assert (
        memory_budget(shape_of(SMOL), replace(workload, **values)).needed
        < memory_budget(shape_of(SMOL), workload).needed
    )


def test_cores_compute_micro_batches_of_a_small_model_at_once() -> None:
    """Eight at most, and no more than a job has tokens for."""

    def activations(hidden: int, cores: int, tokens: int = 10**6) -> int:
        sizes = {"vocab_size": 512, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 4}
        shape = model_shape({"model_type": "llama", **sizes} | {"num_attention_heads": 4, "num_key_value_heads": 2})
        assert shape is not None
        return memory_budget(shape, Workload(job_tokens=tokens, cores=cores)).activations

    of_small, of_large = ([activations(hidden, cores) for cores in (1, 4, 8, 64)] for hidden in (64, 512))
    assert of_small == [pytest.approx(count * of_small[0], rel=1e-6) for count in (1, 4, 8, 8)]
    assert len({*of_large}) == 1
    assert activations(64, 8, tokens=2048) == of_small[0]


def test_a_cpu_samples_in_bfloat16_with_packed_weights_and_exact_attention() -> None:
    exact, rounded, quantized, on_gpu = (
        memory_budget(shape_of(SMOL), Workload(lora_rank=16, **values))
        for values in (
            {},
            {"dtype": "bfloat16"},
            {"dtype": "bfloat16", "quantization": "int8"},
            {"dtype": "bfloat16", "on_gpu": True},
        )
    )
    assert rounded.kv_token == exact.kv_token == 2 * on_gpu.kv_token
    assert rounded.weights + rounded.packed == pytest.approx(exact.weights, rel=0.01)
    assert exact.packed == quantized.packed == on_gpu.packed == 0
    assert rounded.checkpoint_weights == exact.checkpoint_weights


def test_quantized_layers_take_a_quarter_or_an_eighth() -> None:
    workload = Workload(lora_rank=16)
    plain, int8, nf4 = (
        memory_budget(shape_of(SMOL), replace(workload, quantization=kind)).weights for kind in (None, "int8", "nf4")
    )
    linear = shape_of(SMOL).linear
    assert plain - int8 == 3 * linear
    assert plain - nf4 == pytest.approx(3.4375 * linear)


def test_operations_of_an_epoch() -> None:
    """Two for each parameter and token, and twice as many in the backward pass; frozen weights have half of it."""
    shape = shape_of(SMOL)
    one = 2 * shape.parameters
    assert operations(shape, sampled=10, trained=0, lora=False) == 10 * one
    assert operations(shape, sampled=0, trained=10, lora=False) == 30 * one
    assert operations(shape, sampled=0, trained=10, lora=True) == 20 * one


def plan(total: int, available: int | None = None, **values: Any) -> MemoryPlan:
    machine = MachineMemory(total, total if available is None else available)
    shape, epoch = shape_of(SMOL), Epoch(128, 4096, 8192)
    return MemoryPlan("trainer_adapters.a", "m", shape, Workload(**values), epoch, 4, 3, Path.cwd(), machine)


def test_what_does_not_fit_is_refused_with_what_makes_it_fit() -> None:
    assert check_memory(plan(8 * 10**9)) is not None
    with pytest.raises(ConfigError) as refused:
        check_memory(plan(58 * 10**8))
    message = str(refused.value)
    assert re.match(
        r"trainer_adapters\.a: training all weights of m needs 6\S* GB of memory, but this machine has 5\.8 GB; each "
        r"of these alone makes it fit: training\.lora: \{rank: 16\} \([34]\.\d+ GB\), dtype: bfloat16",
        message,
    )
    assert "training.gradient_checkpointing: true" in message
    assert "max_concurrency" not in message  # it saves too little
    for remedy in remedies(shape_of(SMOL), Workload()):
        assert (remedy.needed <= 58 * 10**8) is (f"{remedy.settings} (" in message or ", concurrency" in message) or (
            remedy == remedies(shape_of(SMOL), Workload())[-1]
        )


def test_what_fits_with_several_settings_together_only() -> None:
    with pytest.raises(ConfigError, match=r"; with training\.lora: .*, quantization: nf4, .* it would need 1\.\d+ GB$"):
        check_memory(plan(2 * 10**9))
    with pytest.raises(ConfigError, match=r"it would need .*; use a smaller model$"):
        check_memory(plan(10**9))


def test_memory_that_other_processes_hold() -> None:
    """It may be free later, so that only starting is refused."""
    busy = plan(24 * 10**9, 6 * 10**9)
    check_memory(busy)
    with pytest.raises(BackendUnavailable, match=r"only 6 GB of 24 GB are free; each of these alone .*training\.lora"):
        check_memory(busy, free=True)


def test_memory_that_is_reserved_for_keys_and_values() -> None:
    with pytest.raises(ConfigError, match=r"; each of these alone makes it fit: no kv_memory \(6"):
        check_memory(plan(12 * 10**9, kv_memory=10**10))


def test_limits_of_a_cgroup_are_named() -> None:
    small = plan(10**9)
    limited = replace(small, machine=MachineMemory(10**9, 10**9, Path("/sys/fs/cgroup/app")))
    with pytest.raises(ConfigError, match="but the limit of /sys/fs/cgroup/app is 1 GB; "):
        check_memory(limited)


def test_an_unknown_machine_refuses_nothing() -> None:
    unknown = replace(plan(0), machine=None)
    assert check_memory(unknown, free=True) is unknown
    assert unknown.summary().startswith("memory: about 7.")
    assert unknown.kv_limit is None


def test_the_header_has_the_limit_that_the_backend_gets() -> None:
    fits = plan(24 * 10**9, 20 * 10**9)
    assert fits.kv_limit is not None
    assert f"; keys and values of {fits.kv_limit // fits.budget.kv_token:,} tokens fit" in fits.summary()


def test_checkpoints_that_are_kept_at_once() -> None:
    assert kept_versions(KeepConfig(), 10, 0, keeps_best=True) == (5, 3)
    assert kept_versions(KeepConfig(last=1, every=2), 10, 0, keeps_best=False) == (8, 3)
    assert kept_versions(KeepConfig(), 1, 0, keeps_best=True) == (1, 1)


def test_validate_says_what_a_file_needs(tmp_path: Path) -> None:
    file = MODEL.parent / "grpo.yml"
    done = run("validate", file, folder=tmp_path)
    valid, memory, *table, disk = done.stdout.splitlines()
    assert valid.endswith("is valid")
    assert re.fullmatch(
        r"memory: about \d+ MB of \S+ [MG]B that are free \(\S+ GB in all\); keys and values of [\d,]+ tokens fit "
        "beside weights and training",
        memory,
    )
    assert [line.split("  ")[1].strip() for line in table][:3] == ["weights", "trained weights", "gradients"]
    assert re.fullmatch(r"disk: about \S+ MB of checkpoints; .* are free", disk)
    with fake_hub("org/name") as hub:
        change = ("-o", "trainer_adapters.backend.model", "org/name")
        unknown = run("validate", file, *change, folder=tmp_path, HF_ENDPOINT=hub)
    assert unknown.stdout.splitlines()[-1] == "memory: unknown before the backend has loaded its model"


MICRO_BATCH = """
import sys
import numpy as np
import torch
from insitu.backend.learner.batches import Row, collate
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.learner.policy import adamw, build_policy
from insitu.backend.model import load_model
from insitu.schemas.training_jobs import LoRASettings

rank, tokens = int(sys.argv[2]), 32
loaded = load_model(sys.argv[1])
policy = build_policy(loaded, LoRASettings(rank=rank) if rank else None, seed=0)
optimizer = adamw(policy.trainable, None)
for parameter in policy.trainable.values():
    parameter.grad = torch.zeros_like(parameter)
optimizer.step()
ids = np.arange(tokens, dtype=np.int32)
rows = [Row(ids * 7 + number, np.arange(8, tokens)) for number in range(16)]
LogprobComputer(loaded)(policy.module, collate(rows, loaded.device)).logprobs_N.sum().backward()
status = open("/proc/self/status").read()
print(next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")))
"""


LONG_PROMPT = """
import sys
from pathlib import Path
import numpy as np
from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner
from insitu.backend.model import load_model
from insitu.schemas.training_jobs import TrainingSettings
from insitu.wire.http_server import prepare_process

prepare_process()
learner = Learner(load_model(sys.argv[1]), Path(sys.argv[2]))
settings = TrainingSettings(lora={"rank": 16}, gradient_checkpointing=True)
prompt = np.arange(1500, dtype=np.int32) * 7
rows = [
    Row(np.append(prompt, prompt[number : number + 70]), np.arange(1500, 1570), np.full(70, -8, np.float32),
        np.full(70, (-1.0) ** number, np.float32), episode=str(number))
    for number in range(2)
]
for _ in learner.run(settings, rows):
    pass
status = open("/proc/self/status").read()
print(next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")))
"""


def measured(script: str, *arguments: str | Path) -> tuple[ModelShape, int]:
    """The real model's shape, and the peak that a process with this script prints."""
    command = [sys.executable, "-c", script, real_model(), *arguments]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    stored = stored_model(str(real_model()))
    assert stored is not None
    shape = model_shape(stored.config, stored.parameters)
    assert shape is not None
    return shape, peak


@pytest.mark.slow
def test_the_peak_with_gradient_checkpointing(tmp_path: Path) -> None:
    """Memory of a long prompt that is freed layer by layer is used again."""
    shape, peak = measured(LONG_PROMPT, tmp_path)
    sizes = {"job_tokens": 1640, "request_tokens": 1570, "prompt_tokens": 1500, "concurrency": 0}
    predicted = memory_budget(shape, Workload(lora_rank=16, gradient_checkpointing=True, **sizes)).fixed
    assert 0.6 * predicted < peak < predicted  # few tokens are trained


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 16])
def test_the_peak_of_a_real_model(rank: int) -> None:
    """Weights, optimizer and a micro-batch of 512 tokens, without a server: up to a quarter below the prediction."""
    shape, peak = measured(MICRO_BATCH, str(rank))
    assert shape.parameters == 134_515_008
    workload = Workload(lora_rank=rank or None, micro_batch_tokens=512, job_tokens=512, request_tokens=1, versions=0)
    predicted = memory_budget(shape, workload).fixed
    assert 0.75 * predicted < peak < 1.02 * predicted


def test_a_file_that_cannot_fit_is_refused_before_an_earlier_run_is_moved(
    tmp_path: Path, write_large: Callable[[], Path]
) -> None:
    model = write_large()
    (tmp_path / "runs").mkdir()
    done = run("finetune", MODEL.parent / "grpo.yml", "-o", "trainer_adapters.backend.model", model, folder=tmp_path)
    assert done.returncode == 2
    assert re.search(r"trainer_adapters\.\w+: training all weights of \S+ needs \S+ TB of memory, but ", done.stderr)
    assert done.stderr.rstrip().endswith("use a smaller model")
    assert not [*(tmp_path / "runs").iterdir()]


@pytest.fixture
def write_large(tmp_path: Path) -> Callable[[], Path]:
    """Writes a model whose configuration says that it has a trillion parameters, and whose weights are not there."""

    def write() -> Path:
        folder = shutil.copytree(MODEL, tmp_path / "large")
        (folder / "model.safetensors").unlink()
        config = json.loads((folder / "config.json").read_text())
        config |= {"hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 128}
        (folder / "config.json").write_text(json.dumps(config | {"head_dim": 128, "num_attention_heads": 256}))
        return folder

    return write


def test_a_backend_refuses_weights_that_cannot_fit(write_large: Callable[[], Path]) -> None:
    with pytest.raises(BackendError, match=r"the weights of \S+ take \S+ TB in float32, but .* are free; use "):
        load_model(str(write_large()))
