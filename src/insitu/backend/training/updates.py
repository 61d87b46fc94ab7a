"""The optimiser steps of one job, micro-batch by micro-batch.

Shapes: B rows of a micro-batch, K trained tokens of the row that has most, N trained tokens of all its rows.
"""

import functools
import itertools
import logging
import math
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from insitu.backend.training.batches import MicroBatch, Row, lay_out, micro_batches, optimiser_steps, place
from insitu.backend.training.losses import PolicyBatch, kl_estimate, policy_loss, row_weights
from insitu.backend.training.policy import Policy
from insitu.backend.training.scoring import Scorer
from insitu.backend.training.workers import Workers
from insitu.errors import BackendError, JobFailed
from insitu.schemas.training_jobs import TrainingSettings

logger = logging.getLogger(__name__)

CPU_MICRO_BATCH = 2048
"""Padded tokens of a micro-batch on a CPU at most: more do not run faster, and sampling waits for each."""
KL_ROWS = 128
"""Without a KL penalty the metric is measured after the last step, on this many rows."""
SUMS = ("loss", "clipped", "kl", "gap", "sampled_ratio", "entropy")


class Progress(NamedTuple):
    """After a micro-batch; `metrics` are given at the end of an optimiser step."""

    percent: float
    metrics: dict[str, Any] | None = None


class Step(NamedTuple):
    """One optimiser step: sums over its trained tokens by the names of SUMS, and what the optimiser did."""

    tokens: int
    sums: dict[str, float]
    grad_norm: float
    learning_rate: float


def learning_rate(settings: TrainingSettings, step: int, steps: int) -> float:
    """Of the job's step number `step` (from 0) of `steps`, each an equal part of the job's share of the run."""
    first, last = settings.schedule_range
    begun, ended = (first + (last - first) * number / steps for number in (step, step + 1))
    if begun < settings.warmup:  # rises by the end of a step, so that the first one is not lost
        return settings.learning_rate * min(1.0, ended / settings.warmup)
    fallen = (begun - settings.warmup) / (1 - settings.warmup)
    factor = {"constant": 1.0, "linear": 1 - fallen, "cosine": (1 + math.cos(math.pi * fallen)) / 2}
    return settings.learning_rate * factor[settings.schedule]


@dataclass
class Trainer:
    """What lasts from job to job; `reference` gives the starting weights, which may have to be loaded for it."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    scorer: Scorer
    workers: Workers
    reference: Callable[[], nn.Module]


class Updates:
    """One job: takes the trainer's policy through all optimiser steps over its rows."""

    def __init__(self, trainer: Trainer, settings: TrainingSettings, rows: Sequence[Row]) -> None:
        self._policy = trainer.policy
        self._optimizer = trainer.optimizer
        self._trained = list(trainer.policy.trained.values())
        self._score = trainer.scorer
        self._workers = trainer.workers
        self._reference = trainer.reference() if settings.kl.beta > 0 else None
        self._trainer = trainer
        self._settings = settings
        self._rows = rows
        self._dropout = random.Random(f"{settings.seed}|{settings.schedule_range}")
        self._device = trainer.policy.loaded.device
        self._old: dict[int, np.ndarray] = {}  # by row: log-probabilities (K) of the policy at the start of the job
        self._budget = settings.micro_batch_tokens
        if self._device.type == "cpu":
            self._budget = min(self._budget, CPU_MICRO_BATCH)

    def run(self) -> Generator[Progress, None, dict[str, Any]]:
        """Yields after each micro-batch; returns the job's metrics. Raises JobFailed at a number that is not finite."""
        plan = optimiser_steps(self._rows, self._settings)
        # What the first step trains need not be computed before it does so itself, unless it drops inputs out.
        computed_anyway = set() if self._policy.drops_out else set(plan[0])
        needed = set() if self._settings.old_logprobs == "rollout" else set(range(len(self._rows))) - computed_anyway
        for parts in self._rounds(needed):
            self._workers.map(self._score_old, parts)
            yield Progress(0.0)
        steps: list[Step] = []
        for number, chosen in enumerate(plan):
            rate = learning_rate(self._settings, number, len(plan))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            computing = self._compute(chosen)
            try:
                while True:
                    yield Progress(100 * (number + next(computing)) / len(plan))
            except StopIteration as end:
                sums = end.value
            steps.append(self._advance(sums, sum(len(self._rows[index].positions) for index in chosen)))
            yield Progress(100 * (number + 1) / len(plan), describe(steps[-1:], self._settings))
        metrics = describe(steps, self._settings)
        if self._reference is None:
            metrics["kl"] = self._sampled_kl(plan[-1][:KL_ROWS])
        return metrics

    def _rounds(self, chosen: Iterable[int]) -> Iterator[tuple[list[int], ...]]:
        """Micro-batches of the chosen rows, as many at a time as there are workers, and about equally long."""
        lengths = {self._rows[index].sequence: self._rows[index].length for index in chosen}
        total, longest = sum(lengths.values()), max(lengths.values(), default=0)
        rounds = math.ceil(total / (self._budget * self._workers.count))
        share = math.ceil(total / max(rounds * self._workers.count, 1)) + longest
        parts = micro_batches(self._rows, chosen, min(share, self._budget))
        while several := tuple(itertools.islice(parts, self._workers.count)):
            yield several

    @torch.no_grad()
    def _score_old(self, part: list[int]) -> None:
        batch = lay_out([self._rows[index] for index in part], self._device)
        self._keep_old(part, batch.spread(self._score(self._policy.module, batch).logprobs_N))

    def _keep_old(self, part: list[int], logprobs_BK: Tensor) -> None:
        for index, logprobs in zip(part, logprobs_BK.cpu().numpy(), strict=True):
            self._old[index] = logprobs[: len(self._rows[index].positions)]

    def _compute(self, chosen: list[int]) -> Generator[float, None, dict[str, float]]:
        """The gradients of one optimiser step; yields the share that is done, returns the sums named in SUMS."""
        rows = [self._rows[index] for index in chosen]
        weights = row_weights([len(row.positions) for row in rows], [row.episode for row in rows], self._settings)
        weight_of = dict(zip(chosen, weights, strict=True))
        totals = torch.zeros(len(SUMS), device=self._device, dtype=torch.float64)
        done = 0
        self._optimizer.zero_grad()
        for parts in self._rounds(chosen):
            with self._policy.dropout(self._dropout.getrandbits(63)):
                backward = functools.partial(self._backward, weight_of=weight_of)
                results = self._workers.map(backward, parts, in_turn=self._policy.drops_out)
            for part, (sums, gradients) in zip(parts, results, strict=True):  # in this order, whoever was first
                totals += sums
                self._accumulate(gradients)
                done += len(part)
            yield done / len(chosen)
        return dict(zip(SUMS, totals.tolist(), strict=True))

    def _accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._trained, gradients, strict=False):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad += gradient

    def _backward(self, part: list[int], weight_of: dict[int, float]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Sums, and gradients where several workers must not add to the same ones at once; else they are added."""
        batch = lay_out([self._rows[index] for index in part], self._device)
        weight_B = torch.tensor([weight_of[index] for index in part], device=self._device)
        new_N, entropy_N = self._score(self._policy.module, batch)
        new_BK = batch.spread(new_N)
        ref_BK = None
        if self._reference is not None:
            with torch.no_grad():
                ref_BK = batch.spread(self._score(self._reference, batch).logprobs_N)
        inputs = PolicyBatch(
            old_BT=self._old_logprobs(part, batch, new_BK),
            rollout_BT=batch.rollout_BK,
            ref_BT=ref_BK,
            advantage_BT=batch.advantage_BK,
            mask_BT=batch.mask_BK,
            weight_B=weight_B,
        )
        result = policy_loss(new_BK, inputs, self._settings)
        sums = torch.stack([*(value.detach().double() for value in result), batch.spread(entropy_N).double().sum()])
        if self._workers.count > 1:
            return sums, torch.autograd.grad(result.loss, self._trained, allow_unused=True)
        result.loss.backward()
        return sums, ()

    def _old_logprobs(self, part: list[int], batch: MicroBatch, new_BK: Tensor) -> Tensor:
        if self._settings.old_logprobs == "rollout":
            return batch.rollout_BK
        if part[0] in self._old:
            old = place([self._old[index] for index in part], batch.mask_BK.cpu().numpy())
            return torch.from_numpy(old).to(self._device)
        if self._settings.num_iterations > 1:  # otherwise nobody asks again
            self._keep_old(part, new_BK.detach())
        return new_BK.detach()  # the first step: nothing has moved yet

    def _advance(self, sums: dict[str, float], tokens: int) -> Step:
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._settings.max_grad_norm).item()
        if not (math.isfinite(norm) and math.isfinite(sums["loss"])):
            raise JobFailed(
                f"the loss is {sums['loss']} and the norm of its gradient {norm}; the job is undone, and the weights "
                "are those before it"
            )
        self._optimizer.step()
        return Step(tokens, sums, norm, self._optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def _sampled_kl(self, chosen: list[int]) -> float | None:
        total = 0.0
        try:
            reference = self._trainer.reference()
        except BackendError as error:  # a checkpoint of a model that is not here: no reason to lose the job
            logger.warning("kl is not measured: %s", error)
            return None
        for part in micro_batches(self._rows, chosen, self._budget):
            batch = lay_out([self._rows[index] for index in part], self._device)
            new_N, ref_N = (self._score(module, batch).logprobs_N for module in (self._policy.module, reference))
            total += batch.spread(kl_estimate(new_N, ref_N, self._settings.kl)).sum().item()
        return total / sum(len(self._rows[index].positions) for index in chosen)


def describe(steps: Sequence[Step], settings: TrainingSettings) -> dict[str, Any]:
    """The metrics of these optimiser steps; the gap to the sampler is that of the first, before anything moved."""
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
