"""Learning rates on a real pretrained model: how far its policy moves in four jobs, and what that gains.

python benchmarks/run.py learning_rates
"""

import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner
from insitu.backend.model import LoadedModel, load_model
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import TrainingSettings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from real_model import real_model

ALL, LORA = (1e-6, 5e-6, 1e-5, 5e-5), (1e-4, 3e-4)
JOBS, GENERATIONS, TOKENS, KL_ROWS = 4, 8, 6, 8
PRODUCTS = ("kettle", "lamp", "chair", "phone")
MESSAGES = (
    "The {} that I ordered last week has not arrived.",
    "Good morning, can I send back a {} without the box?",
    "My new {} broke after two days. What can I do?",
    "How much is the delivery of one {} to Madrid?",
)
SYSTEM = "Answer with the product that the customer writes about, in one word."


class Measured(NamedTuple):
    """After each job: the KL divergence from the start in nats per token, and the mean reward of the next samples."""

    kl: list[float]
    rewards: list[float]


def score(answer: str, product: str) -> float:
    """1 for the product alone; less for each other word. 0 without the product."""
    words = re.findall(r"\w+", answer.lower())
    return 1 / len(words) if product in words else 0.0


@torch.no_grad()
def sample(loaded: LoadedModel, module: nn.Module, seed: int) -> tuple[list[Row], float]:
    """The rows of a job, with group-relative advantages, and the mean reward."""
    rows, rewards = [], []
    generator = torch.Generator().manual_seed(seed)
    end = loaded.tokenizer.eos_token_id
    for number, product in enumerate(PRODUCTS):
        content = MESSAGES[number % len(MESSAGES)].format(product)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
        text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        completions, logprobs = _complete(module, prompt, generator)
        kept = [ids[: ids.index(end) + 1] if end in ids else ids for ids in completions]
        answers = loaded.tokenizer.batch_decode(kept, skip_special_tokens=True)
        scores = [score(answer, product) for answer in answers]
        mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
        rewards.append(mean)
        for index, (ids, of_tokens, reward) in enumerate(zip(kept, logprobs, scores, strict=True)):
            positions = np.arange(len(prompt), len(prompt) + len(ids))
            advantages = np.full(len(ids), (reward - mean) / (deviation + 1e-6), np.float32)
            sampled = np.array(of_tokens[: len(ids)], np.float32)
            token_ids = np.array([*prompt, *ids], np.int32)
            rows.append(Row(token_ids, positions, sampled, advantages, episode=f"{number}-{index}"))
    return rows, statistics.fmean(rewards)


def _complete(
    module: nn.Module, prompt: Sequence[int], generator: torch.Generator
) -> tuple[list[list[int]], list[list[float]]]:
    """Completions of one prompt at temperature 1, and the log-probabilities of their tokens."""
    output = module(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    cache, logits_BV = output.past_key_values, output.logits[:, -1].float().expand(GENERATIONS, -1)
    cache.batch_repeat_interleave(GENERATIONS)
    ids, logprobs = [], []
    for _ in range(TOKENS):
        logprobs_BV = logits_BV.log_softmax(-1)
        ids_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        ids.append(ids_B1)
        logprobs.append(logprobs_BV.gather(1, ids_B1))
        if len(ids) < TOKENS:
            output = module(input_ids=ids_B1, past_key_values=cache, use_cache=True)
            logits_BV = output.logits[:, -1].float()
    return torch.cat(ids, 1).tolist(), torch.cat(logprobs, 1).tolist()


def train(loaded: LoadedModel, rate: float, lora: LoRASettings | None, start: tuple[list[Row], float]) -> Measured:
    """`start` are the samples of the loaded model."""
    settings = TrainingSettings(learning_rate=rate, lora=lora, kl_rows=KL_ROWS)
    result, (rows, _) = Measured([], []), start
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(loaded, Path(folder), default_lora=lora)
        for job in range(JOBS):
            steps = learner.run(settings, rows)
            try:
                while True:
                    next(steps)
            except StopIteration as end:
                trained = end.value
            rows, reward = sample(loaded, trained.module, seed=job + 1)
            result.kl.append(trained.metrics["kl"])
            result.rewards.append(reward)
    return result


def report() -> str:
    loaded = load_model(str(real_model()), "cpu", "float32")
    start = sample(loaded, loaded.module, seed=0)
    lora = LoRASettings(rank=16, alpha=32)
    lines = []
    for name, adapters, rates in (("all weights", None, ALL), ("LoRA, rank 16", lora, LORA)):
        for rate in rates:
            kl, rewards = train(loaded, rate, adapters, start)
            lines.append(f"| {name} | {rate:g} | {kl[0]:.2g} | {kl[-1]:.2g} | {rewards[0]:.3f} | {rewards[-1]:.3f} |")
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    return f"""## Learning rates on a real model

SmolLM2-135M-Instruct takes the product out of a customer's message; the reward is 1 for that word alone, less for each
other word. {JOBS} jobs of {len(PRODUCTS)} prompts x {GENERATIONS} completions of at most {TOKENS} tokens, one optimizer
step each. The samples of the model itself have the mean reward {start[1]:.3f}. KL: from the start, in nats per token.

| trained | learning rate | KL after 1 job | after {JOBS} | reward after 1 job | after {JOBS} |
|---|---|---|---|---|---|
{table}
"""
