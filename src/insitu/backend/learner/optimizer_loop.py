"""The optimizer steps of one job, micro-batch by micro-batch.

What a method does with log-probabilities is its `Objective`; the loop is the same for all. It is also the same for one
process and for several `Ranks`, each of which computes some micro-batches of a round.

Shapes: B rows of a micro-batch, K maximum trained tokens per row, N trained tokens of its distinct sequences.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from insitu.algorithms.memory_budget import ACTIVATION_BYTES, CPU_MICRO_BATCH, LEAST_MICRO_BATCH
from insitu.backend.learner.batches import MicroBatch, Row, group_rows, optimizer_steps, whole
from insitu.backend.learner.checkpoints import TrainState
from insitu.backend.learner.code import CodeFolder, scheduled
from insitu.backend.learner.logprobs import FixedLogprobs
from insitu.backend.learner.losses import kl_estimate, mean_of_clusters
from insitu.backend.learner.objectives import KnownSums, LossOfRows, Objective, RowLogprobs, StepResult
from insitu.backend.learner.packing import LEAST_SHARE, Packer, Sizes, kl_budget, kl_rows
from insitu.backend.learner.policy import ReferenceWeights, activation_bytes
from insitu.errors import BackendError, JobFailed
from insitu.schemas.parts import load_named
from insitu.schemas.training_jobs import TrainingSettings
from insitu.wire.heap import mmap_large_blocks

logger = logging.getLogger(__name__)

R = TypeVar("R")

SMALL_WORTH = 0.75
"""Maximum `tree_share` at which rows of a small model are packed: its cost is in the number of calls, not tokens."""
CHECKED_ROWS = 16
"""Rows of a job that are computed both packed and padded on a GPU, to compare the two."""


class Progress(NamedTuple):
    """Reported after each micro-batch, with `metrics` at the end of an optimizer step."""

    percent: float
    metrics: dict[str, Any] | None = None


def constant(part: float) -> float:
    """The factor of the peak learning rate when a `part` of the run, from 0 to 1, is over; the warmup not counted."""
    return 1.0


def linear(part: float) -> float:
    return 1 - part


def cosine(part: float) -> float:
    return (1 + math.cos(math.pi * part)) / 2


def learning_rate(settings: TrainingSettings, schedule: Callable[[float], float], step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`, each an equal part of the job's `schedule_range`."""
    first, last = settings.schedule_range
    start, end = (first + (last - first) * number / steps for number in (step, step + 1))
    if start < settings.warmup:  # by the end of the step, so that the first step is not wasted
        return settings.learning_rate * min(1.0, end / settings.warmup)
    return settings.learning_rate * scheduled(schedule, (start - settings.warmup) / (1 - settings.warmup))


def reference_module(code: CodeFolder, settings: TrainingSettings, weights: ReferenceWeights) -> nn.Module | None:
    """The model that the loss compares with; None for the weights at the start of the job, or if it compares with none.

    Raises BackendError if it cannot be loaded.
    """
    if settings.reference is None:
        return None
    module = code.function("reference", settings.reference)(weights)
    if module is not None and not isinstance(module, nn.Module):
        raise BackendError(f"reference: it returned {type(module).__name__}; allowed: a torch module, or None")
    return module


class OptimizerLoop:
    """Runs all optimizer steps of one job on the policy of `state`, or computes a part of its rows.

    `like` is the loop of another part of the job.
    """

    def __init__(
        self, state: TrainState, settings: TrainingSettings, rows: Sequence[Row], like: "OptimizerLoop | None" = None
    ) -> None:
        self._state = state
        self._parameters = list(state.policy.trainable.values())
        self._ranks = state.ranks
        self._reference: nn.Module | None
        self._reference = like._reference if like else reference_module(state.code, settings, state.reference())
        self._settings = settings
        self._like = like
        self._schedule = state.code.function("schedule", settings.schedule)
        self._plan = optimizer_steps(rows, settings)
        method = load_named("methods", settings.method)
        self._objective: Objective = method(settings, rows, self._plan, state.policy.loaded.max_length, state.code)
        self._compares_with_start = settings.reference is not None and self._reference is None
        self._uses_start = self._objective.uses_start or self._compares_with_start
        self._rows = self._objective.rows
        self._device = state.policy.loaded.device
        self.sizes = Sizes()
        self.at_start = FixedLogprobs()
        self.at_reference = FixedLogprobs()
        self.tokens = self._objective.count_tokens(range(len(rows)))
        self._is_part = False
        self._weight = 1
        self._max_tokens = min([settings.micro_batch_tokens, *self._cpu_limits()])

    def _cpu_limits(self) -> Iterator[int]:
        """The limits of a micro-batch on a CPU, in tokens; none on other devices."""
        if self._device.type != "cpu":
            return
        yield CPU_MICRO_BATCH
        if not (self._state.workers.is_small or self._settings.gradient_checkpointing):
            yield max(LEAST_MICRO_BATCH, ACTIVATION_BYTES // activation_bytes(self._state.policy.loaded))

    def run(self) -> Generator[Progress, None, dict[str, Any]]:
        """Yields after each micro-batch; returns the job's metrics. Raises JobFailed if a loss is not finite."""
        if self._uses_start:
            # The first step computes the log-probabilities of its rows at the start itself.
            first = {*self._plan[0], *self._objective.baseline_rows(0)}
            self.at_start.forget(first)
            yield from self._compute_at_start(index for index in range(len(self._rows)) if index not in first)
            self.at_start.merge(self._ranks)
        steps: list[StepResult] = []
        for number, indices in enumerate(self._plan):
            self._set_rate(number)
            sums = yield from self._compute(number)
            steps.append(self._optimizer_step(sums, self._objective.count_tokens(indices)))
            yield Progress(100 * (number + 1) / len(self._plan), self._metrics(steps[-1:]))
        return self._job_metrics(steps)

    def _job_metrics(self, steps: Sequence[StepResult]) -> dict[str, Any]:
        metrics = self._metrics(steps) | asdict(self.sizes)
        if self._objective.measures_kl and self._settings.reference is None and (rows := self._kl_rows()):
            metrics |= self._measure_kl(rows)
        return metrics

    def sum_gradients(self) -> Generator[Progress, None, tuple[int, dict[str, float]]]:
        """Computes the gradients of the sum over the rows; returns the weight of their mean in it, and the sums."""
        self._is_part, self._weight = True, self._objective.weight()
        sums = yield from self._compute(0)
        return self._weight, sums | {"loss": sums["loss"] * self._weight}

    def finish_step(self, sums: dict[str, float]) -> dict[str, Any]:
        """Takes the only optimizer step of the job, whose gradients are there; returns the job's metrics."""
        self._set_rate(0)
        return self._job_metrics([self._optimizer_step(sums, self.tokens)])

    def compute_fixed(self) -> Generator[Progress, None, None]:
        """Computes the log-probabilities of all rows that stay the same during the job."""
        if self._uses_start:
            yield from self._compute_at_start(range(len(self._rows)))
        if self._reference is not None:
            for batches in self._rounds([[index] for index in range(len(self._rows))]):
                self._map(self._compute_reference, batches)
                yield Progress(0.0)

    @functools.cached_property
    def _packer(self) -> Packer:
        padded = Packer(self._rows, packed=False)
        packs = self._saves_by_trees(padded) and self._fits_window() and self._can_pack
        stretches = self._device.type == "cpu" and self._state.workers.round == 1
        return Packer(self._rows, packed=True, stretches=stretches) if packs else padded

    def _saves_by_trees(self, packer: Packer) -> bool:
        if self._settings.attention != "auto":
            return self._settings.attention == "packed"
        if self._device.type != "cpu":
            return False
        return not self._state.workers.is_small or packer.tree_share <= SMALL_WORTH

    def _fits_window(self) -> bool:
        window = self._state.compute_logprobs.window
        if window is None or max((len(row.token_ids) for row in self._rows), default=0) <= window:
            return True
        if self._settings.attention == "packed":
            logger.warning("attention: packed needs rows of at most %d tokens, the model's window; padded", window)
        return False

    @functools.cached_property
    def _can_pack(self) -> bool:
        if self._like is not None:
            return self._like._can_pack
        alike = self._state.compute_logprobs.can_pack
        if alike and self._device.type != "cpu":  # kernels are chosen by sizes
            alike = self._state.compute_logprobs.packs_alike([self._rows[i] for i in self._plan[0][:CHECKED_ROWS]])
        if not alike and self._settings.attention == "packed":
            logger.warning("attention: packed is not possible with this model, whose rows are padded")
        return alike

    def _map(self, fn: Callable[[list[int]], R], batches: Sequence[list[int]]) -> list[tuple[list[int], R]]:
        """Calls `fn` for this rank's micro-batches of a round; returns them with the results."""
        own = self._ranks.deal(batches)
        if not own and self._ranks.shards_weights:
            fn(batches[0])  # takes part in the exchange of weights; the result is that of another rank
        each = map if self._settings.compile else self._state.workers.map  # torch.compile is not for several threads
        saves_memory = self._settings.gradient_checkpointing and self._device.type == "cpu"
        with mmap_large_blocks() if saves_memory else nullcontext():
            return [*zip(own, each(fn, own), strict=True)]

    def _metrics(self, steps: Sequence[StepResult]) -> dict[str, Any]:
        return {
            "loss": math.fsum(step.sums["loss"] for step in steps) / len(steps),
            "entropy": math.fsum(step.sums["entropy"] for step in steps) / sum(step.tokens for step in steps),
            "grad_norm": math.fsum(step.grad_norm for step in steps) / len(steps),
            "learning_rate": steps[-1].learning_rate,
            "steps": len(steps),
            **self._objective.metrics(steps),
        }

    def _rounds(self, units: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], ...]]:
        """Yields micro-batches of about equal length for the workers of all ranks, until all rows are covered."""
        count = self._state.workers.round
        least = LEAST_SHARE if count > self._ranks.count else 0
        pending = self._packer.micro_batches(units, self._packer.even_share(units, self._max_tokens, count, least))
        while batches := tuple(itertools.islice(pending, count)):
            yield batches

    def _set_rate(self, step: int) -> None:
        rate = learning_rate(self._settings, self._schedule, step, len(self._plan))
        for group in self._state.optimizer.param_groups:
            group["lr"] = rate

    def _compute_at_start(self, indices: Iterable[int]) -> Generator[Progress, None, None]:
        for batches in self._rounds([[index] for index in indices if index not in self.at_start]):
            self._map(self._compute_start, batches)
            yield Progress(0.0)

    @torch.no_grad()
    def _compute_start(self, micro_batch: list[int]) -> None:
        batch = self._packer.collate(micro_batch, self._device)
        self.at_start.keep(micro_batch, batch.to_rows(self._state.forward(batch).logprobs_N), batch.mask_BK)

    def _compute(self, step: int) -> Generator[Progress, None, dict[str, float]]:
        """Computes the gradients of an optimizer step; returns the sums by name."""
        rounds, constant_rounds = map(list, map(self._rounds, self._by_gradient(self._objective.units(step))))
        known = yield from self._compute_known(step, rounds + constant_rounds)
        loss_of = self._objective.step_loss(step, known)
        names = (*self._objective.sums, "entropy")
        totals = torch.zeros(len(names), device=self._device, dtype=torch.float64)
        done = 0
        self._state.optimizer.zero_grad()
        for number, batches in enumerate([*rounds, *constant_rounds]):
            self.sizes.add(self._packer, batches)
            counts = bool(self._ranks.deal(batches))
            has_gradient = number < len(rounds)
            backward = functools.partial(self._backward, loss_of=loss_of, counts=counts, has_gradient=has_gradient)
            # In this order, for reproducible sums.
            for _, (sums, gradients) in self._map(backward, batches):
                totals += sums
                for parameter, gradient in zip(self._parameters, gradients, strict=False):
                    if parameter.grad is None:
                        parameter.grad = gradient
                    elif gradient is not None:
                        parameter.grad += gradient
            done += sum(map(len, batches))
            yield Progress(100 * (step + done / len(self._plan[step])) / len(self._plan))
        self._ranks.sum_gradients(self._parameters)
        if self._uses_start and self._settings.num_iterations > 1:
            self.at_start.merge(self._ranks)  # another rank may get the rows in the next iteration
        return dict(zip(names, self._ranks.sum(totals).tolist(), strict=True))

    def _by_gradient(self, units: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """Units that need a backward pass, and the others. If none of a job does, all get one: steps need gradients."""
        without = [unit for unit in units if not any(map(self._objective.has_gradient, unit))]
        if len(without) == len(units) and not self._is_part:
            return units, []
        self.sizes.rows_without_gradient += sum(map(len, without))
        return [unit for unit in units if any(map(self._objective.has_gradient, unit))], without

    def _compute_known(
        self, step: int, rounds: Sequence[tuple[list[int], ...]]
    ) -> Generator[Progress, None, dict[int, KnownSums]]:
        """Sums of the rows that the loss of other micro-batches depends on: baselines, and units split over several."""
        place = {index: number for number, micro_batch in enumerate(itertools.chain(*rounds)) for index in micro_batch}
        split = [unit for unit in self._objective.units(step) if len({place[index] for index in unit}) > 1]
        needed = [*self._objective.baseline_rows(step), *itertools.chain(*split)]
        known: dict[int, KnownSums] = {}
        for batches in self._rounds([[index] for index in needed]):
            for _, sums in self._map(self._known_sums, batches):
                known |= sums
            yield Progress(100 * step / len(self._plan))
        return self._ranks.merge(known)

    @torch.no_grad()
    def _known_sums(self, micro_batch: list[int]) -> dict[int, KnownSums]:
        batch = self._packer.collate(micro_batch, self._device)
        logprobs = self._row_logprobs(micro_batch, batch, batch.to_rows(self._state.forward(batch).logprobs_N))
        sums = zip(logprobs.sums().tolist(), logprobs.log_ratios().tolist(), strict=True)
        return {index: KnownSums(*each) for index, each in zip(micro_batch, sums, strict=True)}

    def _backward(
        self, micro_batch: list[int], loss_of: LossOfRows, counts: bool, has_gradient: bool
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Returns the sums, and with several workers the gradients, which workers must not accumulate concurrently.

        Gradients are 0 if the micro-batch does not count.
        """
        batch = self._packer.collate(micro_batch, self._device)
        with torch.set_grad_enabled(has_gradient):
            new_N, entropy_N = self._state.forward(batch)
            loss, sums = loss_of(micro_batch, self._row_logprobs(micro_batch, batch, batch.to_rows(new_N)))
        totals = torch.stack([*(value.double() for value in sums), batch.to_rows(entropy_N).double().sum()])
        if self._is_part:
            loss = loss * self._weight
        if not has_gradient:
            return totals, ()
        if self._state.workers.round > self._ranks.count:
            return totals, torch.autograd.grad(loss, self._parameters, allow_unused=True)
        (loss if counts else 0.0 * loss).backward()
        return totals, ()

    def _row_logprobs(self, micro_batch: list[int], batch: MicroBatch, new_BK: Tensor) -> RowLogprobs:
        start_BK = ref_BK = None
        if self._uses_start:
            start_BK = self.at_start.get(micro_batch, self._device)
            if start_BK is None:  # the first step
                start_BK = new_BK.detach()
                if self._settings.num_iterations > 1:  # needed again in the next iteration
                    self.at_start.keep(micro_batch, start_BK, batch.mask_BK)
        if self._compares_with_start:
            ref_BK = start_BK
        elif self._reference is not None:
            ref_BK = self.at_reference.get(micro_batch, self._device)
            if ref_BK is None:
                ref_BK = self._compute_reference(micro_batch, batch)
        return RowLogprobs(new_BK, start_BK, ref_BK, batch.mask_BK)

    @torch.no_grad()
    def _compute_reference(self, micro_batch: list[int], batch: MicroBatch | None = None) -> Tensor:
        assert self._reference is not None
        batch = batch or self._packer.collate(micro_batch, self._device)
        ref_BK = batch.to_rows(self._state.compute_logprobs(self._reference, batch).logprobs_N)
        self.at_reference.keep(micro_batch, ref_BK, batch.mask_BK)
        return ref_BK

    def _optimizer_step(self, sums: dict[str, float], tokens: int) -> StepResult:
        norm = whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)).item()
        if not (math.isfinite(norm) and math.isfinite(sums["loss"])):
            problem = f"the loss is {sums['loss']} and the norm of its gradient {norm}"
            raise JobFailed(f"{problem}; the weights from before the job were restored")
        self._state.policy.unshare()
        self._state.optimizer.step()
        self._state.optimizer.zero_grad()
        return StepResult(tokens, sums, norm, self._state.optimizer.param_groups[0]["lr"])

    def _kl_rows(self) -> list[int]:
        """The rows of the last step on which the KL metric is measured; a small model has no budget for it."""
        computed, lora = sum(map(len, self._plan)), self._settings.lora is not None
        budget = None if self._state.workers.is_small else kl_budget(self.sizes, computed, lora=lora)
        return kl_rows(self._packer, self._plan[-1], self._settings.kl_rows, budget, self._state.reference().version)

    @torch.no_grad()
    def _measure_kl(self, indices: list[int]) -> dict[str, float | None]:
        """Mean KL divergence from the starting weights, its standard error over episodes, and mean distance to them."""
        try:
            initial = self._state.reference().initial()
        except BackendError as error:  # the model that training started from is missing: the job is valid without kl
            logger.warning("kl is not measured: %s", error)
            return {"kl": None, "kl_stderr": None, "reference_gap": None}

        def sums_of(micro_batch: list[int]) -> dict[int, list[float]]:
            batch = self._packer.collate(micro_batch, self._device)
            new_N, _ = self._state.forward(batch)
            ref_N, _ = self._state.compute_logprobs(initial, batch)
            per_token = kl_estimate(new_N, ref_N, self._settings.kl), (new_N - ref_N).abs()
            sums_B2 = torch.stack([batch.to_rows(each_N).double().sum(1) for each_N in per_token], dim=1)
            return dict(zip(micro_batch, sums_B2.tolist(), strict=True))

        sums: dict[int, list[float]] = {}
        pending = self._packer.micro_batches([[index] for index in indices], self._max_tokens)
        while batches := tuple(itertools.islice(pending, self._ranks.count)):
            for _, of_rows in self._map(sums_of, batches):
                sums |= of_rows
        sums = self._ranks.merge(sums)
        groups = group_rows(self._rows, indices)
        tokens = [self._objective.count_tokens(rows) for rows in groups]
        totals = ([math.fsum(sums[index][part] for index in rows) for rows in groups] for part in (0, 1))
        (kl, stderr), (gap, _) = (mean_of_clusters([*zip(each, tokens, strict=True)]) for each in totals)
        return {"kl": kl, "kl_stderr": stderr, "reference_gap": gap}
