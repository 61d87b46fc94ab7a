"""A language model of about 0.5 B parameters on a GPU: sampling, one GRPO step, and the gap between the two.

The model is a randomly initialised Qwen2 with a tokenizer made on the spot. Without a GPU the same script takes one of
a few million parameters, so that it is known to run; only the figures of a GPU say anything about one.
"""

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import memory
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from insitu.backend import BackendOptions
from insitu.backend.model import LoadedModel, load_model
from insitu.backend.server import create_backend
from insitu.wire.http_format import http_url
from insitu.wire.http_server import listening

CONCURRENCY = 64
NDJSON = {"Content-Type": "application/x-ndjson"}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class Scale:
    """What is measured with: `tokens` of an episode, prompt included; `requests` sampled for the rates."""

    sizes: dict[str, Any]
    dtype: str
    tokens: int
    requests: int


LARGE = Scale(
    {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "bfloat16",
    tokens=512,
    requests=256,
)
SMALL = Scale(
    {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "float32",
    tokens=96,
    requests=64,
)


@dataclass(frozen=True)
class Measured:
    parameters: int
    generate: float
    backend: float
    step_seconds: float
    step_memory: float
    metrics: dict[str, float]


def make_model(folder: Path, scale: Scale) -> Path:
    """Random weights, and a tokenizer that has a word for every entry of the vocabulary."""
    size = scale.sizes["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"word{number}" for number in range(size - len(alphabet) - 1)), "<|end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    limits = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": None}
    config = Qwen2Config(**scale.sizes, **limits, eos_token_id=fast.eos_token_id, pad_token_id=fast.eos_token_id)
    Qwen2ForCausalLM(config).to(getattr(torch, scale.dtype)).save_pretrained(folder)
    return folder


def prompts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh ", k=rng.randint(16, 32))) for _ in range(count)]


@torch.inference_mode()
def generate_rate(loaded: LoadedModel, scale: Scale) -> float:
    """Tokens a second of transformers, in padded batches as large as the backend's concurrency."""
    tokenizer = loaded.tokenizer
    tokenizer.padding_side = "left"
    length = scale.tokens - 32

    def run(batch: list[str], length: int) -> None:
        inputs = tokenizer(batch, return_tensors="pt", padding=True).to(loaded.device)
        loaded.module.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            top_k=0,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=tokenizer.pad_token_id,
        )

    run(prompts(CONCURRENCY), 4)
    texts = prompts(scale.requests)
    began = time.perf_counter()
    for start in range(0, len(texts), CONCURRENCY):
        run(texts[start : start + CONCURRENCY], length)
    _synchronise()
    return len(texts) * length / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def serving(loaded: LoadedModel, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """The real server, in this process because that is where its peak memory can be read."""
    backend = create_backend(loaded, BackendOptions(model=loaded.source, max_batch=CONCURRENCY), folder)
    await backend.start()
    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        listening(backend.app, ("127.0.0.1", 0)) as address,
        aiohttp.ClientSession(http_url(*address), connector=connector, timeout=timeout) as session,
    ):
        yield session
    await backend.close()


async def sample(session: aiohttp.ClientSession, texts: list[str], length: int) -> list[dict[str, Any]]:
    async def one(text: str) -> dict[str, Any]:
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": length,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
        }
        async with session.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            return await response.json()

    return await asyncio.gather(*map(one, texts))


def job(answers: list[dict[str, Any]]) -> bytes:
    """One GRPO job in groups of eight, all in one optimiser step."""
    settings = {"learning_rate": 1e-5, "lora": {"rank": 16, "alpha": 32}}
    lines: list[dict[str, Any]] = [{"settings": settings, "num_rows": len(answers)}]
    for number, answer in enumerate(answers):
        prompt, choice = answer["prompt_token_ids"], answer["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        lines.append(
            {
                "token_ids": [*prompt, *choice["token_ids"]],
                "loss_mask": [0] * len(prompt) + [1] * len(choice["token_ids"]),
                "logprobs": [0.0] * len(prompt) + logprobs,
                "advantages": 1.0 if number % 2 else -1.0,
                "episode": str(number),
            }
        )
    return "\n".join(map(json.dumps, lines)).encode()


async def train(session: aiohttp.ClientSession, body: bytes) -> dict[str, Any]:
    async with session.post("/v1/train/jobs", data=body, headers=NDJSON) as response:
        response.raise_for_status()
        id = (await response.json())["id"]
    async with session.get(f"/v1/train/jobs/{id}/events") as response:
        states = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: ")]
    if states[-1]["status"] != "completed":
        raise RuntimeError(states[-1]["message"])
    return states[-1]["metrics"]


async def measure(scale: Scale, folder: Path) -> Measured:
    loaded = load_model(str(make_model(folder / "model", scale)), dtype=scale.dtype)
    parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    generated = generate_rate(loaded, scale)
    async with serving(loaded, folder / "out") as session:
        length = scale.tokens - 32
        await sample(session, prompts(CONCURRENCY), 4)
        began = time.perf_counter()
        await sample(session, prompts(scale.requests), length)
        rate = scale.requests * length / (time.perf_counter() - began)
        episodes = await sample(session, [text for text in prompts(8) for _ in range(8)], length)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        metrics = await train(session, job(episodes))
    return Measured(parameters, generated, rate, metrics["seconds"], _peak_memory(), metrics)


def report() -> str:
    """The section `gpu` of RESULTS.md."""
    scale = LARGE if torch.cuda.is_available() else SMALL
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(scale, Path(folder)))
    note = "" if scale is LARGE else "\n\nNo GPU was at hand: these figures are a CPU's, and the GPU's are missing."
    return f"""Qwen2 architecture, {found.parameters / 1e6:.0f} M random parameters, {scale.dtype}, LoRA of rank 16.

| what | measured |
|---|---|
| `generate()`, padded batches of {CONCURRENCY} | {found.generate:.0f} tokens/s |
| `insitu backend` over HTTP, {CONCURRENCY} at a time | {found.backend:.0f} tokens/s |
| ratio | {found.backend / found.generate:.2f} |
| one GRPO step of 64 episodes of {scale.tokens} tokens | {found.step_seconds:.1f} s |
| peak memory in it | {found.step_memory:.1f} GB |
| mean absolute gap between sampled and learner's logprobs | {found.metrics["logprob_gap"]:.1e} |{note}"""


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_memory() -> float:
    """In GB: allocated on the GPU since the count was reset, or what this process ever held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return memory.peak() / 1e9


if __name__ == "__main__":
    print(report())
