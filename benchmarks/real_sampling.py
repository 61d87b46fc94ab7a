"""Sampling from the real model: the backend's sampler beside `generate()` and beside what the processor allows.

The side of a case is a process: this script with the case as JSON. Prompts are windows of the licence, other ones in
each step, so that none is cached; all prompts of a case are equally long, which spares `generate()` its padding.

The *matmul limit* is the time of a case if it were nothing but bare matrix products: its floating-point operations (two
a weight and token, of the output layer for sampled tokens only, and those of attention; a prompt counts once for all
its generations) at the rate of one large `torch.matmul` on all cores, measured in the same run. The *reading limit* of
a single stream is the time to read all weights once a token, at the rate of one large matrix-vector product.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import learner
import torch

HERE = Path(__file__).parent
GROUPS, GENERATIONS = 8, 8
LENGTHS = {(70, 16): 3, (70, 128): 1, (1500, 16): 1}
"""Tokens of a prompt and of a completion, and rounds in turn."""
STREAM = (70, 64)
TOP_P, TOP_P_ROUNDS = 0.95, 3
LARGE = 3072
"""Rows of the square matrices whose product is timed."""
WIDE = 16_384
"""Rows of the square matrix that is read: 1 GiB in float32, more than any cache holds."""
REPEATS = 5


@dataclass(frozen=True)
class Case:
    """A side ("insitu", "generate" or "limits") and what it samples; `generations` share a prompt."""

    side: str
    model: str
    dtype: str = "float32"
    prompt: int = 70
    tokens: int = 16
    groups: int = GROUPS
    generations: int = GENERATIONS
    top_p: float = 1.0


@cache
def text_tokens(model: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return list(tokenizer((HERE.parent / "LICENSE").read_text(), verbose=False)["input_ids"])


def prompts(case: Case, step: int) -> list[list[int]]:
    """One for each group, none of which begins as another one of this or another step."""
    tokens = text_tokens(case.model)
    starts = ((step * case.groups + group) * 7 % len(tokens) for group in range(case.groups))
    repeated = tokens * (2 + case.prompt // len(tokens))
    return [repeated[start : start + case.prompt] for start in starts]


def insitu_step(case: Case, folder: Path) -> Callable[[], dict[str, Any]]:
    """Samples by the engine that `insitu backend` makes; the first step is of two tokens."""
    from insitu.backend import BackendOptions
    from insitu.backend.inference.sampler import GenerationRequest, SamplingParams
    from insitu.backend.server import load_backend

    loop, steps = asyncio.new_event_loop(), 0
    backend = load_backend(BackendOptions(model=case.model, dtype=case.dtype), folder)
    loop.run_until_complete(backend.start())

    async def sample(tokens: int) -> None:
        requests = [
            GenerationRequest(prompt, SamplingParams(seed=seed, max_tokens=tokens, top_p=case.top_p, ignore_eos=True))
            for prompt in prompts(case, steps)
            for seed in range(case.generations)
        ]
        answers = await asyncio.gather(*(backend.sampler.complete([request]) for request in requests))
        assert all(len(answer.tokens) == tokens for (answer,) in answers)

    def step() -> dict[str, Any]:
        nonlocal steps
        loop.run_until_complete(sample(case.tokens if steps else 2))
        steps += 1
        return {}

    return step


def generate_step(case: Case, folder: Path) -> Callable[[], dict[str, Any]]:
    """All requests in one batch; the first step is of two tokens and a group."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=getattr(torch, case.dtype)).eval()
    steps = 0

    def step() -> dict[str, Any]:
        nonlocal steps
        chosen = prompts(case, steps) if steps else prompts(case, 0)[:1]
        ids = torch.tensor(chosen).repeat_interleave(case.generations, 0)
        tokens = case.tokens if steps else 2
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=case.top_p,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=model.config.eos_token_id,
            )
        steps += 1
        return {}

    return step


def limits_step(case: Case, folder: Path) -> Callable[[], dict[str, Any]]:
    """Operations a second of a large matrix product, and bytes a second of one with a vector; the best of some."""
    dtype = getattr(torch, case.dtype)
    square, wide = torch.randn(LARGE, LARGE).to(dtype), torch.randn(WIDE, WIDE).to(dtype)
    vector = torch.randn(WIDE).to(dtype)

    def shortest(product: Callable[[], torch.Tensor]) -> float:
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def step() -> dict[str, Any]:
        computed = 2 * LARGE**3 / shortest(lambda: square @ square)
        return {"flops": computed, "bytes": wide.nbytes / shortest(lambda: wide @ vector)}

    return step


@dataclass(frozen=True)
class Sizes:
    """What a token costs: parameters that are multiplied in the layers and in the output, and those of attention."""

    layers: int
    output: int
    attended: int
    """Operations of attention for each token of the context."""

    @classmethod
    def of(cls, model: str) -> "Sizes":
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model)
        width = config.hidden_size // config.num_attention_heads
        heads, shared = config.num_attention_heads * width, config.num_key_value_heads * width
        attention = 2 * config.hidden_size * (heads + shared)
        layer = attention + 3 * config.hidden_size * config.intermediate_size
        layers = config.num_hidden_layers
        return cls(layers * layer, config.hidden_size * config.vocab_size, 4 * heads * layers)

    def operations(self, case: Case) -> float:
        """Of a case: each prompt once, and a step for each sampled token."""
        computed, sampled = case.groups * case.prompt, case.groups * case.generations * case.tokens
        contexts = computed * case.prompt / 2 + sampled * (case.prompt + case.tokens / 2)
        return 2 * self.layers * (computed + sampled) + 2 * self.output * sampled + self.attended * contexts


def has_bfloat16() -> bool:
    """Whether the processor multiplies it."""
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def measured(cases: list[Case], rounds: int) -> list[learner.Side]:
    return [*learner.in_turn(cases, sys.executable, rounds, __file__)]


def both(case: Case, rounds: int) -> list[learner.Side]:
    """The sides "generate" and "insitu" of a case."""
    return measured([replace(case, side="generate"), replace(case, side="insitu")], rounds)


def batch_row(case: Case, rounds: int, operations: float, rate: float) -> str:
    generated, ours = both(case, rounds)
    theirs, seconds, limit = generated.median("seconds"), ours.median("seconds"), operations / rate
    peaks = [f"{side.steps[-1]['peak'] / 1e9:.1f}" for side in (generated, ours)]
    return (
        f"| {case.prompt:,} + {case.tokens} | {case.dtype} | {theirs:.2f} s | {seconds:.2f} s | "
        f"{theirs / seconds:.2f} | {limit:.2f} s | {limit / seconds:.0%} | {peaks[0]} | {peaks[1]} |"
    )


def report(model: str, lengths: dict[tuple[int, int], int] = LENGTHS, groups: int = GROUPS) -> str:
    """The section `real.sampling` of RESULTS.md."""
    dtypes = ["float32", *(["bfloat16"] if has_bfloat16() else [])]
    rates = {dtype: measured([Case("limits", model, dtype)], 1)[0].steps[-1] for dtype in dtypes}
    sizes, case = Sizes.of(model), Case("insitu", model, groups=groups)
    rows = []
    for dtype in dtypes:
        for (prompt, tokens), rounds in lengths.items():
            each = replace(case, dtype=dtype, prompt=prompt, tokens=tokens)
            rows.append(batch_row(each, rounds, sizes.operations(each), rates[dtype]["flops"]))
    alone = replace(case, groups=1, generations=1, prompt=STREAM[0], tokens=STREAM[1])
    generated, ours = (STREAM[1] / side.median("seconds") for side in both(alone, TOP_P_ROUNDS))
    reading = rates["float32"]["bytes"] / 4 / (sizes.layers + sizes.output)
    plain, cut = measured([case, replace(case, top_p=TOP_P)], TOP_P_ROUNDS)
    cost = cut.median("seconds") / plain.median("seconds") - 1
    speeds = ", ".join(f"{dtype} {rate['flops'] / 1e9:.0f} GFLOP/s" for dtype, rate in rates.items())
    table = "\n".join(rows)
    return f"""## Sampling from a real model

SmolLM2-135M-Instruct, {groups * GENERATIONS} requests at once: {groups} prompts with {GENERATIONS} generations each, by
the engine and by `generate()` in one batch, each in a process of its own, in turn. The limit is the time of the bare
matrix products, every prompt computed once: {speeds}. Asked for in float32: 55 %, 48 % and 72 % of the limit, and 2.3,
1.5 and 8 times `generate()`; in bfloat16 32 % for 70 + 16. Peak memory is the process's, in GB.

| tokens | dtype | `generate()` | insitu | ratio | limit | of the limit | memory of `generate()` | of insitu |
|---|---|---|---|---|---|---|---|---|
{table}

| what | measured | asked for |
|---|---|---|
| a single stream of {STREAM[0]} + {STREAM[1]} tokens, float32 | {ours:.1f} tokens/s | at least 20 |
| the same by `generate()` | {generated:.1f} tokens/s | |
| if reading the weights were all, at {rates["float32"]["bytes"] / 1e9:.0f} GB/s | {reading:.0f} tokens/s | |
| `top_p: {TOP_P}`: {groups * GENERATIONS} requests of 70 + 16 take longer by | {cost:.1%} | at most 5 % |"""


if __name__ == "__main__":
    case = Case(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as name:
        make = {"insitu": insitu_step, "generate": generate_step, "limits": limits_step}[case.side]
        learner.serve(lambda: make(case, Path(name)))
