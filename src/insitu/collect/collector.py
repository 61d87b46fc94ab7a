"""Collects an epoch: rows x generations -> scored groups, as they complete, under one concurrency limit.

    collection = await collect_epoch(plan, builder, run, observers)

Training, validation, evaluations, `insitu doctor` and the rehearsal all collect here, wherever the workflow runs.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from insitu.advantages.credit import TrainedCalls
from insitu.algorithms.budget import Budget, lacks_variance
from insitu.builder import Builder
from insitu.collect.conversations import collection_of, scored_group
from insitu.collect.episodes import EpisodeOptions, fail, open_workflow, run_episode
from insitu.collect.evaluators import Scorer, Scoring
from insitu.collect.shared_run import RunState
from insitu.collect.watchdog import doing
from insitu.errors import CaptureError, InsituError, WorkflowError
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus
from insitu.schemas.evaluation import EvalInputItem, EvaluationRunConfig
from insitu.schemas.finetuning import FinetuneRunConfig, TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.schemas.kinds import EXECUTOR, LLM
from insitu.wire.endings import end_tasks
from insitu.workflow.context import current_scope
from insitu.workflow.llms import ModelClient

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

Member = tuple[EvalInputItem, int]
"""A row and a generation: one episode of the row's group."""
Teach = Callable[[Episode, EvalInputItem], Awaitable[None]]
"""Adds to an episode what a teacher says about its tokens."""
PART_EPISODES, MAX_PARTS = 32, 16
"""A part of an epoch has at least so many planned episodes; an epoch has at most so many parts."""


@dataclass(frozen=True)
class Plan:
    """What is collected: rows x generations, how their episodes run and are scored, and which calls are trained.

    `limit` is the number of episodes in flight. `service` names the `endpoint` of a workflow service, if any.
    `vocab_size` is that of the model under training: a trained call with a higher token id fails its episode.
    `finished` are episodes of these members that an earlier process has run. `recorded` are groups of an earlier run,
    used as they are instead of running `members`. `rewarded`: each episode needs a reward, and becomes a trajectory.
    `pairs` turns a group into one of preference pairs. `purpose` is added to the names of episodes that the run waits
    for. `group_of`: the id of the group of each row that shares one with others; any other row has its own, with its
    id. `budget`: the episodes of a row begin in waves, and other rows may take the place of some. `teacher` is called
    with each scored episode that has a reward.
    """

    run_id: str
    epoch: int
    members: Sequence[Member]
    options: EpisodeOptions
    limit: int
    service: FinetuneRunConfig | EvaluationRunConfig | None = None
    trained: TrainedCalls = field(default_factory=TrainedCalls)
    vocab_size: int | None = None
    scoring: Scoring = field(default_factory=Scoring)
    rewarded: bool = False
    pairs: Callable[[GroupRecord], GroupRecord] | None = None
    finished: Sequence[Episode] = ()
    recorded: AsyncIterable[list[Episode]] | None = None
    purpose: str = ""
    group_of: Mapping[str, str] = field(default_factory=dict)
    budget: Budget | None = None
    teacher: Teach | None = None

    @property
    def rows(self) -> dict[str, EvalInputItem]:
        """The rows that may be played, by id."""
        reserve = self.budget.reserve if self.budget is not None else ()
        return {str(row.id): row for row in (*(row for row, _ in self.members), *reserve)}

    def trained_reward(self, episode: Episode) -> float | None:
        """The reward of an episode with calls to train."""
        return episode.reward if episode.reward is not None and self.trained.of(episode) else None

    def parts(self) -> dict[str, int] | None:
        """The part of the epoch's training job that each group belongs to, by its id; None if there is only one.

        Parts are runs of rows in the order in which they are trained. They are planned, so they do not depend on what
        the episodes turn out to be.
        """
        group_ids = sorted({self.group_of.get(name, name) for row, _ in self.members if (name := str(row.id))})
        if not group_ids or (self.budget is not None and self.budget.reserve):
            return None
        size = max(-(-PART_EPISODES * len(group_ids) // len(self.members)), -(-len(group_ids) // MAX_PARTS))
        return {name: number // size for number, name in enumerate(group_ids)} if size < len(group_ids) else None

    def group(self, episodes: Sequence[Episode]) -> GroupRecord:
        """The group of a row whose episodes are complete."""
        shared = self.group_of.get(episodes[0].key.row_id)
        group = scored_group(episodes, self.trained, rewarded=self.rewarded, shared=shared)
        return group if self.pairs is None else self.pairs(group)


@dataclass
class _Group:
    """A group in progress: the planned row at a position (`number` 0), or the row of a later try there.

    Of a group of several rows, `row` is the first.
    """

    row: EvalInputItem
    position: int
    number: int = 0
    generations: list[int] = field(default_factory=list)
    begun: int = 0
    episodes: list[Episode] = field(default_factory=list)


class PlayedGroup(NamedTuple):
    """The episodes of a group that has ended, how many were not played, and the row that takes its place, if any."""

    episodes: list[Episode]
    saved: int = 0
    replaced_by: str | None = None


class Rollouts(Iterator[Member]):
    """Yields the episodes that may begin now; `add` each that has ended, after which more may begin.

    `reward_of` is the reward of an episode, None if it is not trained. `group_of` maps the id of a row to that of its
    group, as in `Plan`; under a budget, every row must be its own group.
    """

    def __init__(
        self,
        members: Sequence[Member],
        budget: Budget | None,
        reward_of: Callable[[Episode], float | None],
        group_of: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._group_of = group_of
        self._budget = budget
        self._reward_of = reward_of
        self._ready: deque[Member] = deque()
        self.groups: dict[str, _Group] = {}
        """Those that have not ended, by id."""
        first = budget.waves[0] if budget is not None else None
        for row, generation in members:
            name = str(row.id)
            group = self.groups.setdefault(group_of.get(name, name), _Group(row, len(self.groups)))
            group.generations.append(generation)
            if first is None or group.begun < first:
                group.begun += 1
                self._ready.append((row, generation))

    def __next__(self) -> Member:
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def add(self, episode: Episode) -> PlayedGroup | None:
        """The group of an episode that has ended, if it was the group's last."""
        row_id = episode.key.row_id
        group_id = self._group_of.get(row_id, row_id)
        group = self.groups[group_id]
        group.episodes.append(episode)
        if len(group.episodes) < group.begun:
            return None
        is_silent = False
        if self._budget is not None:
            rewards = map(self._reward_of, group.episodes)
            is_silent = lacks_variance([reward for reward in rewards if reward is not None])
        if not is_silent and group.begun < len(group.generations):
            self._begin_wave(group)
            return None
        del self.groups[group_id]
        replacement = self._begin_replacement(group) if is_silent else None
        saved = len(group.generations) - len(group.episodes)
        return PlayedGroup(group.episodes, saved, str(replacement.row.id) if replacement is not None else None)

    def _begin_wave(self, group: _Group) -> None:
        """Before the groups that have not begun: the fewer are in progress, the less is held."""
        assert self._budget is not None
        wave = group.generations[group.begun :][: self._budget.next_wave(group.begun)]
        group.begun += len(wave)
        self._ready.extendleft((group.row, generation) for generation in reversed(wave))

    def _begin_replacement(self, group: _Group) -> _Group | None:
        assert self._budget is not None
        row = self._budget.replacement(group.position, group.number + 1)
        if row is None:
            return None
        replacement = _Group(row, group.position, group.number + 1, group.generations)
        self.groups[str(row.id)] = replacement
        self._begin_wave(replacement)
        return replacement


class Observer:
    """Follows the collection of an epoch. Every method does nothing by default; what one raises ends the collection."""

    def on_episode(self, episode: Episode) -> None:
        """Called with every episode as it ends, also with those that an earlier process has run."""

    def on_group(self, group: GroupRecord) -> None:
        """Called with every group as it becomes complete, after its last episode."""

    def on_end(self, collection: TrajectoryCollection) -> None:
        """Called with the trajectories of the epoch."""


async def collect_epoch(
    plan: Plan, builder: Builder, run: RunState, observers: Sequence[Observer] = ()
) -> TrajectoryCollection:
    """The trajectories of a plan. If it is cancelled, so are the episodes in flight."""

    def on_episode(episode: Episode) -> None:
        for observer in observers:
            observer.on_episode(episode)

    groups = []
    async with aclosing(collect(plan, builder, run, on_episode)) as completed:
        async for group in completed:
            for observer in observers:
                observer.on_group(group)
            groups.append(group._replace(episodes=[]))  # an epoch of steps would not fit into memory
    collection = collection_of(groups, plan.run_id, plan.epoch)
    collection = collection.model_copy(update={"parts": plan.parts()})
    for observer in observers:
        observer.on_end(collection)
    return collection


async def collect(
    plan: Plan, builder: Builder, run: RunState, on_episode: Callable[[Episode], None] | None = None
) -> AsyncGenerator[GroupRecord, None]:
    """Yields each group with its last episode; `on_episode` gets every episode as it completes.

    An episode that fails has a reason and does not raise. Close the generator (`aclosing`) to cancel what is in flight.
    """
    if plan.recorded is not None:
        async for group in plan.recorded:
            for episode in group:
                _check_vocabulary(episode, plan)
                if on_episode is not None:
                    on_episode(episode)
            yield plan.group(group)
        return
    rollouts = Rollouts(plan.members, plan.budget, plan.trained_reward, plan.group_of)
    async with aclosing(_run_episodes(rollouts, plan, builder, run)) as episodes:
        async for episode in episodes:  # each has an outcome: every group becomes complete
            if on_episode is not None:
                on_episode(episode)
            if (played := rollouts.add(episode)) is not None:
                record = plan.group(played.episodes)
                yield record._replace(saved=played.saved, replaced_by=played.replaced_by)
    if rollouts.groups:
        rows = ", ".join(map(repr, rollouts.groups))
        raise InsituError(f"the groups of these rows have not ended: {rows:.200}; this is a fault of insitu")


async def _run_episodes(
    rollouts: Rollouts, plan: Plan, builder: Builder, run: RunState
) -> AsyncGenerator[Episode, None]:
    """The episodes of a plan, scored, in the order of completion; those that are finished are not run."""
    evaluators = {name: await builder.get_evaluator(name) for name in plan.scoring.evaluators}
    scorer = Scorer(plan.scoring, evaluators, plan.trained, run.unscored)
    finished = {episode.key.member: episode for episode in plan.finished}
    ran = 0

    async def run_member(member: Member) -> Episode:
        nonlocal ran
        row, generation = member
        key = EpisodeKey(plan.run_id, plan.epoch, str(row.id), generation)
        if (episode := finished.get(key.member)) is not None:
            return episode
        ran += 1
        slot = _slot(run, key) if current_scope() is None else nullcontext()  # within an episode: that one's slot
        with run.watchdog.waiting(key.label() + plan.purpose, lambda: "all max_concurrency slots are taken"):
            async with slot:
                started = time.monotonic()
                episode = await run_episode(attempt, row, key, plan.options)
                while episode.reason is DropReason.BACKEND_ERROR and await _server_was_down(run, started):
                    started, key = time.monotonic(), key.replayed(episode.key.attempt)
                    earlier, episode = episode, await run_episode(attempt, row, key, plan.options)
                    episode.failed_requests = dict(Counter(earlier.failed_requests) + Counter(episode.failed_requests))
                    episode.abandoned_attempts += earlier.abandoned_attempts
            _check_vocabulary(episode, plan)
            if evaluators:
                await scorer.score(episode, row)
            if plan.teacher is not None and plan.trained_reward(episode) is not None:
                await plan.teacher(episode, row)
        return episode

    llms = plan.options.training if isinstance(plan.options.training, frozenset) else ()
    stray_before = stray_completions(builder)
    async with open_workflow(builder, plan.service, llms, run) as attempt:
        async with aclosing(run_limited(rollouts, run_member, plan.limit)) as episodes:
            async for episode in episodes:
                yield episode
    for name, count in (stray_completions(builder) - stray_before).items():
        logger.warning(
            "%d completions of llms.%s were requested outside every episode while %d episodes ran: they are not "
            "recorded and not trained. A thread must enter the episode that it works for with Context.activate()",
            count,
            name,
            ran,
        )


@asynccontextmanager
async def _slot(run: RunState, key: EpisodeKey) -> AsyncIterator[None]:
    """Waits for a slot for an episode."""
    async with run.episode_slots:
        run.episodes_in_flight.add(key)
        try:
            yield
        finally:
            run.episodes_in_flight.discard(key)


def _check_vocabulary(episode: Episode, plan: Plan) -> None:
    """Fails an episode with a token id that the model under training lacks; its backend would refuse the job."""
    if plan.vocab_size is None or episode.outcome is not EpisodeStatus.OK:
        return
    for index in plan.trained.of(episode):
        call = episode.calls[index]
        highest = max(max(call.prompt_token_ids or (0,)), max(call.token_ids or (0,)))
        if highest >= plan.vocab_size:
            problem = f"{call.model!r} returned the token id {highest}; the vocabulary ends at {plan.vocab_size - 1}"
            fail(episode, DropReason.CAPTURE_ERROR, CaptureError(problem))
            episode.reward = None


def stray_completions(builder: Builder) -> Counter[str]:
    """Completions requested outside every episode so far, by key of `llms`."""
    clients = (llm for llm in builder.built(LLM) if isinstance(llm, ModelClient))
    stray = Counter({str(client.recorder.llm): client.recorder.stray_completions for client in clients})
    for executor in builder.built(EXECUTOR):
        stray.update(executor.stray_completions)
    return stray


async def _server_was_down(run: RunState, started: float) -> bool:
    """Whether an outage of the model's server, which has ended by now, may have made an episode fail."""
    with doing(lambda: "its model's server does not respond"):
        return run.wait_for_policy is not None and await run.wait_for_policy(started)


async def run_limited(
    tasks: Iterable[T], run: Callable[[T], Coroutine[Any, Any, R]], limit: int
) -> AsyncGenerator[R, None]:
    """Yields the results of `run(task)` in the order of completion, with at most `limit` in flight.

    Consumes `tasks` lazily: a result that waits to be taken counts as in flight. An exhausted iterator may have more
    tasks once a result was taken. An exception of `run`, or closing the generator (`aclosing`), cancels what is in
    flight.
    """
    source = iter(tasks)
    running: dict[asyncio.Task[R], T] = {}
    ended: asyncio.Queue[asyncio.Task[R]] = asyncio.Queue()

    def start() -> None:
        for task in islice(source, limit - len(running)):
            started = asyncio.create_task(run(task), name="episode")
            running[started] = task
            started.add_done_callback(ended.put_nowait)

    try:
        start()
        while running:
            finished = await ended.get()
            task = running.pop(finished)
            if finished.cancelled():  # else it would vanish
                raise WorkflowError(f"{task!r:.200} was cancelled from inside")
            start()
            yield finished.result()
            start()
    finally:
        if running:
            await end_tasks(*running)
