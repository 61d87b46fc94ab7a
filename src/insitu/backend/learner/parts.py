"""Jobs whose rows come in parts: what has arrived of them, and the optimizer step that adds up their gradients.

The parts of a job are planned: a part holds the rows of some groups. Each is computed once it has arrived. Its gradient
is that of a sum, divided by the total when all parts are there, and gradients are added in the order of the parts. So
the weights depend neither on when parts arrive nor on their order, and a job that is sent whole gets the same.
"""

import itertools
import time
import zlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insitu.backend.compute import PARKED, Parked
from insitu.backend.learner.batches import ALONE, Row
from insitu.backend.learner.checkpoints import TrainState
from insitu.backend.learner.logprobs import FixedLogprobs
from insitu.backend.learner.optimizer_loop import OptimizerLoop, Progress
from insitu.backend.learner.packing import Sizes
from insitu.schemas.training_jobs import TrainingSettings

HELD_BYTES = 1 << 30
"""Maximum size of the gradients of parts that wait for an earlier part; further parts wait to be computed."""
Steps = Generator[Progress | Parked | None, None, Any]


class PartedRows:
    """The rows of a job by part. Those of an open job arrive, in any order, until it is closed.

    The event loop adds them, the compute thread reads them. `digest` is that of the job's settings, which the lines of
    all rows continue.
    """

    def __init__(self, count: int, digest: blake2b | None = None, *, logprobs_ahead: bool = False) -> None:
        self.count = count
        self.logprobs_ahead = logprobs_ahead
        """Whether the log-probabilities under fixed weights are computed by part, before the optimizer steps."""
        self.closed_at: float | None = None
        self.heard_at = time.monotonic()
        self.reading: dict[int, tuple[int, int]] = {}
        """Bytes and rows of the parts that are read at the moment."""
        self._digest = digest
        self._size = 0
        self._sizes: dict[int, int] = {}
        self._parts: dict[int, list[Row]] = {}
        self._lines: dict[int, bytes] = {}

    @classmethod
    def whole(cls, parts: Iterable[Sequence[Row]], *, logprobs_ahead: bool = False) -> "PartedRows":
        """The rows of a job that is sent whole."""
        held = {number: [*rows] for number, rows in enumerate(parts)}
        rows = cls(len(held), logprobs_ahead=logprobs_ahead)
        rows._parts, rows.closed_at = held, 0.0
        return rows

    @property
    def closed(self) -> bool:
        return self.closed_at is not None

    @property
    def came_in_parts(self) -> bool:
        return self._digest is not None

    def close(self) -> None:
        self.closed_at = time.monotonic()

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def beside(self, number: int) -> tuple[int, int]:
        """Bytes and rows of all other parts, as far as they have arrived."""
        same = self._sizes.get(number, 0), len(self._parts.get(number, ()))
        others = [read for part, read in self.reading.items() if part != number and part not in self._parts]
        size, rows = map(sum, zip(*others, strict=True)) if others else (0, 0)
        return self._size - same[0] + size, len(self) - same[1] + rows

    def add(self, number: int, rows: Sequence[Row], lines: bytes, size: int) -> bool:
        """Adds a part with its lines, compressed from `size` bytes.

        Returns False if it has another one of this number, which stays.
        """
        if number in self._parts:
            return self._lines[number] == lines
        self._sizes[number] = size
        self._size += size
        self._lines[number] = lines
        self._parts[number] = [*rows]
        return True

    @property
    def split_episode(self) -> str | None:
        """An episode with rows in several parts; None if there is none."""
        part_of: dict[str, int] = {}
        pairs = ((row.episode, number) for number, rows in self._parts.items() for row in rows if row.episode)
        return next((episode for episode, number in pairs if part_of.setdefault(episode, number) != number), None)

    @property
    def missing(self) -> list[int]:
        return [number for number in range(self.count) if number not in self._parts]

    @property
    def hexdigest(self) -> str | None:
        """The digest of an open job, as if it had been sent whole; None for one that was."""
        if self._digest is None:
            return None
        digest = self._digest.copy()
        for number in range(self.count):
            digest.update(zlib.decompress(self._lines[number]))
        return digest.hexdigest()

    def part(self, number: int) -> list[Row] | None:
        return self._parts.get(number)

    @property
    def rows(self) -> list[Row]:
        """The rows of all parts, in the order of the parts."""
        return [*itertools.chain(*(self._parts[number] for number in range(self.count)))]


def wait_until_closed(rows: PartedRows) -> Steps:
    """Waits until a job is closed; returns its rows."""
    while not rows.closed:
        yield PARKED
    return rows.rows


def train_parts(state: TrainState, settings: TrainingSettings, rows: PartedRows) -> Steps:
    """Trains a job; returns its metrics. Raises JobFailed if a loss is not finite.

    Parts of an open job are computed before it is closed: the gradients of a single optimizer step, or with
    `logprobs_ahead` the log-probabilities under fixed weights. The metric `seconds_ahead` is how long that took.
    """
    ahead: _Gradients | _FixedPasses | None = None
    if state.ranks is ALONE and rows.count > 1:
        if rows.logprobs_ahead:
            ahead = _FixedPasses(state, settings)
        elif _adds_up(settings) and not (rows.closed and _steps(rows, settings) > 1):
            ahead = _Gradients(state, settings)
    waiting, seconds = [*range(rows.count)] if ahead is not None else [], 0.0
    while waiting and ahead is not None:
        number = next((n for n in waiting if rows.part(n) is not None and ahead.has_room(n)), None)
        if number is None:
            yield PARKED
            continue
        waiting.remove(number)
        started = time.monotonic()
        for _ in ahead.add(number, rows.part(number) or []):
            yield Progress(100 * (1 - len(waiting) / rows.count) if isinstance(ahead, _Gradients) else 0.0)
        seconds += max(0.0, (time.monotonic() if rows.closed_at is None else rows.closed_at) - started)
        if _steps(rows, settings) > 1 and isinstance(ahead, _Gradients):  # mini_batch_size is less than the job
            ahead, waiting = None, []
    every = yield from wait_until_closed(rows)
    if not every:
        return {}
    loop = OptimizerLoop(state, settings, every)
    metrics = yield from loop.run() if ahead is None else ahead.finish(loop)
    return metrics | ({"seconds_ahead": seconds} if rows.came_in_parts else {})


def _adds_up(settings: TrainingSettings) -> bool:
    """Whether the gradients of parts can be added up: they are those of one step, whose loss is a mean over rows."""
    is_one_step = settings.num_iterations == 1 and settings.steps_per_iteration in (None, 1)
    return is_one_step and settings.method in ("grpo", "sft")


def _steps(rows: PartedRows, settings: TrainingSettings) -> int:
    """The optimizer steps of the rows that have arrived."""
    if settings.steps_per_iteration is not None or settings.mini_batch_size is None:
        return settings.steps_per_iteration or 1
    return -(-len(rows) // settings.mini_batch_size)


class _Part(NamedTuple):
    """The sums of a part, and the gradients of its sum, None where there is none."""

    weight: int
    sums: dict[str, float]
    sizes: dict[str, int]
    gradients: list[Tensor | None]


class _Gradients:
    """The gradients of the parts of an optimizer step."""

    def __init__(self, state: TrainState, settings: TrainingSettings) -> None:
        self._state = state
        self._settings = settings.model_copy(update={"mini_batch_size": None})
        self._parameters = [*state.policy.trainable.values()]
        self._bytes = sum(parameter.nbytes for parameter in self._parameters)
        self._like: OptimizerLoop | None = None
        self._next = 0
        self._held: dict[int, _Part] = {}
        self._none = _Part(0, {}, {}, [None] * len(self._parameters))
        self._total = self._none

    def has_room(self, number: int) -> bool:
        return number == self._next or (len(self._held) + 1) * self._bytes <= HELD_BYTES

    def add(self, number: int, rows: Sequence[Row]) -> Steps:
        self._held[number] = (yield from self._compute(rows)) if rows else self._none
        while (part := self._held.pop(self._next, None)) is not None:
            self._total = _sum(self._total, part)
            self._next += 1

    def _compute(self, rows: Sequence[Row]) -> Generator[Progress, None, _Part]:
        loop = OptimizerLoop(self._state, self._settings, rows, like=self._like)
        self._like = self._like or loop
        weight, sums = yield from loop.sum_gradients()
        gradients = [parameter.grad for parameter in self._parameters]
        self._state.optimizer.zero_grad()
        return _Part(weight, sums, asdict(loop.sizes), gradients)

    def finish(self, loop: OptimizerLoop) -> Steps:
        """`loop` has the rows of all parts."""
        weight, total = self._total.weight, self._total
        for parameter, gradient in zip(self._parameters, total.gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.div_(weight)
        loop.sizes = Sizes(**total.sizes)
        yield from ()
        return loop.finish_step(total.sums | {"loss": total.sums["loss"] / weight})


def _sum(total: _Part, part: _Part) -> _Part:
    """Adds to the gradients of `total`, which is not used any more."""
    gradients = [
        two if one is None else one if two is None else one.add_(two)
        for one, two in zip(total.gradients, part.gradients, strict=True)
    ]
    sums = {name: total.sums.get(name, 0.0) + value for name, value in part.sums.items()} or total.sums
    sizes = {name: total.sizes.get(name, 0) + value for name, value in part.sizes.items()} or total.sizes
    return _Part(total.weight + part.weight, sums, sizes, gradients)


class _FixedPasses:
    """The log-probabilities of a job's rows under the weights at its start, and under its reference."""

    def __init__(self, state: TrainState, settings: TrainingSettings) -> None:
        self._state = state
        self._settings = settings
        self._like: OptimizerLoop | None = None
        self._known: dict[int, tuple[int, FixedLogprobs, FixedLogprobs]] = {}

    def has_room(self, number: int) -> bool:
        return True

    def add(self, number: int, rows: Sequence[Row]) -> Steps:
        if not rows:
            return
        loop = OptimizerLoop(self._state, self._settings, rows, like=self._like)
        self._like = self._like or loop
        yield from loop.compute_fixed()
        self._known[number] = len(rows), loop.at_start, loop.at_reference

    def finish(self, loop: OptimizerLoop) -> Steps:
        first = 0
        for _, (count, at_start, at_reference) in sorted(self._known.items()):
            loop.at_start.adopt(at_start, first)
            loop.at_reference.adopt(at_reference, first)
            first += count
        return (yield from loop.run())
