"""Groups: the scored episodes of one row, and the trajectories of those that can be trained."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from insitu.advantages.credit import TrainedCalls
from insitu.collect.conversations import main_conversation
from insitu.schemas.episodes import DropReason, Episode, Outcome
from insitu.schemas.finetuning import Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)


class GroupRecord(NamedTuple):
    """A completed group: all its episodes, and the trajectories of those that can be trained."""

    row_id: str
    episodes: list[Episode]
    trajectories: list[Trajectory]
    dropped: Counter[str]


def scored_group(episodes: Sequence[Episode], trained: TrainedCalls, *, rewarded: bool = True) -> GroupRecord:
    """The group of a row's episodes. Each has a trajectory, or is counted in `dropped` by its reason.

    Without rewards there are no trajectories, and only failed episodes are counted.
    """
    group = GroupRecord(episodes[0].key.row_id, sorted(episodes, key=lambda e: e.key.generation), [], Counter())
    for episode in group.episodes:
        trajectory = _trajectory(episode, trained) if rewarded and episode.reward is not None else None
        if trajectory is not None:
            group.trajectories.append(trajectory)
        elif rewarded or episode.outcome is not Outcome.OK:
            group.dropped[str(episode.reason or DropReason.NO_SCORE)] += 1
    return group


def _trajectory(episode: Episode, trained: TrainedCalls) -> Trajectory | None:
    """An episode with a reward as a trajectory; None, with the reason set, if it has no trained call."""
    positions = trained.of(episode)
    if not positions:
        if episode.reason is None:
            episode.reason = DropReason.NO_TARGET_CALLS if episode.calls else DropReason.NO_CALLS
            episode.error = trained.why_none(episode.calls)
        return None
    steps = episode.step_rewards
    if steps is not None and len(steps) == len(episode.calls):
        steps = [steps[index] for index in positions]
    return Trajectory.model_construct(
        episode=main_conversation(episode.calls),
        reward=episode.reward,
        shaped_rewards=steps,
        metadata={
            "row_id": episode.key.row_id,
            "generation": episode.key.generation,
            "rewarded_functions": episode.rewarded_functions,
            "scores": episode.scores,
        },
        id=episode.key.text(),
        calls=episode.calls,
        trained_calls=positions,
        rows=[],
    )


def collection_of(groups: Iterable[GroupRecord], run_id: str, epoch: int) -> TrajectoryCollection:
    """The trajectories of an epoch, ordered by row: the order of completion differs between runs."""
    ordered = sorted(groups, key=lambda group: group.row_id)
    rewards = [trajectory.reward for group in ordered for trajectory in group.trajectories]
    return TrajectoryCollection(
        trajectories=[group.trajectories for group in ordered if group.trajectories],
        run_id=run_id,
        epoch=epoch,
        dropped=dict(sum((group.dropped for group in ordered), Counter[str]())),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )
