"""The engine: reproducible sampling whatever the company, shared prompts, versions, cancellation; and its parts."""

import asyncio
import contextlib
import copy
import gc
import itertools
import math
import os
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marks import slow_after, slow_but
from model_families import FAMILIES
from peft import LoraConfig, inject_adapter_in_model
from processes import HANGS
from tiny_models import byte_tokenizer, save_tiny_model, with_bfloat16_kernels
from transformers import T5Config
from waiting import turns, until

from insitu.backend import BackendOptions, configure_math_libraries
from insitu.backend.adapters import speed_up
from insitu.backend.compute import ComputeThread
from insitu.backend.inference.batch_shapes import suitable_threads
from insitu.backend.inference.batches import Span
from insitu.backend.inference.engine import Engine
from insitu.backend.inference.kv_pool import BLOCK, Block, BlockStore, KVPool, LayerShape, Layout, Windows
from insitu.backend.inference.runner import Runner
from insitu.backend.inference.sampler import GenerationRequest, OutputDelta, SamplingParams, WeightVersion
from insitu.backend.inference.sampling import SLOT, choice_seed, sample, uniforms
from insitu.backend.inference.scheduler import EngineOptions
from insitu.backend.learner.batches import Row
from insitu.backend.model import LoadedModel, load_model
from insitu.backend.server import create_backend
from insitu.errors import BackendError, RequestRefused
from insitu.schemas.training_jobs import TrainingSettings

Sampled = list[tuple[int, float]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": save_tiny_model(root / "llama", "llama", max_position_embeddings=1024),
        "qwen2": save_tiny_model(root / "qwen2", "qwen2", hidden_size=48, num_attention_heads=3, num_key_value_heads=1),
        "gpt2": save_tiny_model(root / "gpt2", "gpt2"),
        "mistral": save_tiny_model(root / "mistral", "mistral", max_position_embeddings=1024, sliding_window=100),
    }


@contextlib.asynccontextmanager
async def running(model: Path | LoadedModel, dtype: str = "auto", load_version=None, compute=None, **options):
    """A started engine over a model, or the one in a folder."""
    loaded = load_model(str(model), "cpu", dtype) if isinstance(model, Path) else model
    compute = compute or ComputeThread()
    compute.start()
    engine = Engine(
        loaded,
        compute,
        load_version or (lambda weights: loaded.module),
        EngineOptions(**({"max_length": loaded.max_length, "max_batch": 16, "threads": 1} | options)),
    )
    try:
        await engine.start()
        yield engine
    finally:
        compute.close()


def params(seed: int, tokens: int, **more) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=tokens, **({"ignore_eos": True} | more))


def asks(prompt: list[int], each: list[SamplingParams]) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, one) for one in each]


def pairs(piece: OutputDelta) -> Sampled:
    return [(token.id, token.logprob) for token in piece.tokens]


def mixed_load(seed: int, count: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.choice([1, 7, 20, 33, 60, longest]))] for _ in range(count // 2)]
    return [
        (
            rng.choice(prompts),
            params(
                seed=index,
                tokens=rng.randrange(1, 40),
                temperature=rng.choice([0, 0.6, 1.0, 1.7]),
                top_p=rng.choice([1, 1, 0.8]),
                top_logprobs=rng.choice([0, 0, 3]),
            ),
        )
        for index in range(count)
    ]


async def sampled_in_order(engine: Engine, load, order: list[int], gap: float, seed: int) -> list[Sampled]:
    """Sends `load` in `order`, each after a random wait of up to `gap` seconds; the results in the load's own order."""
    rng = random.Random(seed)

    async def one(index: int) -> tuple[int, Sampled]:
        await asyncio.sleep(rng.random() * gap)
        prompt, each = load[index]
        return index, pairs((await engine.complete(asks(prompt, [each])))[0])

    return [result for _, result in sorted(await asyncio.gather(*map(one, order)))]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=with_bfloat16_kernels)])
@pytest.mark.parametrize("name", slow_after(1, ["llama", "qwen2", "gpt2"]))
async def test_what_is_sampled_depends_on_the_request_alone(folders, name, dtype):
    """Nor on the room there is for keys and values: the youngest of too many sequences are computed again."""
    load = mixed_load(seed=5, count=9, longest=BLOCK - 20 if name == "llama" else 150)
    results = []
    trials = [(0, 2**28, 1, None), (0.2, 2**28, 2, None), (0.05, 1, 3, None), (0, 2**28, 2, 4 * BLOCK)]
    for trial, (gap, prefix_bytes, threads, kv_tokens) in enumerate(trials):
        room = kv(kv_tokens, 512 if name == "gpt2" else 256)
        async with running(folders[name], dtype, prefix_bytes=prefix_bytes, threads=threads, **room) as engine:
            order = list(range(len(load)))
            random.Random(trial).shuffle(order)
            results.append(await sampled_in_order(engine, load, order, gap, trial))
            assert engine.pool.used == engine.pool.unused <= prefix_bytes, "nothing is left behind"
            if trial == 0:
                alone = [pairs((await engine.complete(asks(p, [each])))[0]) for p, each in load[:5]]
    assert alone == results[0][:5]
    assert results[1] == results[0]
    assert results[2] == results[0]
    assert results[3] == results[0]


def kv(tokens: int | None, token_bytes: int = 256) -> dict[str, int]:
    """The option for so many tokens of a tiny model."""
    return {} if tokens is None else {"kv_bytes": tokens * token_bytes}


@pytest.mark.slow
async def test_long_sequences_share_their_prompts_and_outgrow_the_room(folders):
    """Prompts of one to three blocks, some of which begin alike; completions that cross the end of a block.

    With other threads, too, where MKL does not choose its path by the addresses of their scratch.
    """
    rng = random.Random(5)
    start = [rng.randrange(256) for _ in range(2 * BLOCK)]
    prompts = [start[:BLOCK], start, [*start, 1], [*start[: BLOCK + 30], 7], [*start[:BLOCK], *range(BLOCK - 3)], [5]]
    load = [(prompt, params(seed, 60)) for prompt in prompts for seed in range(2)]
    results = []
    more = 2 if "STRICT" in os.environ.get("MKL_CBWR", "") else 1
    for trial, (threads, kv_tokens) in enumerate([(1, None), (more, None), (more, 5 * BLOCK), (1, 6 * BLOCK)]):
        async with running(folders["llama"], threads=threads, **kv(kv_tokens)) as engine:
            order = list(range(len(load)))
            random.Random(trial).shuffle(order)
            results.append(await sampled_in_order(engine, load, order, 0, trial))
            assert engine.pool.used == engine.pool.unused, "nothing is left behind"
            if trial == 0:
                alone = [
                    pairs((await engine.complete(asks(*load[n][:1], [load[n][1]])))[0]) for n in range(0, len(load), 4)
                ]
    assert alone == results[0][::4]
    assert results[1:] == results[:1] * 3


async def test_an_engine_without_room_for_a_sequence_is_refused(folders):
    with pytest.raises(BackendError, match=r"kv_memory is 1\.02 kB, but a sequence needs"):
        async with running(folders["llama"], kv_bytes=1024):
            pass


@pytest.mark.slow
async def test_a_sequence_is_as_long_as_the_room(folders):
    async with running(folders["llama"], **kv(4 * BLOCK)) as engine:
        assert engine.max_length < 4 * BLOCK
        piece = (await engine.complete(asks([1, 2], [params(0, 5000)])))[0]
        assert len(piece.tokens) == engine.max_length - 2


@pytest.mark.parametrize(
    ("name", "prompt_length"),
    slow_but(
        [("llama", 600), ("mistral", 600)],
        [("llama", 30), ("llama", 600), ("qwen2", 100), ("gpt2", 40), ("mistral", 600)],
    ),
)
async def test_logprobs_are_those_of_the_plain_model_after_temperature(folders, name, prompt_length):
    prompt = [random.Random(2).randrange(256) for _ in range(prompt_length)]
    async with running(folders[name]) as engine:
        piece = (await engine.complete(asks(prompt, [params(3, 30, temperature=0.5, top_p=0.9)])))[0]
    ids = [*prompt, *(token.id for token in piece.tokens)]
    module = load_model(str(folders[name])).module
    with torch.no_grad():
        expected = torch.log_softmax(module(torch.tensor([ids])).logits[0].float() / 0.5, dim=-1)
    for position, token in enumerate(piece.tokens, start=prompt_length - 1):
        assert token.logprob == pytest.approx(expected[position, token.id].item(), abs=4e-5)


async def test_bfloat16_is_served(folders):
    prompt = [random.Random(2).randrange(256) for _ in range(40)]
    async with running(folders["llama"], "bfloat16") as engine:
        piece = (await engine.complete(asks(prompt, [params(3, 30)])))[0]
    ids = torch.tensor([[*prompt, *(token.id for token in piece.tokens)]])
    with torch.no_grad():
        logits = load_model(str(folders["llama"])).module(ids).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    assert [token.logprob for token in piece.tokens] == pytest.approx(expected.tolist(), abs=0.1)


def test_mkl_is_asked_for_reproducible_products():
    environment: dict[str, str] = {}
    configure_math_libraries(environment)
    assert environment.pop("GOMP_SPINCOUNT") == "30000"
    processor = Path("/proc/cpuinfo").read_text()
    if "GenuineIntel" in processor or "avx512f" in processor:
        assert environment == {"MKL_CBWR": "AUTO,STRICT"}
    elif "avx2" in processor:
        assert environment == {"MKL_CBWR": "AVX2,STRICT"}
    else:
        assert environment == {}
    configure_math_libraries(chosen := {"MKL_CBWR": "AVX2", "GOMP_SPINCOUNT": "1"})
    assert chosen == {"MKL_CBWR": "AVX2", "GOMP_SPINCOUNT": "1"}


async def test_prompts_are_padded_together_in_float16(folders):
    """Of several lengths, some with a block before: their logits are those of each alone, up to rounding."""
    rng = random.Random(4)
    start = [rng.randrange(256) for _ in range(BLOCK)]
    prompts = [[1], [2] * 9, start[:70], [*start, 5], [*start, *start[:40]], start]
    load = asks([], [params(0, 1, temperature=1)])[0].params
    loaded = load_model(str(folders["llama"]), "cpu", "float16")
    async with running(loaded, prefill_tokens=4096) as engine:
        passes: list[tuple[int, ...]] = []
        loaded.module.register_forward_pre_hook(
            lambda module, args, kwargs: passes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        together = await engine.complete([GenerationRequest(prompt, load) for prompt in prompts])
    assert max(rows for rows, columns in passes if columns > 1) > 2
    module = load_model(str(folders["llama"])).module
    for prompt, piece in zip(prompts, together, strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(module(torch.tensor([prompt])).logits[0, -1], dim=-1)
        assert piece.tokens[0].logprob == pytest.approx(expected[piece.tokens[0].id].item(), abs=0.1)


@pytest.mark.parametrize("places", [0, 2, 9])
def test_blocks_in_a_store_are_read_as_the_others(folders, places):
    """Of a model with windows, whose rows have no block, one, and two; a full store leaves some blocks outside."""
    module = load_model(str(folders["mistral"]), "cpu").module
    runner, rng = Runner(module), np.random.default_rng(0)
    layout = runner.layout()
    layout = replace(layout, store=BlockStore(layout, places) if places else None)
    prompts = [rng.integers(0, 256, length).tolist() for length in (2 * BLOCK + 9, 7, BLOCK + 50)]
    windows = Windows(layout)
    windows.ensure(4, 64)
    blocks_B = []
    with torch.inference_mode():
        for row, prompt in enumerate(prompts):
            blocks: list[Block] = []
            for start in range(0, len(prompt), BLOCK):
                block = Block(layout, min(BLOCK, len(prompt) - start))
                runner.prefill([Span(prompt, start, tuple(blocks), block)])
                blocks.append(block)
            windows.load(row, [blocks.pop()])
            blocks_B.append(blocks)
        positions = np.array([len(prompt) for prompt in prompts])
        logits_BV = runner.decode(windows, blocks_B, np.array([3, 4, 5]), positions)
    in_store = [block.place for blocks in blocks_B for block in blocks]
    assert sum(map(bool, in_store)) == min(places, 3)
    for prompt, token, logits_V in zip(prompts, (3, 4, 5), logits_BV, strict=True):
        expected_V = module(torch.tensor([[*prompt, token]])).logits[0, -1]
        assert logits_V.tolist() == pytest.approx(expected_V.tolist(), abs=1e-4)
    if places:
        blocks_B.clear()
        del block, blocks
        again = [Block(layout, BLOCK) for _ in range(places)]
        assert sorted(block.place for block in again) == [*range(1, places + 1)], "places are given again"
        assert Block(layout, BLOCK).place == 0


async def test_greedy_is_what_generate_gives(folders):
    prompt = list(range(40, 60))
    async with running(folders["llama"]) as engine:
        piece = (await engine.complete(asks(prompt, [params(0, 20, temperature=0)])))[0]
    module = load_model(str(folders["llama"])).module
    ids = torch.tensor([prompt])
    with torch.no_grad():
        expected = module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=20, max_new_tokens=20
        )
    # generate() bars the end of turn until min_new_tokens; the engine was told to sample through it.
    assert [token.id for token in piece.tokens] == expected[0, len(prompt) :].tolist()


async def test_a_groups_prompt_is_computed_once(folders):
    prompt_rows: list[int] = []
    loaded = load_model(str(folders["llama"]), "cpu")
    async with running(loaded) as engine:
        loaded.module.register_forward_pre_hook(
            lambda module, args, kwargs: prompt_rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        prompt = list(range(32))
        await engine.complete(asks(prompt, [params(seed, 3) for seed in range(8)]))
        await engine.complete(asks(prompt, [params(9, 3)]))
    assert [columns for columns in prompt_rows if columns > 1] == [32]


async def test_a_group_of_one_token_after_a_prompt_of_whole_blocks(folders):
    """No window has room for its sequences, which end before they need it."""
    prompt = [token % 200 for token in range(BLOCK)]
    async with running(folders["llama"]) as engine:
        await engine.complete(asks([1, 2, 3], [params(0, 4)]))
        group = engine.complete(asks(prompt, [params(seed, 1) for seed in range(6)]))
        others = engine.complete(asks(prompt, [params(9, 30)])), engine.complete(asks([7, 8], [params(10, 30)]))
        ended = await asyncio.wait_for(asyncio.gather(group, *others), HANGS)
        assert [[len(output.tokens) for output in outputs] for outputs in ended] == [[1] * 6, [30], [30]]
        assert engine.pool.used == engine.pool.unused, "all blocks have been given back"


async def at_once(
    engine: Engine, compute: ComputeThread, each: Sequence[SamplingParams], prompts: Sequence[list[int]] = ()
) -> list[Any]:
    """What becomes of requests that the engine sees in the same step, by default with one prompt; all get an answer."""
    begin = threading.Event()
    held = asyncio.ensure_future(compute.call(begin.wait))
    asked = [
        asyncio.ensure_future(engine.complete(asks(prompt, [one])))
        for one, prompt in zip(each, prompts or [[1, 2, 3]] * len(each), strict=True)
    ]
    await until(lambda: engine.num_requests[1] == len(each))
    begin.set()
    await held
    return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), HANGS)


async def together(
    engine: Engine, compute: ComputeThread, each: Sequence[SamplingParams], prompts: Sequence[list[int]]
) -> list[Sampled]:
    return [pairs(piece) for (piece,) in await at_once(engine, compute, each, prompts)]


async def alone(engine: Engine, each: Sequence[SamplingParams], prompts: Sequence[list[int]]) -> list[Sampled]:
    pieces = [await engine.complete(asks(prompt, [one])) for prompt, one in zip(prompts, each, strict=True)]
    return [pairs(piece) for (piece,) in pieces]


async def test_requests_of_a_step_that_fails_are_all_answered(tmp_path):
    """Also those that ended in it, or were about to begin; what they held is given back."""
    loaded = load_model(str(save_tiny_model(tmp_path, vocab_size=2**19)), "cpu")
    steps = itertools.count(1)

    def break_the_third_row(module, args, logits):
        if next(steps) == 2:
            logits = logits.clone()
            logits.flatten(0, -2)[2] = torch.nan
        return logits

    async with running(loaded, compute=(compute := ComputeThread())) as engine:
        hook = loaded.module.get_output_embeddings().register_forward_hook(break_the_third_row)
        *ended, failed = await at_once(engine, compute, [params(0, 2), params(1, 2), params(2, 8)])
        hook.remove()
        assert [len(outputs[0].tokens) for outputs in ended] == [2, 2]
        assert "not finite" in str(failed)
        malformed = params(1, 3, logit_bias=((1, 2.0), (3,)))
        for outcome in await at_once(engine, compute, [params(0, 3), malformed, params(2, 3)]):
            assert isinstance(outcome, ValueError)
        assert len((await engine.complete(asks([1, 2, 3], [params(0, 3)])))[0].tokens) == 3
        assert engine.pool.used == engine.pool.unused, "nothing is left behind"


async def test_sequences_wait_for_others_that_begin(folders):
    """While more prompts are left than sequences run, at most four steps; those with one prompt run at once."""
    loaded, steps = load_model(str(folders["llama"]), "cpu"), []

    def note(module, args, kwargs):
        steps.append("prompt" if kwargs["input_ids"].shape[1] > 1 else "tokens")

    async with running(loaded, compute=(compute := ComputeThread()), prefill_tokens=8) as engine:
        hook = loaded.module.register_forward_pre_hook(note, with_kwargs=True)
        prompts = [[number] * 8 for number in range(12)]
        outputs = await at_once(engine, compute, [params(seed, 30) for seed in range(12)], prompts)
        assert steps[:9] == [*["prompt"] * 5, *["tokens", "prompt"] * 2]
        steps.clear()
        await at_once(engine, compute, [params(seed, 4) for seed in range(3)])
        assert steps == ["prompt", *["tokens"] * 3]
        hook.remove()
        for seed, (together,) in enumerate(outputs):
            (alone,) = await engine.complete(asks(prompts[seed], [params(seed, 30)]))
            assert pairs(alone) == pairs(together)


async def test_a_sequence_gets_the_place_of_one_that_ends_before_it_is_sampled(tmp_path):
    """Two rows are sampled together: the last one moves while its token has been computed and not sampled."""
    loaded = load_model(str(save_tiny_model(tmp_path, vocab_size=2**19)), "cpu")
    each = [params(seed, tokens) for seed, tokens in enumerate((2, 6, 3, 6, 4, 6, 6))]
    async with running(loaded, compute=(compute := ComputeThread())) as engine:
        outputs = await at_once(engine, compute, each)
        for one, (together,) in zip(each, outputs, strict=True):
            (alone,) = await engine.complete(asks([1, 2, 3], [one]))
            assert pairs(alone) == pairs(together)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=[pytest.mark.slow, with_bfloat16_kernels])]
)
async def test_what_prompts_begin_with_is_computed_once(folders, dtype):
    """In one forward pass, also within a block; each is sampled from as if it were alone."""
    rng, computed = random.Random(3), []
    start = [rng.randrange(256) for _ in range(BLOCK + 60)]
    shared = (0, 1, 20, 31, 32, 33, 100, 190, 200, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 50)
    prompts = [[*start[:count], *(rng.randrange(256) for _ in range(rng.randint(1, 60)))] for count in shared]
    loaded = load_model(str(folders["llama"]), "cpu", dtype)

    def note(module, args, kwargs):
        if (tokens := kwargs["input_ids"].shape[1]) > 1:
            computed.append(tokens)

    each = [params(seed, 3) for seed in range(len(prompts))]
    async with running(loaded, compute=(compute := ComputeThread()), prefill_tokens=4096, prefix_bytes=0) as engine:
        hook = loaded.module.register_forward_pre_hook(note, with_kwargs=True)
        outputs = await at_once(engine, compute, each, prompts)
        hook.remove()
        spans = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
        assert sum(computed) == pytest.approx(len(spans), abs=8), "up to a multiple of four rows"
        for prompt, one, (together,) in zip(prompts, each, outputs, strict=True):
            (alone,) = await engine.complete(asks(prompt, [one]))
            assert pairs(alone) == pairs(together)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=with_bfloat16_kernels)])
async def test_sums_over_most_of_a_block_do_not_depend_on_the_other_requests(tmp_path, dtype):
    """On AMD's processors MKL adds up to 192 terms at once, and more in two parts: some have fewer, some more.

    What a layer has between its products is shared by three threads, but not evenly.
    """
    heads = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 700}
    loaded = load_model(str(save_tiny_model(tmp_path, "llama", max_position_embeddings=512, **heads)), "cpu", dtype)
    prompts = [[random.Random(count).randrange(256) for _ in range(count)] for count in (120, 140, 160, 180, 200, 230)]
    each = [params(seed, 20) for seed in range(len(prompts))]
    async with running(loaded, compute=(compute := ComputeThread()), prefix_bytes=0, threads=3) as engine:
        assert await alone(engine, each, prompts) == await together(engine, compute, each, prompts)


async def test_tokens_of_an_expert_do_not_depend_on_the_other_requests(tmp_path):
    """Without AVX-512, MKL computes fewer than four rows of a product by another kernel."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "max_position_embeddings": 512}
    loaded = load_model(str(save_tiny_model(tmp_path, "qwen3_moe", hidden_size=128, **sizes)), "cpu")
    prompts = [[random.Random(count).randrange(256) for _ in range(count)] for count in (3, 9, 20, 61, 100)]
    each = [params(seed, 8) for seed in range(len(prompts))]
    async with running(loaded, compute=(compute := ComputeThread()), prefix_bytes=0, threads=2) as engine:
        assert await alone(engine, each, prompts) == await together(engine, compute, each, prompts)


async def test_threads_do_not_share_the_columns_of_a_single_product(tmp_path):
    """Of a model with one head of keys, whose blocks are shared by one row, and by several."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    loaded = load_model(str(save_tiny_model(tmp_path, "llama", **sizes)), "cpu")
    begin = [random.Random(0).randrange(256) for _ in range(2 * BLOCK + 5)]
    prompts = [begin[: BLOCK + count] for count in (1, 2, 40)] + [begin, [*begin, 3], [7, *begin]]
    each, results = [params(seed, 6) for seed in range(len(prompts))], []
    for threads in (1, 3, 6):
        async with running(loaded, compute=(compute := ComputeThread()), threads=threads) as engine:
            results += [await together(engine, compute, each, prompts), await alone(engine, each, prompts)]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(("heads", "keys", "size"), [(6, 6, 8), (4, 4, 16), (5, 5, 24), (3, 3, 36), (8, 4, 64)])
async def test_heads_with_few_queries_do_not_depend_on_the_other_requests(tmp_path, heads, keys, size):
    """Their products of one or two rows, which kernels may compute by the number of columns."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": size, "hidden_size": heads * size}
    loaded = load_model(str(save_tiny_model(tmp_path, "llama", max_position_embeddings=1024, **shape)), "cpu")
    prompts = [[random.Random(count).randrange(256) for _ in range(count)] for count in (2, 30, 61, 125, 250, 300)]
    prompts += [[*prompts[-1], 5], [*prompts[-1][:BLOCK], 7]]
    each, results = [params(seed, 10) for seed in range(len(prompts))], []
    for threads in (1, 2):
        async with running(loaded, compute=(compute := ComputeThread()), threads=threads) as engine:
            results += [await together(engine, compute, each, prompts), await alone(engine, each, prompts)]
    assert all(result == results[0] for result in results)


def test_threads_that_suit_the_narrowest_layer():
    module = torch.nn.Sequential(torch.nn.Linear(256, 200), torch.nn.Linear(1000, 1))
    assert [suitable_threads(module, most) for most in (1, 2, 8, 64)] == [1, 2, 8, 8]


async def test_requests_of_two_versions_share_a_small_pool(folders):
    """The oldest goes on, whatever version it asks for: they would push each other out for ever."""
    loaded = load_model(str(folders["llama"]), "cpu")
    ask = asks([1, 2, 3], [params(1, 2 * BLOCK + 20)])
    async with running(loaded, **kv(4 * BLOCK + 60)) as engine:
        await engine.publish(WeightVersion(1), copy.deepcopy(loaded.module))
        (alone,) = await engine.complete(ask)
        both = asyncio.gather(*(engine.complete(ask, WeightVersion(version)) for version in (0, 1)))
        for (piece,) in await asyncio.wait_for(both, HANGS):
            assert pairs(piece) == pairs(alone)
        assert engine.pool.used == engine.pool.unused, "nothing is left behind"


async def test_a_request_that_needs_much_room_is_not_passed_by_those_of_another_version(folders):
    loaded, ended = load_model(str(folders["llama"]), "cpu"), list[str]()
    async with running(loaded, compute=(compute := ComputeThread()), **kv(4 * BLOCK)) as engine:
        await engine.publish(WeightVersion(1), copy.deepcopy(loaded.module))

        async def ask(name: str, version: int, prompt: list[int]) -> None:
            await engine.complete(asks(prompt, [params(0, 20)]), WeightVersion(version))
            ended.append(name)

        begin = threading.Event()
        held = asyncio.ensure_future(compute.call(begin.wait))
        every = [ask(f"before {n}", 1, [n, 1]) for n in range(3)]
        every += [ask("large", 0, [token % 200 for token in range(2 * BLOCK + 100)])]
        every += [ask(f"after {n}", 1, [n, 2]) for n in range(12)]
        asked = asyncio.gather(*every)
        await until(lambda: engine.num_requests == (0, len(every)))
        begin.set()
        await held
        await asyncio.wait_for(asked, HANGS)
        assert ended.index("large") <= 3


async def test_weights_that_are_published_take_the_place_of_a_copy(folders):
    """Of a version that was asked for by its number before: its blocks keep no weights in memory."""
    loaded, copies = load_model(str(folders["llama"]), "cpu"), list[weakref.ref[torch.nn.Module]]()

    def load_version(weights: WeightVersion):
        module = copy.deepcopy(loaded.module)
        copies.append(weakref.ref(module))
        return module

    async with running(loaded, load_version=load_version) as engine:
        await engine.complete(asks([1, 2, 3], [params(0, 3)]), WeightVersion(1))
        await engine.publish(WeightVersion(1), loaded.module)
        await engine.complete(asks([1, 2, 3], [params(0, 3)]))
        gc.collect()
        assert [each() for each in copies] == [None]


@pytest.mark.skipif("STRICT" not in os.environ.get("MKL_CBWR", ""), reason="products may depend on their rows")
async def test_strict_products_have_the_rows_that_are_needed(folders):
    """Prompts that arrive together are computed together, and a step has about a row for each sequence."""
    passes: list[tuple[int, ...]] = []
    loaded = load_model(str(folders["llama"]), "cpu")
    async with running(loaded) as engine:
        loaded.module.register_forward_pre_hook(
            lambda module, args, kwargs: passes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        await engine.complete([GenerationRequest([number] * 9, params(number, 3)) for number in range(11)])
    assert passes[0][1] >= 99
    assert {rows for rows, columns in passes[1:]} <= {11, 12}


@pytest.mark.parametrize("rank", [1, 8])
async def test_adapters_do_not_make_samples_depend_on_the_other_requests(folders, rank):
    """They are not there yet when the engine finds how many rows a step may have; one column is a special case."""
    loaded = load_model(str(folders["llama"]), "cpu")
    torch.manual_seed(0)
    adapters = LoraConfig(r=rank, init_lora_weights=False, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    adapted = inject_adapter_in_model(adapters, copy.deepcopy(loaded.module)).eval()
    speed_up(adapted)
    async with running(loaded) as engine:
        await engine.publish(WeightVersion(1), adapted)
        load = [(list(range(number, number + 9)), params(number, 4)) for number in range(11)]
        together = await asyncio.gather(*(engine.complete(asks(p, [each])) for p, each in load))
        for (prompt, each), (piece,) in [*zip(load, together, strict=True)][-4:]:
            assert pairs((await engine.complete(asks(prompt, [each])))[0]) == pairs(piece)


async def test_requests_leave_and_join_while_others_sample(folders):
    """One long request must not hold up short ones that come after it."""
    async with running(folders["llama"]) as engine:
        long = asyncio.ensure_future(engine.complete(asks([1, 2, 3], [params(0, 100)])))
        await until(lambda: engine.num_requests[0] == 1)
        for seed in range(5):
            await engine.complete(asks([4, 5], [params(seed, 4)]))
        assert not long.done()
        assert len((await long)[0].tokens) == 100


async def test_more_requests_than_slots_all_finish(folders):
    async with running(folders["qwen2"], max_batch=4) as engine:
        pieces = await asyncio.gather(*(engine.complete(asks([n, 1], [params(n, 6)])) for n in range(30)))
    assert all(len(piece.tokens) == 6 for (piece,) in pieces)


async def test_cancelled_requests_free_their_slots(folders):
    async with running(folders["llama"], max_batch=2) as engine:
        tasks = [asyncio.ensure_future(engine.complete(asks([n], [params(n, 1000)]))) for n in range(6)]
        await until(lambda: engine.num_requests[0] >= 2)
        for task in tasks:
            task.cancel()
        stream = engine.stream(asks([1], [params(7, 1000)]))
        await anext(stream)
        await stream.aclose()
        piece = (await asyncio.wait_for(engine.complete(asks([1], [params(8, 3)])), HANGS))[0]
        assert len(piece.tokens) == 3
        assert not any(scheduler.sequences for scheduler in engine.schedulers.values())


async def test_requests_under_way_finish_with_the_weights_they_began_with(folders):
    loaded = load_model(str(folders["llama"]), "cpu")
    async with running(loaded) as engine:
        module = loaded.module.requires_grad_(True)
        changed = copy.deepcopy(module)
        module.requires_grad_(False)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.mul_(1.3)
        reference = pairs((await engine.complete(asks([5, 6, 7], [params(1, 60)])))[0])
        under_way = asyncio.ensure_future(engine.complete(asks([5, 6, 7], [params(1, 60)])))
        await until(lambda: engine.num_requests[0] == 1)
        await engine.publish(WeightVersion(1), changed)
        after = (await engine.complete(asks([5, 6, 7], [params(1, 60)])))[0]
        before = (await under_way)[0]
        again = (await engine.complete(asks([5, 6, 7], [params(1, 60)]), WeightVersion(0)))[0]
    assert (before.version, after.version, again.version) == (0, 1, 0)
    assert pairs(before) == reference == pairs(again)
    assert pairs(after) != reference


async def test_lanes_of_old_weights_are_dropped(folders):
    def load_version(weights: WeightVersion):
        if weights.version > 4:
            raise RequestRefused(f"there is no version {weights.version}", status=404)
        return load_model(str(folders["llama"])).module

    loaded = load_model(str(folders["llama"]), "cpu")
    async with running(loaded, load_version=load_version, kept_versions=2) as engine:
        for version in (1, 2, 3, 4):
            await engine.publish(WeightVersion(version), loaded.module)
        for version in (0, 1, 2, 3):
            assert (await engine.complete(asks([1], [params(0, 2)]), WeightVersion(version)))[0].version == version
        await engine.complete(asks([1], [params(0, 2)]))
        assert {weights.version for weights in engine.schedulers} == {2, 3, 4}
        with pytest.raises(RequestRefused, match="no version 9"):
            await engine.complete(asks([1], [params(0, 2)]), WeightVersion(9))


async def test_lineages_share_the_start_and_nothing_else(folders):
    def load_version(weights: WeightVersion):
        assert weights == WeightVersion(0)
        return loaded.module

    loaded = load_model(str(folders["llama"]), "cpu")
    async with running(loaded, load_version=load_version, kept_versions=1) as engine:
        changed = copy.deepcopy(loaded.module)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.mul_(1.3)
        asked = asks([5, 6, 7], [params(1, 20)])
        start = pairs((await engine.complete(asked))[0])
        assert pairs((await engine.complete(asked, WeightVersion(None, "a")))[0]) == start
        assert len(engine.schedulers) == 1
        await engine.publish(WeightVersion(1, "a"), changed)
        await engine.publish(WeightVersion(1, "b"), loaded.module)
        newest = (await engine.complete(asked, WeightVersion(None, "a")))[0]
        assert (newest.version, engine.version) == (1, 0)
        assert pairs(newest) == pairs((await engine.complete(asked, WeightVersion(1, "a")))[0]) != start
        for weights in (WeightVersion(0, "a"), WeightVersion(None, "b"), WeightVersion()):
            assert pairs((await engine.complete(asked, weights))[0]) == start
        await engine.publish(WeightVersion(1), changed)
        assert set(engine.schedulers) == {WeightVersion(1), WeightVersion(1, "a"), WeightVersion(1, "b")}
        assert (
            pairs((await engine.complete(asked, WeightVersion(None, "c")))[0]) == start
        )  # from the loaded model again
        await engine.retire(WeightVersion(None, "a"))
        assert set(engine.schedulers) == {WeightVersion(0), WeightVersion(1), WeightVersion(1, "b")}


async def test_old_weights_that_cannot_be_read_fail_only_who_asks_for_them(folders):
    def load_version(weights: WeightVersion):
        raise FileNotFoundError("step_000001 is gone")

    async with running(folders["llama"], load_version=load_version) as engine:
        with pytest.raises(FileNotFoundError):
            await asyncio.wait_for(engine.complete(asks([1], [params(0, 2)]), WeightVersion(1)), HANGS)
        assert (await engine.complete(asks([1], [params(0, 2)])))[0].version == 0


async def test_a_failing_step_fails_its_requests_and_nothing_else(folders):
    loaded = load_model(str(folders["llama"]), "cpu")
    async with running(loaded) as engine:
        failing = loaded.module.register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.complete(asks([1, 2], [params(0, 2)]))
        failing.remove()
        assert len((await engine.complete(asks([1, 2], [params(0, 2)])))[0].tokens) == 2


async def test_what_was_finished_before_a_step_failed_is_told(folders):
    """One request ends with the token its prompt gives; then the other's decoding fails, in the same step."""

    def fail_decoding(module, args, given):
        if given["input_ids"].shape[1] == 1:
            raise RuntimeError("out of memory")

    loaded = load_model(str(folders["llama"]), "cpu")
    compute = ComputeThread()
    async with running(loaded, compute=compute) as engine:
        loaded.module.register_forward_pre_hook(fail_decoding, with_kwargs=True)
        together = threading.Event()
        holding = asyncio.create_task(compute.call(together.wait, 10))
        both = asyncio.gather(
            *(asyncio.wait_for(engine.complete(asks([1, 2], [params(0, n)])), HANGS) for n in (1, 5)),
            return_exceptions=True,
        )
        await until(lambda: sum(engine.num_requests) == 2)
        together.set()
        short, long = await both
        await holding
    assert short[0].finish_reason == "length"
    assert str(long) == "out of memory"


async def test_a_client_that_leaves_while_its_prompt_is_computed_frees_its_slot(folders):
    """The prompt takes several steps, and the client is gone in the middle of the first."""
    loaded = load_model(str(folders["llama"]), "cpu")
    compute = ComputeThread()
    async with running(loaded, max_batch=4, compute=compute) as engine:
        loop = asyncio.get_running_loop()
        leaving: list[asyncio.Task] = []
        left = threading.Event()

        def leave(module, args):
            loop.call_soon_threadsafe(leaving[0].cancel)
            left.wait(10)

        for count in range(6):
            hook = loaded.module.register_forward_pre_hook(leave)
            prompt = [count, *range(256), *range(200)]
            leaving[:] = [asyncio.create_task(engine.complete(asks(prompt, [params(0, 2)])))]
            with pytest.raises(asyncio.CancelledError):
                await leaving[0]
            hook.remove()
            left.set()
            await compute.call(lambda: None)
            left.clear()
        await asyncio.wait_for(engine.complete(asks([1, 2], [params(0, 2)])), HANGS)
        assert engine.pool.used == engine.pool.unused, "the memory of its prompt is free"


def _fail(module, args):
    raise RuntimeError("out of memory")


async def test_min_tokens_bars_the_end_of_turn(folders):
    async with running(folders["llama"]) as engine:
        end = next(iter(engine.tokenizer.eos_token_ids))
        each = [params(seed, 120, ignore_eos=False, min_tokens=10) for seed in range(16)]
        pieces = await engine.complete(asks([1, 2, 3], each))
    assert all(len(piece.tokens) > 10 for piece in pieces)
    assert all(token.id != end for piece in pieces for token in piece.tokens[:10])
    ended = [piece for piece in pieces if piece.finish_reason == "stop"]
    assert ended, "of 16 completions of 120 tokens some end before the limit"
    assert all(piece.tokens[-1].id == end for piece in ended)


async def test_prompt_and_completion_end_at_the_maximum_length(folders):
    async with running(folders["llama"], max_length=40) as engine:
        piece = (await engine.complete(asks(list(range(30)), [params(0, 100)])))[0]
    assert (len(piece.tokens), piece.finish_reason) == (10, "length")


# --- drawing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)])
def test_logits_that_are_not_finite_are_one_sentence(temperature: float, top_p: float) -> None:
    logits = torch.randn(3, 2000)
    logits[1] = torch.nan
    with pytest.raises(BackendError, match="the model's logits are not finite"):
        sample(logits, draws(3, temperature, top_p))


def draws(count: int, temperature=1.0, top_p=1.0, seeds=None, index=0) -> np.ndarray:
    slots = np.zeros(count, SLOT)
    slots["temperature"], slots["top_p"], slots["index"] = temperature, top_p, index
    slots["seed"] = np.arange(count) if seeds is None else seeds
    return slots


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_drawn_frequencies_are_the_tempered_distribution(temperature):
    logits_V = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf])
    count = 40_000
    drawn = sample(logits_V.expand(count, -1), draws(count, temperature))
    expected = torch.softmax(logits_V / temperature, dim=-1).tolist()
    frequencies = Counter(drawn.tokens)
    for token, probability in enumerate(expected):
        bound = 4.5 * math.sqrt(probability * (1 - probability) / count)
        assert abs(frequencies[token] / count - probability) <= bound
    assert drawn.logprobs[0] == pytest.approx(math.log(expected[drawn.tokens[0]]), abs=1e-6)


def test_the_nucleus_is_the_smallest_set_that_holds_top_p():
    logits_V = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1]))
    for top_p, allowed in [(0.5, {1}), (0.51, {1, 2}), (0.8, {1, 2}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})]:
        assert set(sample(logits_V.expand(2000, -1), draws(2000, top_p=top_p)).tokens) == allowed


def test_rows_of_a_batch_do_not_change_each_other():
    logits_BV = torch.randn(16, 300, generator=torch.Generator().manual_seed(0))
    mixed = draws(16, np.tile([0.0, 0.7, 1.0, 1.3], 4), np.tile([1.0, 0.9, 1.0, 0.5], 4), index=np.arange(16))
    together = sample(logits_BV, mixed)
    for row in range(16):
        alone = sample(logits_BV[row : row + 1], mixed[row : row + 1])
        assert (alone.tokens, alone.logprobs) == ([together.tokens[row]], [together.logprobs[row]])


def test_numbers_of_a_seed_are_uniform_and_those_of_two_seeds_unrelated():
    index = np.arange(20_000)
    one = uniforms(np.full(20_000, 7, dtype=np.uint64), index)
    two = uniforms(np.full(20_000, 8, dtype=np.uint64), index)
    for numbers in (one, two):
        assert np.histogram(numbers, bins=20, range=(0, 1))[0].std() < 60
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.03
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.03
    assert one.max() < 1


def test_choices_draw_from_different_seeds():
    assert choice_seed(5, 0) == 5
    assert choice_seed(-1, 0) == 2**64 - 1
    assert len({choice_seed(seed, choice) for seed in range(50) for choice in range(50)}) == 2500


def test_the_pool_keeps_the_latest_prompts_and_stays_within_its_limits():
    layout = Layout((LayerShape(1, 2, 2),), torch.float32, torch.device("cpu"))
    size = Block(layout, 4).size
    pool = KVPool(limit=4 * size, prefix_limit=3 * size)

    def add(number: int) -> Block:
        assert pool.take(size)
        return pool.add(("owner", number), Block(layout, 4))

    for number in range(3):
        pool.drop([add(number)])
    used = pool.use(("owner", 0))
    pool.drop([add(3)])
    assert pool.used == 4 * size
    assert ("owner", 1) in pool
    pool.drop([used])
    assert ("owner", 1) not in pool, "the longest unused goes first"
    assert ("owner", 0) in pool
    assert pool.used == pool.unused == 3 * size
    assert pool.take(3 * size), "blocks that no sequence needs make room"
    assert not pool.take(2 * size)
    assert (pool.used, pool.unused) == (4 * size, size)
    first, second = add_in_use(pool, layout), None
    pool.give(2 * size)
    assert pool.take(size)
    second = pool.add(("owner", 9), Block(layout, 4))
    assert second is first, "equal prompts share a block"
    pool.forget("owner")
    assert pool.used == size, "in use"
    pool.drop([first, second])
    assert pool.used == 0


def add_in_use(pool: KVPool, layout: Layout) -> Block:
    """A block whose bytes were taken before."""
    return pool.add(("owner", 9), Block(layout, 4))


# --- the compute thread --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def computing():
    compute = ComputeThread()
    compute.start()
    try:
        yield compute
    finally:
        compute.close()


class Clock:
    """The time that sampling and training steps take, by the seconds that they add; `trace` has them in order."""

    def __init__(self, compute: ComputeThread) -> None:
        self.now = 0.0
        self.trace: list[str] = []
        compute.clock = lambda: self.now

    def spend(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.trace.append(what)

    def sampling_step(self, seconds: float, steps: int = 10**6) -> Callable[[], bool]:
        """`steps` of them leave something to sample."""
        left = iter(range(steps))

        def step() -> bool:
            if next(left, None) is None:
                return False
            self.spend("s", seconds)
            return True

        return step

    async def train(self, compute: ComputeThread, seconds: float, steps: int = 4) -> str:
        """The trace from the first of a generator's steps to the last."""

        def generator():
            for number in range(steps):
                self.spend("t", seconds)
                yield number

        events: list[int] = []
        await compute.run_interleaved(generator(), events.append)
        await compute.call(setattr, compute, "sampling_step", None)
        assert events == [*range(steps)]
        return "".join(self.trace).strip("s")


async def test_sampling_has_its_share_of_the_time_between_the_steps_of_a_generator():
    with computing() as compute:
        clock = Clock(compute)
        assert compute.sampling_share == 0.75
        await compute.call(setattr, compute, "sampling_step", clock.sampling_step(seconds=0.25))
        assert await clock.train(compute, seconds=1.0) == "t".join(["", *["s" * 12] * 3, ""])


@pytest.mark.slow
async def test_the_share_of_sampling_changes_no_token_and_no_weight(folders, tmp_path):
    rng = np.random.default_rng(0)
    zeros, positions = np.zeros(40, np.float32), np.arange(8, 48)
    rows = [
        Row(rng.integers(0, 200, 48).astype(np.int32), positions, zeros, zeros + rng.normal(), episode=str(number))
        for number in range(8)
    ]
    outcomes = []
    for share in (0.0, 0.75):
        folder, options = tmp_path / str(share), BackendOptions(model="m", threads=1)
        backend = create_backend(load_model(str(folders["llama"]), "cpu"), options, folder)
        await backend.start()
        backend.compute.sampling_share = share
        settings = TrainingSettings(learning_rate=1e-3, micro_batch_tokens=64)
        job = backend.jobs.submit(None, settings, rows)
        first = WeightVersion(0)
        asked = [backend.sampler.complete(asks([seed, 1], [params(seed, 24)]), first) for seed in range(4)]
        sampled = [[pairs(each) for each in outputs] for outputs in await asyncio.gather(*asked)]
        await asyncio.wait([job.task])
        assert job.state.status == "completed", job.state.message
        await backend.close()
        outcomes.append((sampled, (folder / "checkpoints/step_000001/model.safetensors").read_bytes()))
    assert outcomes[0] == outcomes[1]


async def test_a_job_gets_a_step_after_each_sampling_step_that_is_longer_than_its_share():
    with computing() as compute:
        clock = Clock(compute)
        await compute.call(setattr, compute, "sampling_step", clock.sampling_step(seconds=60.0))
        assert await clock.train(compute, seconds=1.0) == "tststst"


async def test_a_job_does_not_wait_for_sampling_that_is_idle():
    with computing() as compute:
        clock = Clock(compute)
        assert await clock.train(compute, seconds=1.0) == "tttt"
        await compute.call(setattr, compute, "sampling_step", clock.sampling_step(seconds=0.25, steps=5))
        # Idle steps take no time: if the job waited for it to pass, it would never end.
        assert (await asyncio.wait_for(clock.train(compute, seconds=1.0), HANGS)).count("t") == 8


async def test_a_canceled_job_ends_before_sampling_has_had_its_share():
    with computing() as compute:
        clock = Clock(compute)
        started = asyncio.Event()
        await compute.call(setattr, compute, "sampling_step", lambda: True)  # takes no time: it never has its share

        def steps():
            while True:
                clock.spend("t", 1.0)
                yield 1

        task = asyncio.create_task(compute.run_interleaved(steps(), lambda _: started.set()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, HANGS)
        assert clock.trace.count("t") == 1


async def test_cancelling_the_caller_closes_the_generator_in_the_thread():
    closed_in: list[str] = []

    def steps():
        try:
            while True:
                yield 1
        finally:
            closed_in.append(threading.current_thread().name)

    with computing() as compute:
        started = asyncio.Event()
        task = asyncio.create_task(compute.run_interleaved(steps(), lambda _: started.set()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed_in == ["insitu-compute"]
        assert await compute.call(sum, [1, 2]) == 3


async def test_errors_reach_the_awaiting_caller():
    def steps():
        yield 1
        raise ValueError("bad row")

    with computing() as compute:
        with pytest.raises(ValueError, match="bad row"):
            await compute.run_interleaved(steps(), lambda _: None)
        with pytest.raises(ZeroDivisionError):
            await compute.call(lambda: 1 / 0)


# --- loading -------------------------------------------------------------------------------------------------------


def test_sources_that_cannot_be_served_say_why(tmp_path, folders):
    with pytest.raises(BackendError, match="there is no folder"):
        load_model(str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BackendError, match=r"neither config\.json nor adapter_config\.json"):
        load_model(str(tmp_path / "empty"))
    T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).save_pretrained(tmp_path / "t5")
    with pytest.raises(BackendError, match="t5 model; only decoder-only"):
        load_model(str(tmp_path / "t5"))
    plain = save_tiny_model(tmp_path / "plain")
    byte_tokenizer(chat_template=None).save_pretrained(plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(BackendError, match="has no chat template"):
        load_model(str(plain))
    with pytest.raises(BackendError, match=r"dtype is 'int3'; allowed: auto, float32"):
        load_model(str(folders["llama"]), dtype="int3")
    with pytest.raises(
        BackendError, match=r"quantization nf4 needs the extra quantized \(pip install -e '\.\[quantized\]' in "
    ):
        load_model(str(folders["llama"]), quantization="nf4")


def test_long_rotary_embeddings_cap_the_length(tmp_path):
    """Beyond, the frequencies of all tokens of a batch depend on its longest row."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    folder = save_tiny_model(
        tmp_path, "phi3", max_position_embeddings=512, original_max_position_embeddings=128, rope_parameters=rope
    )
    assert load_model(str(folder)).max_length == 128


def test_llama_4_ends_before_its_scores_are_scaled_by_position(tmp_path):
    """Which transformers computes without the positions that the cache holds."""
    family = FAMILIES["Llama 4 (text)"]
    folder = save_tiny_model(tmp_path, family.model_type, **{**family.settings, "floor_scale": 128})
    assert load_model(str(folder)).max_length == 128


async def test_a_model_with_another_kind_of_state_is_refused(tmp_path):
    folder = save_tiny_model(tmp_path, "mamba", state_size=4)
    with pytest.raises(BackendError, match=r"mamba models cannot be served here: their .* layers keep a state"):
        async with running(folder):
            pass


async def test_a_full_queue_refuses_requests_and_forgets_cancelled_ones(folders):
    prompt = list(range(9))
    async with running(folders["llama"], max_batch=1, max_in_flight=4) as engine:
        waiting = [asyncio.create_task(engine.complete(asks(prompt, [params(i, 900)]))) for i in range(4)]
        await turns(1)
        with pytest.raises(RequestRefused, match="4 completions are waiting already") as refused:
            await engine.complete(asks(prompt, [params(9, 1)]))
        assert refused.value.status == 429
        for task in waiting[1:]:
            task.cancel()
        await asyncio.wait(waiting[1:])
        async with asyncio.timeout(HANGS):
            await until(lambda: sum(engine.num_requests) <= 1)
        assert not waiting[0].done()
        waiting[0].cancel()
        assert len(await engine.complete(asks(prompt, [params(9, 1)]))) == 1
