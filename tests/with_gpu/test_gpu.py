"""On a GPU: what is sampled and trained there is what the CPU computes, memory comes back, a whole run learns."""

import copy
import gc
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_engine import asks, params, running
from test_learner import make_rows, train
from tiny_models import save_tiny_model

from insitu.backend.inference.batches import Span
from insitu.backend.inference.kv_pool import BLOCK, Block, BlockStore, Windows
from insitu.backend.inference.runner import Runner
from insitu.backend.inference.sampler import GenerationRequest
from insitu.backend.learner.batches import Row, collate
from insitu.backend.learner.learner import Learner
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.learner.policy import build_policy
from insitu.backend.model import load_model
from insitu.errors import BackendError
from insitu.schemas.lora import LoRASettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROOT = Path(__file__).parent.parent.parent
KINDS = {
    "llama": {"max_position_embeddings": 4096},
    "qwen2": {"max_position_embeddings": 4096, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mistral": {"max_position_embeddings": 4096, "sliding_window": 100},
    "gpt2": {},
}
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_tiny_model(root / kind, kind, **sizes) for kind, sizes in KINDS.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
async def test_logprobs_are_those_of_the_plain_model_on_the_cpu(folders, kind: str, dtype: str) -> None:
    """Prompts of up to three blocks that are partly alike; completions cross the ends of blocks."""
    loaded, rng = load_model(str(folders[kind]), "cuda", dtype), random.Random(5)
    start = [rng.randrange(256) for _ in range(2 * BLOCK)]
    prompts = [start[:BLOCK], start, [*start, 1], [*start[: BLOCK + 30], 7], [*start[:BLOCK], *range(BLOCK - 3)], [5]]
    prompts = prompts if kind != "gpt2" else [prompt[-40:] for prompt in prompts]
    tokens = 60 if kind != "gpt2" else 20
    load = [(prompt, params(seed, tokens, temperature=0.7)) for prompt in prompts for seed in range(3)]
    async with running(loaded, max_batch=256, prefill_tokens=8192) as engine:
        pieces = await engine.complete([GenerationRequest(prompt, one) for prompt, one in load])
        assert engine.pool.used == engine.pool.unused, "nothing is left behind"
    module = load_model(str(folders[kind]), "cpu", "float32").module
    for (prompt, _), piece in zip(load, pieces, strict=True):
        ids = [*prompt, *(token.id for token in piece.tokens)]
        with torch.no_grad():
            expected = torch.log_softmax(module(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1] / 0.7, dim=-1)
        expected = expected.gather(-1, torch.tensor(ids[len(prompt) :])[:, None])[:, 0]
        allowed = 2e-4 if dtype == "float32" else 0.15
        assert [token.logprob for token in piece.tokens] == pytest.approx(expected.tolist(), abs=allowed)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_replayed_steps_are_those_computed_one_by_one(folders, kind: str) -> None:
    """Of rows with and without blocks; also once the windows lie elsewhere."""
    runner = Runner(load_model(str(folders[kind]), "cuda", "bfloat16").module)
    layout = runner.layout()
    layout = replace(layout, store=BlockStore(layout, 4))
    windows, blocks_B, rng = Windows(layout), [], random.Random(0)
    for row, length in enumerate((2 * BLOCK + 9, 7, BLOCK + 50)):
        prompt, blocks = [rng.randrange(256) for _ in range(length)], []
        for start in range(0, length, BLOCK):
            block = Block(layout, min(BLOCK, length - start))
            runner.prefill([Span(prompt, start, tuple(blocks), block)])
            blocks.append(block)
        windows.ensure(4, blocks[-1].length)
        windows.load(row, [blocks.pop()])
        blocks_B.append(blocks)
    alone = Runner(runner.module)
    alone.graphs = None
    position_B = np.array([2 * BLOCK + 9, 7, BLOCK + 50])
    assert runner.graphs is not None
    for width in (64, 128):
        windows.ensure(4, width)
        for step in range(5):
            tokens_B = np.array([3, 4, 5]) + step
            blocks_B[0].reverse()  # their places change and no shape
            expected_BV = alone.decode(windows, blocks_B, tokens_B, position_B + step)
            assert torch.equal(runner.decode(windows, blocks_B, tokens_B, position_B + step), expected_BV)
        assert runner.graphs.works
        assert len(runner.graphs) == 1
    runner.rest(windows)
    assert len(runner.graphs) == 0


async def test_many_requests_at_once_finish_and_the_memory_is_used_again(folders) -> None:
    """200 short ones, then a long one; with little room the youngest are computed again."""
    loaded = load_model(str(folders["qwen2"]), "cuda", "bfloat16")
    prompts = [[random.Random(n).randrange(256) for _ in range(70)] for n in range(25)]
    for room in ({}, {"kv_bytes": 16 * BLOCK * 256}):
        async with running(loaded, max_batch=256, prefill_tokens=8192, **room) as engine:
            requests = [asks(prompts[n % 25], [params(n, 200)])[0] for n in range(200 if not room else 60)]
            taken = []
            for _ in range(2):
                pieces = await engine.complete(requests)
                assert {len(piece.tokens) for piece in pieces} == {200}
                taken.append(torch.cuda.memory_allocated())
            assert max(taken) - min(taken) < 20e6, taken
            if not room:
                long = (await engine.complete(asks([7] * 3000, [params(0, 10)])))[0]
                assert len(long.tokens) == 10
            assert engine.pool.used == engine.pool.unused


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize("attention", ["padded", "packed"])
def test_a_job_changes_the_weights_as_on_the_cpu(folders, tmp_path: Path, attention: str, lora) -> None:
    results = {}
    for device in ("cpu", "cuda"):
        loaded = load_model(str(folders["llama"]), device, "float32")
        rows = make_rows(load_model(str(folders["llama"]), "cpu").module, 16)
        settings = {
            "lora": lora,
            "mini_batch_size": 4,
            "learning_rate": 1e-3,
            "attention": attention,
            "kl": {"beta": 0.1},
        }
        result, _ = train(Learner(loaded, tmp_path / device), rows, **settings)
        weights = {name: weight.detach().float().cpu() for name, weight in result.module.named_parameters()}
        results[device] = weights, result.metrics
    (ours, metrics), (expected, of_cpu) = results["cuda"], results["cpu"]
    assert metrics["loss"] == pytest.approx(of_cpu["loss"], abs=1e-4)
    assert metrics["grad_norm"] == pytest.approx(of_cpu["grad_norm"], rel=1e-3)
    moved = max((expected[name] - weight).abs().max().item() for name, weight in ours.items())
    assert moved < 1e-3, "AdamW moves a weight by at most 4 times the rate"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_have_the_logprobs_and_gradients_of_padded_ones(
    folders, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    loaded = load_model(str(folders["qwen2"]), "cuda", dtype)
    compute, rng = LogprobComputer(loaded), np.random.default_rng(0)
    start = rng.integers(0, 256, 200)
    rows = [
        Row(np.concatenate([start, rng.integers(0, 256, n)]).astype(np.int32), np.arange(200, 200 + n))
        for n in (17, 60, 90, 31)
    ]
    assert compute.packs_alike(rows), caplog.text
    found = []
    for packed in (False, True):
        policy = build_policy(loaded, LoRASettings(**LORA), seed=0)
        batch = collate(rows, loaded.device, packed=packed)
        logprobs_BK = batch.to_rows(compute(policy.module, batch).logprobs_N)
        logprobs_BK.sum().backward()
        gradients = [p.grad.float().flatten() for p in policy.trainable.values() if p.grad is not None]
        found.append((logprobs_BK.detach().float(), torch.cat(gradients)))
    (padded, gradient), (packed_logprobs, packed_gradient) = found
    allowed = 1e-4 if dtype == "float32" else 0.05
    assert (packed_logprobs - padded).norm() < allowed * padded.norm()
    assert (packed_gradient - gradient).norm() < allowed * 10 * gradient.norm()


def test_bfloat16_learns_as_float32_does(folders, tmp_path: Path) -> None:
    """With all weights at a rate for real models, far below what bfloat16 resolves."""
    exact = load_model(str(folders["llama"]), "cpu", "float32")
    value, rng = np.full(20, -5, np.float32), np.random.default_rng(0)
    rows = [
        Row(rng.integers(0, 256, 40).astype(np.int32), np.arange(20, 40), value, np.full(20, sign, np.float32), str(n))
        for n, sign in enumerate([1, -1] * 8)
    ]
    signs_B1, gains = torch.tensor([[1.0], [-1.0]] * 8), {}
    batch = collate(rows, exact.device)
    before_BK = batch.to_rows(LogprobComputer(exact)(exact.module, batch).logprobs_N)
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(str(folders["llama"]), "cuda", dtype)
        learner, module = Learner(loaded, tmp_path / dtype), loaded.module
        for _ in range(5):
            result, _ = train(learner, rows, learning_rate=1e-4, mini_batch_size=8)
            module = result.module
        served = copy.deepcopy(module).float().cpu()
        with torch.no_grad():
            after_BK = batch.to_rows(LogprobComputer(exact)(served, batch).logprobs_N)
        gains[dtype] = ((after_BK - before_BK) * signs_B1).mean().item()
    assert gains["float32"] > 0.001, gains
    assert gains["bfloat16"] == pytest.approx(gains["float32"], rel=0.3), gains


def test_a_job_that_runs_out_of_memory_fails_and_the_next_one_trains(folders, tmp_path: Path) -> None:
    loaded = load_model(str(folders["llama"]), "cuda", "float32")
    learner = Learner(loaded, tmp_path)
    rows = make_rows(load_model(str(folders["llama"]), "cpu").module, 8)
    long = [Row(np.arange(3000, dtype=np.int32) % 256, np.arange(1, 3000), *[np.ones(2999, np.float32)] * 2, "x")] * 8
    gc.collect()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 8 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(BackendError, match=r"too little memory .* training.micro_batch_tokens below 16384"):
            train(learner, long)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    result, _ = train(learner, rows)
    assert result.version == 1


def insitu(*arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from insitu.cli import main; main()", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, cwd=ROOT)


def test_a_whole_run_learns_resumes_and_exports(tmp_path: Path) -> None:
    """The quickstart on the GPU, which `device: auto` takes."""
    folder, out = tmp_path / "tic_tac_toe", tmp_path / "run"
    shutil.copytree(ROOT / "examples/tic_tac_toe", folder)
    config = folder / "grpo.yml"
    text = config.read_text()
    config.write_text(text.replace("runs/tic_tac_toe", str(out)))
    checked = insitu("validate", config)
    assert checked.returncode == 0, checked.stderr
    done = insitu("finetune", config, "--override", "finetuning.num_epochs", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = insitu("finetune", config, "--override", "finetuning.num_epochs", 6, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    history = json.loads((out / "validation_history.json").read_text())
    scores = [each["avg_reward"] for each in history]
    assert scores[-1] > scores[0] + 0.1, scores
    exported = insitu("export", out, tmp_path / "export")
    assert exported.returncode == 0, exported.stderr
    load_model(str(tmp_path / "export"), "cpu")
