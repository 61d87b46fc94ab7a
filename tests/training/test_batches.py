"""Plan and queue of the batches that are collected ahead of training, in any order of completion.

A whole run without a model: the episodes of the real builder and collector wait until the test lets them end, in an
order that hypothesis draws, and fail, stop the run or are cancelled at points that it draws.
"""

import asyncio
import gc
import os
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml
from factories import read_lines, write_rows
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from waiting import turns, until

from insitu.collect.shared_run import share
from insitu.config import Config, load_config
from insitu.config.resolved import resolved_config
from insitu.errors import BackendUnavailable
from insitu.plugin_api import Builder, EvaluatorInfo, register_evaluator, register_function
from insitu.runs import files
from insitu.schemas.components import FunctionBaseConfig
from insitu.schemas.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluatorBaseConfig
from insitu.schemas.finetuning import FinetuneRunConfig, PolicyEndpoint
from insitu.training.observers import Collected
from insitu.training.run import Run
from insitu.training.schedule import LoopTrainerConfig, Schedule
from insitu.workflow.context import current_scope
from insitu.workflow.functions import FunctionInfo

ROWS, GENERATIONS, EPOCHS = 3, 2, 4
PER_EPOCH = ROWS * GENERATIONS
EPISODE_FILES = (files.JOURNAL, files.EPISODES, files.GROUPS)
IDLE = 40
"""Turns of the event loop after which everything waits for an episode, or for a thread."""

Member = tuple[int, str, int]
"""Epoch, row and generation."""


class Output:
    """What an episode returns, whose life is that of the episode in memory."""

    def __init__(self, member: Member) -> None:
        self.member = member


@dataclass
class Episodes:
    """The episodes of a run. Each waits, once begun, until `let_one_end`."""

    fails: frozenset[Member] = frozenset()
    stops: Member | None = None
    """The episode during which the model's server is lost for good, which ends the run."""
    waiting: dict[Member, asyncio.Event] = field(default_factory=dict)
    plays: Counter[Member] = field(default_factory=Counter)
    alive: "weakref.WeakSet[Output]" = field(default_factory=weakref.WeakSet)
    committed: int = 0
    is_paused: bool = False
    """Whether none ends."""
    most_ahead: int = 0

    async def play(self, member: Member) -> Output:
        epoch = member[0]
        self.plays[member] += 1
        self.most_ahead = max(self.most_ahead, epoch - 1 - self.committed)
        self.waiting[member] = asyncio.Event()
        try:
            await self.waiting[member].wait()
        finally:
            self.waiting.pop(member, None)
        if member == self.stops:
            raise BackendUnavailable("the server is lost")
        if member in self.fails:
            raise RuntimeError("fails")
        output = Output(member)
        self.alive.add(output)
        return output

    def let_one_end(self, number: int) -> None:
        """Lets one of the episodes in flight end."""
        members = sorted(self.waiting)
        self.waiting.pop(members[number % len(members)]).set()

    def held(self, epochs: Callable[[int], bool]) -> int:
        """How many episodes of some epochs are in memory."""
        gc.collect()
        return sum(epochs(output.member[0]) for output in self.alive)


_episodes = Episodes()


class GatedConfig(FunctionBaseConfig, name="gated"):
    """An agent whose episodes end when `_episodes` lets them."""


@register_function(config_type=GatedConfig)
async def gated(config: GatedConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    async def answer(question: Any) -> Output:
        scope = current_scope()
        assert scope is not None
        assert scope.key is not None
        return await _episodes.play((scope.key.epoch, scope.key.row_id, scope.key.generation))

    yield FunctionInfo.from_fn(answer, description="waits")


class OneConfig(EvaluatorBaseConfig, name="one"):
    """Scores everything 1."""


@register_evaluator(config_type=OneConfig)
async def one(config: OneConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    async def evaluate(data: EvalInput) -> EvalOutput:
        return EvalOutput(eval_output_items=[EvalOutputItem(id=item.id, score=1.0) for item in data.eval_input_items])

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="one")


def project(folder: Path, concurrency: int) -> Config:
    write_rows(folder, [{"say": f"row {number}"} for number in range(ROWS)])
    general = {"max_concurrency": concurrency, "retries": 0, "stall_warning": None}
    dataset = {"_type": "jsonl", "file_path": str(folder / "rows.jsonl")}
    config = {
        "workflow": {"_type": "gated"},
        "eval": {"general": general | {"dataset": dataset}, "evaluators": {"score": {"_type": "one"}}},
        "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder", "num_generations": GENERATIONS}},
        "finetuning": {
            "trajectory_builder": "episodes",
            "reward_function": {"name": "score"},
            "output_dir": str(folder / "run"),
        },
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    return load_config(folder / "config.yml")


class Order(NamedTuple):
    """Which of the waiting episodes ends next, and how long jobs take; 0: none ends while an epoch is recorded.

    Of each process but the last after how many episodes it is cancelled, and its concurrency.
    """

    ends: list[int]
    job: int
    processes: list[tuple[int, int]]


@asynccontextmanager
async def clock(order: Order, cancel_after: int | None) -> AsyncIterator[None]:
    """Lets one episode end after the other, and cancels the body after a number of them."""
    body = asyncio.current_task()
    assert body is not None

    async def tick() -> None:
        for count, number in enumerate(cycle(order.ends)):
            await turns(IDLE)
            if count == cancel_after:
                body.cancel()
            await until(lambda: _episodes.waiting and not _episodes.is_paused, every=0.001)
            _episodes.let_one_end(number)

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking


async def lost(since: float) -> bool:
    raise BackendUnavailable("the server is lost")


async def train(config: Config, staleness: int, order: Order, collected: list[int]) -> None:
    """A run that trains nothing, continued if there is one; `collected` gets the epochs that are complete."""
    request = FinetuneRunConfig(config_file=config, resume=True)
    folder, endpoint = config.folder / "run", PolicyEndpoint("http://127.0.0.1:1/v1", "policy", "none", 0)
    async with Builder(config, console=Console(quiet=True), request=request) as builder:
        with share(builder) as state:
            state.wait_for_policy = lost
            episodes = await builder.get_trajectory_builder("episodes")
            await episodes.initialize(config.finetuning)
            run = Run("run")
            run.state = state
            run.open_folder(folder, builder, {})
            _episodes.committed, _episodes.is_paused = run.progress.epoch, False
            schedule = Schedule(builder, episodes, run, LoopTrainerConfig(staleness=staleness))
            try:
                if not run.continues:
                    run.store.write(files.RUN, {"run_id": "run", "config": resolved_config(config)})
                    await run.commit(run_id="run", policy_version=0)
                for epoch in range(run.next_epoch, EPOCHS + 1):
                    served = replace(endpoint, version=epoch - 1) if staleness else None
                    batch = await schedule.collect(epoch, "run", served, EPOCHS)
                    collected.append(epoch)
                    check_complete(folder, epoch, batch, staleness)
                    await turns(order.job * IDLE)
                    ahead = {member for member in journaled(folder) if member[0] > epoch}
                    _episodes.is_paused = order.job == 0
                    await run.commit(epoch=epoch, policy_version=epoch, journal=schedule.journal())
                    _episodes.committed, _episodes.is_paused = epoch, False
                    assert ahead <= journaled(folder), "nothing that was recorded is lost"
                    assert _episodes.held(lambda number, last=epoch: number <= last) == 0
                    assert _episodes.held(lambda number: True) <= staleness * PER_EPOCH
            finally:
                await schedule.abandon()
                run.unlock()
                closed = sizes(folder)
                await turns(2 * IDLE)  # other components are closed
                assert sizes(folder) == closed, "no episode is written after the end"


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name in EPISODE_FILES}


def check_complete(folder: Path, epoch: int, batch: Collected, staleness: int) -> None:
    """All episodes of the epoch are in its collection and in the files, and none of a later epoch is."""
    assert sum(map(len, batch.collection.trajectories)) + sum(batch.collection.dropped.values()) == PER_EPOCH
    assert batch.collection.epoch == epoch
    assert batch.served is None or batch.served.version == max(epoch - 1 - staleness, 0)
    check_files(folder, epoch)


def check_files(folder: Path, epochs: int) -> None:
    """Batches were written in order, each episode once."""
    groups = read_lines(folder / files.GROUPS)[1:]
    assert [group["epoch"] for group in groups] == [epoch for epoch in range(1, epochs + 1) for _ in range(ROWS)]
    assert len({(group["epoch"], group["row_id"]) for group in groups}) == len(groups)
    episodes = [members_of(line) for line in read_lines(folder / files.EPISODES)[1:]]
    assert sorted(episodes) == all_members(epochs)


def members_of(line: dict[str, Any]) -> Member:
    return line["epoch"], line["row_id"], line["generation"]


def all_members(epochs: int = EPOCHS) -> list[Member]:
    numbers = range(1, epochs + 1), range(ROWS), range(GENERATIONS)
    return [(epoch, str(row), generation) for epoch, row, generation in product(*numbers)]


def journaled(folder: Path) -> set[Member]:
    path = folder / files.JOURNAL
    lines = read_lines(path)[1:] if path.exists() else []
    return {members_of(line["episode"]) for line in lines}


orders = st.builds(
    Order,
    ends=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    job=st.integers(0, 6),
    processes=st.lists(st.tuples(st.integers(0, EPOCHS * PER_EPOCH), st.integers(1, PER_EPOCH + 2)), max_size=3),
)
members = st.sampled_from(all_members())
FAIL_FIRST = [(4, "0", 1), (4, "1", 0), (4, "2", 1), (3, "1", 0), (1, "1", 0), (1, "0", 1), (4, "2", 0), (4, "1", 1)]
EXAMPLES = int(os.environ.get("PLAN_EXAMPLES", "1"))


@given(
    staleness=st.integers(0, 3),
    concurrency=st.integers(1, PER_EPOCH + 2),
    order=orders,
    fails=st.frozensets(members, max_size=8),
    stops=st.none() | members,
)
@example(2, 1, Order([0, 0, 0, 0, 0, -1, -1, -1], 0, [(7, 8)]), frozenset(), None)  # less concurrency afterwards
@example(2, 1, Order([25, 3], 0, [(0, 1), (12, 8)]), frozenset(), (1, "0", 0))  # only some have passed the collector
@example(
    3, 4, Order([20, 8, 16, 13, 15], 5, [(6, 1)]), frozenset(FAIL_FIRST), (2, "2", 1)
)  # an epoch began with failures
@settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes
def test_batches_are_complete_and_in_order_whatever_ends_first(
    staleness: int, concurrency: int, order: Order, fails: frozenset[Member], stops: Member | None
) -> None:
    asyncio.run(check_run(staleness, concurrency, order, fails, stops))


async def check_run(
    staleness: int, concurrency: int, order: Order, fails: frozenset[Member], stops: Member | None
) -> None:
    global _episodes
    _episodes = Episodes(fails, stops)
    collected: list[int] = []
    with TemporaryDirectory() as name:
        run = Path(name) / "run"
        played_once: set[Member] = set()
        for cancel_after, limit in [*order.processes, *[(None, concurrency)] * 2]:
            config = project(Path(name), limit)
            before = len(collected)
            try:
                async with clock(order, cancel_after):
                    await train(config, staleness, order, collected)
            except asyncio.CancelledError:
                assert cancel_after is not None
            except BackendUnavailable:
                assert _episodes.stops is not None
                assert all(epoch < _episodes.stops[0] for epoch in collected[before:])
                _episodes.stops = None
            assert not _episodes.waiting, "nothing runs after the end"
            assert all(_episodes.plays[member] == 1 for member in played_once), "nothing that was recorded is run again"
            played_once |= {member for member in journaled(run) if _episodes.plays[member] == 1}
        assert sorted({*collected}) == [*range(1, EPOCHS + 1)]
        assert _episodes.most_ahead <= staleness
        check_files(run, EPOCHS)
