"""A completed group of episodes, as it is collected, stored and trained."""

from collections import Counter
from typing import NamedTuple

from insitu.schemas.episodes import Episode
from insitu.schemas.finetuning import Trajectory


class GroupRecord(NamedTuple):
    """A completed group: all its episodes, and the trajectories of those that can be trained.

    `row_id` is that of its row; of a group of several rows, that of the first in the dataset. `saved` episodes were not
    played, as the rewards of the others are equal; `replaced_by` is the row that was played instead.
    """

    row_id: str
    episodes: list[Episode]
    trajectories: list[Trajectory]
    dropped: Counter[str]
    saved: int = 0
    replaced_by: str | None = None
