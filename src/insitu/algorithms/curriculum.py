"""Curriculum learning: which groups an epoch trains on.

It starts with the easiest (or hardest) fraction of the examples and expands it at fixed intervals; then it drops groups
with too small a range of rewards, and subsamples the rest if configured.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from insitu.algorithms.selection import drop_groups, has_small_range, subsample
from insitu.errors import TrajectoryError
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import CurriculumLearningConfig, Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)

_ID_KEYS = ("row_id", "example_id", "id")


class CurriculumState(BaseModel):
    """The examples included so far, and the mean rewards used to rank all examples.

    `epoch` is the last epoch processed (0 before the first). `reward_sums` maps each example to (sum of its groups'
    mean rewards, number of groups). The documented names mislead: `current_percentile` is a fraction in (0, 1], and
    `total_groups` and `included_groups` count and name examples.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    current_percentile: float = Field(gt=0, le=1)
    last_expansion_epoch: int = -1
    total_groups: int = 0
    included_groups: set[str] = Field(default_factory=set)
    epoch: int = Field(default=0, ge=0)
    reward_sums: dict[str, tuple[float, Annotated[int, Field(ge=1)]]] = Field(default_factory=dict)

    @field_serializer("included_groups", when_used="json")
    def _sorted(self, groups: set[str]) -> list[str]:
        return sorted(groups)


def apply_curriculum(
    collection: TrajectoryCollection,
    config: CurriculumLearningConfig,
    state: dict[str, Any],
    epoch: int,
    seed: int = 0,
) -> TrajectoryCollection:
    """Returns the groups to train on in `epoch` (1-based) and counts the others in `dropped`.

    Updates `state`, a trainer's `_curriculum_state`, so call it exactly once per epoch. The metadata of each group's
    trajectories must name its example as `row_id`, `example_id` or `id`; otherwise raises TrajectoryError.
    """
    if not config.enabled:
        return collection
    if epoch < 1:
        raise TrajectoryError(f"epochs are numbered from 1, got {epoch}")
    examples = example_ids(collection)
    groups = zip(examples, collection.trajectories, strict=True)
    rewards = {example: [t.reward for t in group] for example, group in groups if group}
    curriculum = CurriculumState.model_validate(state)
    dropped = drop_reasons(config, curriculum, epoch, rewards, seed)
    state.update(curriculum)
    kept = drop_groups(collection, {i: str(dropped[e]) for i, e in enumerate(examples) if e in dropped})
    logger.log(
        logging.INFO if kept.trajectories else logging.WARNING,
        "epoch %d: training on %d of %d groups; the curriculum includes %.0f%% of the examples (%d of %d); dropped: %s",
        epoch,
        len(kept.trajectories),
        len(examples),
        100 * curriculum.current_percentile,
        len(curriculum.included_groups),
        curriculum.total_groups,
        ", ".join(f"{n} {reason}" for reason, n in sorted(Counter(map(str, dropped.values())).items())) or "none",
    )
    return kept


def example_ids(collection: TrajectoryCollection) -> list[str]:
    """The example id of each group; raises TrajectoryError for a missing or repeated id."""
    seen: dict[str, int] = {}
    for index, group in enumerate(collection.trajectories):
        example = _example_id(group) if group else f"(empty group {index})"
        if example is None:
            raise TrajectoryError(
                f"group {index} has no example id: the metadata of its trajectories must contain "
                f"one of {', '.join(_ID_KEYS)}"
            )
        if example in seen:
            raise TrajectoryError(
                f"groups {seen[example]} and {index} both belong to example {example!r}: one group each"
            )
        seen[example] = index
    return list(seen)


def _example_id(group: Sequence[Trajectory]) -> str | None:
    metadata = group[0].metadata or {}
    return next((str(metadata[key]) for key in _ID_KEYS if metadata.get(key) is not None), None)


def included_fraction(config: CurriculumLearningConfig, epoch: int) -> float:
    """The fraction of the examples included at `epoch` (1-based)."""
    expansions = (epoch - 1) // config.expansion_interval
    # rounds off float error, so that 0.3 + 2 * 0.2 includes 70 of 100 examples, not 71
    return min(1.0, round(config.initial_percentile + config.increment_percentile * expansions, 9))


def drop_reasons(
    config: CurriculumLearningConfig,
    state: CurriculumState,
    epoch: int,
    rewards: Mapping[str, Sequence[float]],
    seed: int,
) -> dict[str, DropReason]:
    """Updates `state` for `epoch` and returns the reason for each example to drop.

    `rewards` maps example ids to the rewards of their groups. The included set only grows: at the first epoch and at
    each expansion the easiest (or hardest) remaining examples are added, up to ceil(fraction x number of examples).
    """
    for example, group in rewards.items():
        total, count = state.reward_sums.get(example, (0.0, 0))
        state.reward_sums[example] = (total + sum(group) / len(group), count + 1)
    state.total_groups = len(state.reward_sums)
    state.epoch = epoch
    _expand_if_due(config, state)
    dropped = {e: DropReason.CURRICULUM for e in rewards if e not in state.included_groups}
    small = [e for e, of in rewards.items() if e not in dropped and has_small_range(of, config.min_reward_diff)]
    dropped |= dict.fromkeys(small, DropReason.NO_VARIANCE)
    if config.random_subsample is not None:
        rest = [e for e in rewards if e not in dropped]
        kept = set(subsample(rest, config.random_subsample, epoch, seed))
        dropped |= {e: DropReason.SUBSAMPLE for e in rest if e not in kept}
    return dropped


def _expand_if_due(config: CurriculumLearningConfig, state: CurriculumState) -> None:
    fraction = included_fraction(config, state.epoch)
    is_expansion_epoch = (state.epoch - 1) % config.expansion_interval == 0
    if state.included_groups and not is_expansion_epoch and fraction == state.current_percentile:
        return
    state.current_percentile = fraction
    state.last_expansion_epoch = state.epoch
    size = max(1, math.ceil(round(fraction * len(state.reward_sums), 9)))
    sign = 1 if config.sort_ascending else -1  # ascending by mean reward: hardest first

    def rank(example: str) -> tuple[float, str]:
        total, count = state.reward_sums[example]
        return (sign * total / count, example)

    remaining = sorted((e for e in state.reward_sums if e not in state.included_groups), key=rank)
    state.included_groups |= set(remaining[: max(0, size - len(state.included_groups))])
