"""A group as it is collected: the episodes of one row."""

from collections import Counter
from typing import NamedTuple

from insitu.schemas.episodes import Episode
from insitu.schemas.finetuning import Trajectory


class GroupRecord(NamedTuple):
    """A completed group: all its episodes, and the trajectories of those that can be trained."""

    row_id: str
    episodes: list[Episode]
    trajectories: list[Trajectory]
    dropped: Counter[str]
