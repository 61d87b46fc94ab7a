"""What follows the collection of an epoch in a run: the files, the console, and how far it is."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from insitu.algorithms.budget import Spending
from insitu.capture.ledger import Activity
from insitu.collect.collector import Observer, Plan
from insitu.runs import files
from insitu.runs.records import journal_record
from insitu.runs.store import RunStore
from insitu.schemas.episodes import Episode, EpisodeKey
from insitu.schemas.finetuning import PolicyEndpoint, TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.training.report import Report

_FIRST_REWARDS = 16
_FIRST_SECONDS = 20.0
"""A shorter epoch says it at its end."""
_SHOWN = 200
"""Characters of an answer."""


class Journal(Observer):
    """Records each episode at once, so that a resumed run need not run it again. `known` are recorded already."""

    def __init__(self, store: RunStore, known: Collection[EpisodeKey]) -> None:
        self._store, self._known = store, known

    def on_episode(self, episode: Episode) -> None:
        if self._store.keeps_token_ids and episode.key not in self._known:
            self._store.append(files.JOURNAL, [journal_record(episode)])


class GroupFiles(Observer):
    """Writes each group of an epoch."""

    def __init__(self, store: RunStore, epoch: int, plan: Plan | None) -> None:
        self._store, self._epoch = store, epoch
        self._rows = plan.rows if plan is not None else {}

    def on_group(self, group: GroupRecord) -> None:
        row = self._rows.get(group.row_id) or self._rows.get(group.episodes[0].key.row_id)
        self._store.append_group(group, self._epoch, row)


class Scored(NamedTuple):
    """The reward of an episode, and its scores by evaluator."""

    reward: float
    scores: Mapping[str, float | None]


class Progress(Observer):
    """How far the collection of an epoch is, and what went wrong in it.

    `all_begun` is set as soon as no planned episode waits for a place.
    """

    def __init__(self, plan: Plan | None) -> None:
        self.errors = Counter[str]()
        self.all_begun = asyncio.Event()
        self._plan = plan
        self._spending: Spending | None = None
        if plan is not None and plan.budget is not None:
            self._spending = Spending.of(plan.budget, len(plan.members))
        self._ended = Counter[str]()
        """Episodes of each group."""
        self._complete = self._abandoned = 0
        self.scored: list[list[Scored]] | None = [] if plan is not None and plan.rewarded else None
        """The episodes with a reward of each group, also those without calls to train; None if they need no reward."""
        self._check_begun()

    @property
    def planned(self) -> int | None:
        """The episodes of the epoch as far as they are decided; None if they are not planned."""
        if self._plan is None or self._plan.recorded is not None:
            return None
        return self._spending.episodes if self._spending is not None else len(self._plan.members)

    @property
    def metrics(self) -> dict[str, int]:
        """What the line of the epoch in `training_metrics.jsonl` has of it."""
        spending = asdict(self._spending) if self._spending is not None else {}
        return {"abandoned_attempts": self._abandoned, **spending}

    @property
    def given(self) -> int:
        """The episodes that have ended so far, or that an earlier process has run."""
        return max(self._ended.total(), len(self._plan.finished) if self._plan is not None else 0)

    def incomplete_groups(self, in_flight: Collection[EpisodeKey]) -> int:
        """Groups that have begun and are not complete."""
        if self._plan is None:
            return 0
        begun = {self._group(key.row_id) for key in in_flight if key.epoch == self._plan.epoch}
        return len(self._ended.keys() | begun) - self._complete

    def on_episode(self, episode: Episode) -> None:
        self._ended[self._group(episode.key.row_id)] += 1
        self._abandoned += episode.abandoned_attempts
        self._check_begun()

    def on_group(self, group: GroupRecord) -> None:
        self._complete += 1
        self.errors.update(f"{e.reason}: {e.error}" for e in group.episodes if e.error is not None)
        if self.scored is not None and any(e.reward is not None for e in group.episodes):
            self.scored.append([Scored(e.reward, e.scores) for e in group.episodes if e.reward is not None])
        if self._spending is not None:
            extra = len(group.episodes) + group.saved if group.replaced_by is not None else 0
            self._spending.add(group.saved, extra)
            self._check_begun()

    def _group(self, row_id: str) -> str:
        return self._plan.group_of.get(row_id, row_id) if self._plan is not None else row_id

    def _check_begun(self) -> None:
        if self._plan is not None and (self.planned or 0) - self._ended.total() <= self._plan.limit:
            self.all_begun.set()


class Collected(NamedTuple):
    """The groups of an epoch, and `metrics` of its line in `training_metrics.jsonl`.

    The versions that they may have been sampled from are `oldest` and those up to that of `served`.
    """

    collection: TrajectoryCollection
    served: PolicyEndpoint | None
    oldest: int | None
    progress: Progress
    metrics: dict[str, Any]


class Bar(Observer):
    """Moves the bar of the epoch that is being collected."""

    def __init__(self, report: Report, progress: Progress) -> None:
        self._report, self._progress = report, progress
        self._show_total()
        report.expect_given(progress.given)

    def on_episode(self, episode: Episode) -> None:
        self._report.advance(episode.reward)

    def on_group(self, group: GroupRecord) -> None:
        self._show_total()

    def _show_total(self) -> None:
        if (planned := self._progress.planned) is not None:
            self._report.expect(planned)


class FirstRewards(Observer):
    """Says while the first epoch is collected, which may take long, that all of its rewards so far are equal."""

    def __init__(self, report: Report) -> None:
        self._report, self._began = report, time.monotonic()
        self._rewards: list[float] = []
        self._said = False

    def on_episode(self, episode: Episode) -> None:
        if self._said or episode.reward is None:
            return
        self._rewards.append(episode.reward)
        if len({*self._rewards}) > 1:
            self._said = True
        elif len(self._rewards) >= _FIRST_REWARDS and time.monotonic() - self._began > _FIRST_SECONDS:
            self._said = True
            length = sum(len(call.token_ids or ()) for call in episode.calls)
            self._report.note(
                f"the first {len(self._rewards)} episodes all have the reward {episode.reward:g}, from which nothing "
                f"can be learned. The last of them sampled {length} tokens; its answer: "
                f"{str(episode.output)!r:.{_SHOWN}}. "
                "If the others go on like this, stop (Ctrl-C), and change the prompt, the score, or max_tokens"
            )


class Held(Observer):
    """Holds back what happens in an epoch that is ahead, until `release` names its observers."""

    def __init__(self) -> None:
        self._observers: Sequence[Observer] | None = None
        self.episodes: list[Episode] = []
        self._groups: list[GroupRecord] = []

    def release(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        for episode in self.episodes:
            self.on_episode(episode)
        for group in self._groups:
            self.on_group(group)
        self.episodes, self._groups = [], []

    def on_episode(self, episode: Episode) -> None:
        if self._observers is None:
            self.episodes.append(episode)
        for observer in self._observers or ():
            observer.on_episode(episode)

    def on_group(self, group: GroupRecord) -> None:
        if self._observers is None:
            self._groups.append(group)
        for observer in self._observers or ():
            observer.on_group(group)


class IdleClock:
    """Measures for how long nothing was sampled, and for how long nothing was trained, while an epoch lasted."""

    def __init__(self, calls: Activity) -> None:
        self._calls, self.jobs = calls, Activity()
        self.begin()

    def begin(self) -> None:
        """An epoch begins."""
        self._began = self._clocks()

    def idle(self, trained_ahead: float) -> dict[str, float]:
        """Seconds since then. `trained_ahead` are those that the epoch trained before its job was submitted."""
        wall, calls, jobs = (now - then for now, then in zip(self._clocks(), self._began, strict=True))
        return {"sampler": max(0.0, wall - calls), "learner": max(0.0, wall - jobs - trained_ahead)}

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds: the time, those with a model call of an episode in flight, and those with a job in progress."""
        return time.monotonic(), self._calls.seconds, self.jobs.seconds
