"""The optimizer steps of one job, micro-batch by micro-batch.

Shapes: B rows of a micro-batch, K maximum trained tokens per row, N trained tokens of its distinct sequences.
"""

import contextlib
import functools
import itertools
import logging
import math
import os
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from insitu.backend.model import LoadedModel
from insitu.backend.training.batches import (
    LogprobComputer,
    MicroBatch,
    Row,
    collate,
    micro_batches,
    optimizer_steps,
    pad,
)
from insitu.backend.training.losses import PolicyBatch, kl_estimate, policy_loss, row_weights
from insitu.backend.training.policy import TrainablePolicy
from insitu.errors import BackendError, JobFailed
from insitu.schemas.training_jobs import TrainingSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

CPU_MICRO_BATCH = 2048
"""Maximum padded tokens of a micro-batch on a CPU: more are not faster, and sampling waits for each micro-batch."""
SMALL_MODEL = 5_000_000
"""Parameters below which operations are too short to be split over threads."""
KL_ROWS = 128
"""Rows on which the KL metric is measured after the last step if there is no KL penalty."""
SUMS = ("loss", "clipped", "kl", "gap", "sampled_ratio", "entropy")


class Progress(NamedTuple):
    """Reported after each micro-batch, with `metrics` at the end of an optimizer step."""

    percent: float
    metrics: dict[str, Any] | None = None


class StepResult(NamedTuple):
    """One optimizer step; `sums` are over its trained tokens, by the names in SUMS."""

    tokens: int
    sums: dict[str, float]
    grad_norm: float
    learning_rate: float


def learning_rate(settings: TrainingSettings, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`, each an equal part of the job's `schedule_range`."""
    first, last = settings.schedule_range
    start, end = (first + (last - first) * number / steps for number in (step, step + 1))
    if start < settings.warmup:  # by the end of the step, so that the first step is not wasted
        return settings.learning_rate * min(1.0, end / settings.warmup)
    decay = (start - settings.warmup) / (1 - settings.warmup)
    factor = {"constant": 1.0, "linear": 1 - decay, "cosine": (1 + math.cos(math.pi * decay)) / 2}
    return settings.learning_rate * factor[settings.schedule]


class Workers:
    """Uses a CPU's cores: `count` micro-batches in parallel for a small model, else threads within each operation."""

    def __init__(self, loaded: LoadedModel) -> None:
        cores = os.cpu_count() or 1
        small = sum(parameter.numel() for parameter in loaded.module.parameters()) < SMALL_MODEL
        self.count = cores if small and loaded.device.type == "cpu" else 1
        self._threads = cores // self.count if loaded.device.type == "cpu" else None
        self._pool = ThreadPoolExecutor(self.count, "insitu-training") if self.count > 1 else None

    def map(self, fn: Callable[[T], R], items: Sequence[T], *, sequential: bool = False) -> list[R]:
        """Results in the order of `items`, at most `count` of them; `sequential` if `fn` uses torch's RNG."""
        if self._pool is None or len(items) < 2 or sequential:
            return [fn(item) for item in items]

        def run(item: T) -> R:
            with self.threads():
                return fn(item)

        return list(self._pool.map(run, items))

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """Sets torch's thread count for training within the block."""
        before = torch.get_num_threads()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@dataclass
class TrainState:
    """State kept from job to job; `reference` returns the starting weights, loading them if necessary."""

    policy: TrainablePolicy
    optimizer: torch.optim.Optimizer
    compute_logprobs: LogprobComputer
    workers: Workers
    reference: Callable[[], nn.Module]


class OptimizerLoop:
    """Runs all optimizer steps of one job on the policy of `state`."""

    def __init__(self, state: TrainState, settings: TrainingSettings, rows: Sequence[Row]) -> None:
        self._policy = state.policy
        self._optimizer = state.optimizer
        self._parameters = list(state.policy.trainable.values())
        self._compute_logprobs = state.compute_logprobs
        self._workers = state.workers
        self._reference = state.reference() if settings.kl.beta > 0 else None
        self._load_reference = state.reference
        self._settings = settings
        self._rows = rows
        self._dropout = random.Random(f"{settings.seed}|{settings.schedule_range}")
        self._device = state.policy.loaded.device
        self._old: dict[int, np.ndarray] = {}  # by row: log-probabilities (K) at the start of the job
        self._max_tokens = settings.micro_batch_tokens
        if self._device.type == "cpu":
            self._max_tokens = min(self._max_tokens, CPU_MICRO_BATCH)

    def run(self) -> Generator[Progress, None, dict[str, Any]]:
        """Yields after each micro-batch; returns the job's metrics. Raises JobFailed if a loss is not finite."""
        plan = optimizer_steps(self._rows, self._settings)
        if self._settings.old_logprobs == "recomputed":
            # Without dropout the first step computes the old log-probabilities of its rows itself.
            first_step = set() if self._policy.has_dropout else set(plan[0])
            for batches in self._rounds(set(range(len(self._rows))) - first_step):
                self._workers.map(self._compute_old, batches)
                yield Progress(0.0)
        steps: list[StepResult] = []
        for number, indices in enumerate(plan):
            rate = learning_rate(self._settings, number, len(plan))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            sums = yield from self._compute(indices, number, len(plan))
            steps.append(self._optimizer_step(sums, self._count_tokens(indices)))
            yield Progress(100 * (number + 1) / len(plan), step_metrics(steps[-1:], self._settings))
        metrics = step_metrics(steps, self._settings)
        if self._reference is None:
            metrics["kl"] = self._measure_kl(plan[-1][:KL_ROWS])
        return metrics

    def _count_tokens(self, indices: Sequence[int]) -> int:
        return sum(len(self._rows[index].positions) for index in indices)

    def _rounds(self, indices: Iterable[int]) -> Iterator[tuple[list[int], ...]]:
        """Yields one micro-batch of about equal length per worker, until all rows are covered."""
        lengths = {self._rows[index].sequence_key: self._rows[index].input_length for index in indices}
        total, longest = sum(lengths.values()), max(lengths.values(), default=0)
        rounds = math.ceil(total / (self._max_tokens * self._workers.count))
        share = math.ceil(total / max(rounds * self._workers.count, 1)) + longest
        pending = micro_batches(self._rows, indices, min(share, self._max_tokens))
        while batches := tuple(itertools.islice(pending, self._workers.count)):
            yield batches

    @torch.no_grad()
    def _compute_old(self, micro_batch: list[int]) -> None:
        batch = collate([self._rows[index] for index in micro_batch], self._device)
        self._keep_old(micro_batch, batch.to_rows(self._compute_logprobs(self._policy.module, batch).logprobs_N))

    def _keep_old(self, micro_batch: list[int], logprobs_BK: Tensor) -> None:
        for index, logprobs in zip(micro_batch, logprobs_BK.cpu().numpy(), strict=True):
            self._old[index] = logprobs[: len(self._rows[index].positions)]

    def _compute(self, indices: list[int], step: int, steps: int) -> Generator[Progress, None, dict[str, float]]:
        """Computes the gradients of optimizer step `step` (from 0) of `steps`; returns the sums in SUMS."""
        rows = [self._rows[index] for index in indices]
        weights = row_weights([len(row.positions) for row in rows], [row.episode for row in rows], self._settings)
        row_weight = dict(zip(indices, weights, strict=True))
        totals = torch.zeros(len(SUMS), device=self._device, dtype=torch.float64)
        done = 0
        self._optimizer.zero_grad()
        for batches in self._rounds(indices):
            with self._policy.dropout(self._dropout.getrandbits(63)):
                backward = functools.partial(self._backward, row_weight=row_weight)
                results = self._workers.map(backward, batches, sequential=self._policy.has_dropout)
            # In this order, for reproducible sums.
            for micro_batch, (sums, gradients) in zip(batches, results, strict=True):
                totals += sums
                for parameter, gradient in zip(self._parameters, gradients, strict=False):
                    if parameter.grad is None:
                        parameter.grad = gradient
                    elif gradient is not None:
                        parameter.grad += gradient
                done += len(micro_batch)
            yield Progress(100 * (step + done / len(indices)) / steps)
        return dict(zip(SUMS, totals.tolist(), strict=True))

    def _backward(self, micro_batch: list[int], row_weight: dict[int, float]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Returns the sums, and with several workers the gradients, which workers must not accumulate concurrently."""
        batch = collate([self._rows[index] for index in micro_batch], self._device)
        weight_B = torch.tensor([row_weight[index] for index in micro_batch], device=self._device)
        new_N, entropy_N = self._compute_logprobs(self._policy.module, batch)
        new_BK = batch.to_rows(new_N)
        ref_BK = None
        if self._reference is not None:
            with torch.no_grad():
                ref_BK = batch.to_rows(self._compute_logprobs(self._reference, batch).logprobs_N)
        inputs = PolicyBatch(
            old_logprobs_BT=self._old_logprobs(micro_batch, batch, new_BK),
            rollout_logprobs_BT=batch.rollout_logprobs_BK,
            ref_logprobs_BT=ref_BK,
            advantage_BT=batch.advantage_BK,
            mask_BT=batch.mask_BK,
            weight_B=weight_B,
        )
        result = policy_loss(new_BK, inputs, self._settings)
        sums = torch.stack([*(value.detach().double() for value in result), batch.to_rows(entropy_N).double().sum()])
        if self._workers.count > 1:
            return sums, torch.autograd.grad(result.loss, self._parameters, allow_unused=True)
        result.loss.backward()
        return sums, ()

    def _old_logprobs(self, micro_batch: list[int], batch: MicroBatch, new_BK: Tensor) -> Tensor:
        if self._settings.old_logprobs == "rollout":
            return batch.rollout_logprobs_BK
        if micro_batch[0] in self._old:
            old = pad([self._old[index] for index in micro_batch], batch.mask_BK.cpu().numpy())
            return torch.from_numpy(old).to(self._device)
        if self._settings.num_iterations > 1:  # needed again in the next iteration
            self._keep_old(micro_batch, new_BK.detach())
        return new_BK.detach()  # in the first step old = new

    def _optimizer_step(self, sums: dict[str, float], tokens: int) -> StepResult:
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm).item()
        if not (math.isfinite(norm) and math.isfinite(sums["loss"])):
            raise JobFailed(
                f"the loss is {sums['loss']} and the norm of its gradient {norm}; the weights from before the job were "
                "restored"
            )
        self._optimizer.step()
        return StepResult(tokens, sums, norm, self._optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def _measure_kl(self, indices: list[int]) -> float | None:
        total = 0.0
        try:
            reference = self._load_reference()
        except BackendError as error:  # the model that training started from is missing: the job is valid without kl
            logger.warning("kl is not measured: %s", error)
            return None
        for micro_batch in micro_batches(self._rows, indices, self._max_tokens):
            batch = collate([self._rows[index] for index in micro_batch], self._device)
            modules = (self._policy.module, reference)
            new_N, ref_N = (self._compute_logprobs(module, batch).logprobs_N for module in modules)
            total += batch.to_rows(kl_estimate(new_N, ref_N, self._settings.kl)).sum().item()
        return total / self._count_tokens(indices)


def step_metrics(steps: Sequence[StepResult], settings: TrainingSettings) -> dict[str, Any]:
    """Metrics over these steps; the gap to the sampler is that of the first step, before the weights changed."""
    tokens = sum(step.tokens for step in steps)
    total = {name: math.fsum(step.sums[name] for step in steps) for name in SUMS}
    return {
        "loss": total["loss"] / len(steps),
        "kl": total["kl"] / tokens if settings.kl.beta > 0 else None,
        "entropy": total["entropy"] / tokens,
        "clip_fraction": total["clipped"] / tokens,
        "grad_norm": math.fsum(step.grad_norm for step in steps) / len(steps),
        "learning_rate": steps[-1].learning_rate,
        "logprob_gap": steps[0].sums["gap"] / steps[0].tokens,
        "ratio_mean": steps[0].sums["sampled_ratio"] / steps[0].tokens,
        "steps": len(steps),
    }
