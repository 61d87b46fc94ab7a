"""Which episodes of a collection may begin, and when a group is complete.

Without a budget all may begin at once. With one the attempts of a group begin in waves, and a row without variance is
replaced by another one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from insitu.algorithms.budget import Budget, lacks_variance
from insitu.schemas.episodes import Episode
from insitu.schemas.evaluation import EvalInputItem

Member = tuple[EvalInputItem, int]
"""A row and a generation: one episode of the row's group."""


@dataclass
class _Group:
    """A group in progress: the planned row at a position (`number` 0), or the row of a later try there."""

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

    `reward_of` is the reward of an episode, None if it is not trained.
    """

    def __init__(
        self, members: Sequence[Member], budget: Budget | None, reward_of: Callable[[Episode], float | None]
    ) -> None:
        self._budget = budget
        self._reward_of = reward_of
        self._ready: deque[Member] = deque()
        self.groups: dict[str, _Group] = {}
        """Those that have not ended, by row id."""
        first = budget.waves[0] if budget is not None else None
        for row, generation in members:
            group = self.groups.setdefault(str(row.id), _Group(row, len(self.groups)))
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
        group = self.groups[episode.key.row_id]
        group.episodes.append(episode)
        if len(group.episodes) < group.begun:
            return None
        rewards = [reward for e in group.episodes if (reward := self._reward_of(e)) is not None]
        is_silent = self._budget is not None and lacks_variance(rewards)
        if not is_silent and group.begun < len(group.generations):
            self._begin_wave(group)
            return None
        del self.groups[episode.key.row_id]
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
