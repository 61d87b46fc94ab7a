"""Which groups an epoch trains on: the easiest share first, grown step by step, then those with enough variance."""

import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.errors import TrajectoryError
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import CurriculumLearningConfig, Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)

_ID_KEYS = ("row_id", "example_id", "id")


class CurriculumState(BaseModel):
    """The examples included so far, and the mean rewards that rank all examples.

    `epoch` is the last epoch selected for (0 before the first); `reward_sums` holds (sum of group means, groups).
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    current_percentile: float = Field(gt=0, le=1)
    last_expansion_epoch: int = -1
    total_groups: int = 0
    included_groups: set[str] = Field(default_factory=set)
    epoch: int = Field(default=0, ge=0)
    reward_sums: dict[str, tuple[float, Annotated[int, Field(ge=1)]]] = Field(default_factory=dict)


def apply_curriculum(
    collection: TrajectoryCollection,
    config: CurriculumLearningConfig,
    state: dict[str, Any],
    epoch: int,
    seed: int = 0,
) -> TrajectoryCollection:
    """The groups that `epoch` (first: 1) trains on; the others are counted in `dropped`.

    Updates `state`, a trainer's `_curriculum_state`: call it once per epoch. The metadata of each group's trajectories
    names its example as `row_id`, `example_id` or `id`; raises TrajectoryError otherwise.
    """
    if not config.enabled:
        return collection
    if epoch < 1:
        raise TrajectoryError(f"curriculum requested for epoch {epoch}; the first epoch is 1")
    examples = examples_of(collection)
    groups = {e: group for e, group in zip(examples, collection.trajectories, strict=True) if group}
    known = CurriculumState.model_validate(state)
    dropped = select(config, known, epoch, {e: [t.reward for t in group] for e, group in groups.items()}, seed)
    state.update(known)
    kept = drop_groups(collection, {i: str(dropped[e]) for i, e in enumerate(examples) if e in dropped})
    logger.log(
        logging.INFO if kept.trajectories else logging.WARNING,
        "epoch %d: the curriculum trains on %d of %d groups (%.0f %%: %d of %d examples); dropped groups: %s",
        epoch,
        len(kept.trajectories),
        len(examples),
        100 * known.current_percentile,
        len(known.included_groups),
        known.total_groups,
        ", ".join(f"{n} {reason}" for reason, n in sorted(Counter(map(str, dropped.values())).items())) or "none",
    )
    return kept


def examples_of(collection: TrajectoryCollection) -> list[str]:
    """The example id of each group; raises TrajectoryError for a missing or repeated id."""
    seen: dict[str, int] = {}
    for index, group in enumerate(collection.trajectories):
        example = _example_of(group) if group else f"(empty group {index})"
        if example is None:
            raise TrajectoryError(
                f"group {index} does not name its example: the metadata of its trajectories needs "
                f"one of {', '.join(_ID_KEYS)}"
            )
        if example in seen:
            raise TrajectoryError(
                f"groups {seen[example]} and {index} both belong to example {example!r}: one group each"
            )
        seen[example] = index
    return list(seen)


def _example_of(group: Sequence[Trajectory]) -> str | None:
    metadata = group[0].metadata or {}
    return next((str(metadata[key]) for key in _ID_KEYS if metadata.get(key) is not None), None)


def drop_groups(collection: TrajectoryCollection, reasons: Mapping[int, str]) -> TrajectoryCollection:
    """A copy without the groups at the indices in `reasons`, whose trajectories are counted as dropped."""
    dropped, by_id = Counter(collection.dropped), dict(collection.drop_reasons)
    for index, reason in reasons.items():
        dropped[reason] += len(collection.trajectories[index])
        by_id |= {str(t.id): reason for t in collection.trajectories[index]}
    kept = [group for index, group in enumerate(collection.trajectories) if index not in reasons]
    return collection.model_copy(update={"trajectories": kept, "dropped": dict(dropped), "drop_reasons": by_id})


def percentile(config: CurriculumLearningConfig, epoch: int) -> float:
    """The share of examples in training at `epoch` (first: 1)."""
    expansions = (epoch - 1) // config.expansion_interval
    # rounded: 0.3 + 0.2 * 2 must include 70 of 100 examples, not 71
    return min(1.0, round(config.initial_percentile + config.increment_percentile * expansions, 9))


def select(
    config: CurriculumLearningConfig,
    state: CurriculumState,
    epoch: int,
    rewards: Mapping[str, Sequence[float]],
    seed: int,
) -> dict[str, DropReason]:
    """The examples dropped at `epoch`, each with its reason; `rewards` holds every group's rewards by example id.

    Updates `state`. The included set only grows: at the first epoch and at each expansion, to
    ceil(percentile x number of examples), by the easiest (or hardest) examples not yet included.
    """
    for example, group in rewards.items():
        total, count = state.reward_sums.get(example, (0.0, 0))
        state.reward_sums[example] = (total + sum(group) / len(group), count + 1)
    state.total_groups = len(state.reward_sums)
    state.epoch = epoch
    _expand(config, state)
    dropped = {e: DropReason.CURRICULUM for e in rewards if e not in state.included_groups}
    ranges = {e: round(max(g) - min(g), 9) for e, g in rewards.items()}  # 0.3 - 0.2 is not below 0.1
    flat = [e for e in rewards if e not in dropped and ranges[e] < config.min_reward_diff]
    dropped |= dict.fromkeys(flat, DropReason.NO_VARIANCE)
    if config.random_subsample is not None:
        rest = [e for e in rewards if e not in dropped]
        kept = set(subsample(rest, config.random_subsample, epoch, seed))
        dropped |= {e: DropReason.SUBSAMPLE for e in rest if e not in kept}
    return dropped


def _expand(config: CurriculumLearningConfig, state: CurriculumState) -> None:
    share = percentile(config, state.epoch)
    starts = not state.included_groups
    if not starts and share == state.current_percentile and (state.epoch - 1) % config.expansion_interval:
        return
    state.current_percentile = share
    state.last_expansion_epoch = state.epoch
    size = max(1, math.ceil(round(share * len(state.reward_sums), 9)))
    sign = 1 if config.sort_ascending else -1

    def rank(example: str) -> tuple[float, str]:
        total, count = state.reward_sums[example]
        return (sign * total / count, example)

    waiting = sorted((e for e in state.reward_sums if e not in state.included_groups), key=rank)
    state.included_groups |= set(waiting[: max(0, size - len(state.included_groups))])


def subsample(examples: Sequence[str], share: float, epoch: int, seed: int) -> list[str]:
    """A random `share` of the examples (at least one, if any), the same for the same seed and epoch."""
    if not examples:
        return []
    digest = hashlib.blake2b(f"{seed}|subsample|{epoch}".encode(), digest_size=8).digest()
    size = max(1, round(share * len(examples)))
    return random.Random(int.from_bytes(digest, "big")).sample(sorted(examples), size)
