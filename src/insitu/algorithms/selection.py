"""Selection of groups and episodes before training, and curriculum learning; every drop has a reason.

A selection gets the groups of an epoch. It returns for each group None (keep it), the reason why it is dropped, or a
list with such an entry for each episode. A selection with metrics returns that and a mapping of numbers by name.

The curriculum starts with the easiest (or hardest) fraction of the examples and expands it at fixed intervals; then it
drops groups with too small a range of rewards, and subsamples the rest if configured.
"""

import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from insitu.errors import TrajectoryError, a_type, foreign_errors
from insitu.schemas.episodes import GROUP_KEY, DropReason
from insitu.schemas.finetuning import CurriculumLearningConfig, Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)

Groups = Sequence[Sequence[Trajectory]]


def no_variance(groups: Groups, min_reward_diff: Annotated[float, Field(ge=0)] = 1e-9) -> list[str | None]:
    """Drops groups whose best and worst reward differ by less than `min_reward_diff`."""
    small = (has_small_range([t.reward for t in group], min_reward_diff) for group in groups)
    return [DropReason.NO_VARIANCE if is_small else None for is_small in small]


def has_small_range(rewards: Sequence[float], min_reward_diff: float) -> bool:
    # rounded because of float error: 0.3 - 0.2 is not below 0.1
    return round(max(rewards) - min(rewards), 9) < min_reward_diff


def random_subsample(
    groups: Groups, fraction: Annotated[float, Field(gt=0, le=1)], epoch: int, seed: int
) -> list[str | None]:
    """Keeps a random fraction of the groups, at least one, which depends on epoch and seed only."""
    names = [f"{index:09d}" for index in range(len(groups))]
    kept = {*subsample(names, fraction, epoch, seed)}
    return [None if name in kept else DropReason.SUBSAMPLE for name in names]


def apply_selection(
    collection: TrajectoryCollection, select: Callable[[Groups], Any], name: str
) -> tuple[TrajectoryCollection, Mapping[str, Any]]:
    """The collection without what a selection drops, and the metrics of the selection.

    Raises TrajectoryError naming the selection if it fails, or returns something else than a verdict for each group.
    """
    groups = collection.trajectories
    reasons: dict[int, str] = {}  # by id(): the trajectories of a plugin may have no name
    with foreign_errors(TrajectoryError, name):
        result = select(groups)
        verdicts, metrics = result if isinstance(result, tuple) else (result, {})
        for number, (group, verdict) in enumerate(_of_each(groups, verdicts, name)):
            whole = isinstance(verdict, str) or not isinstance(verdict, Iterable)
            of_group = [verdict] * len(group) if whole else verdict
            for trajectory, reason in _of_each(group, of_group, f"{name}, group {number}"):
                if reason is not None:
                    reasons[id(trajectory)] = _reason(reason, f"{name}, group {number}")
    return collection.without(reasons), metrics


def _reason(verdict: Any, where: str) -> str:
    if not isinstance(verdict, str):
        allowed = "None to keep, or a text, the reason to drop"
        raise TrajectoryError(f"{where}: a verdict is {a_type(verdict)}; allowed: {allowed}")
    return verdict


def _of_each(items: Sequence[Any], verdicts: Any, where: str) -> Iterator[tuple[Any, Any]]:
    if not isinstance(verdicts, Iterable) or isinstance(verdicts, str):
        raise TrajectoryError(f"{where}: {a_type(verdicts)} was returned; allowed: a list of {len(items)} verdicts")
    entries = [*verdicts]
    if len(entries) != len(items):
        raise TrajectoryError(f"{where}: {len(entries)} verdicts were returned for {len(items)}")
    return zip(items, entries, strict=True)


def subsample(examples: Sequence[str], fraction: float, epoch: int, seed: int) -> list[str]:
    """A random fraction of the examples (at least one, unless empty), deterministic given seed and epoch."""
    if not examples:
        return []
    digest = hashlib.blake2b(f"{seed}|subsample|{epoch}".encode(), digest_size=8).digest()
    size = max(1, round(fraction * len(examples)))
    return random.Random(int.from_bytes(digest, "big")).sample(sorted(examples), size)


_ID_KEYS = (GROUP_KEY, "row_id", "example_id", "id")


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
    included_groups: Annotated[set[str], PlainSerializer(sorted, list[str], "json")] = Field(default_factory=set)
    epoch: int = Field(default=0, ge=0)
    reward_sums: dict[str, tuple[float, Annotated[int, Field(ge=1)]]] = Field(default_factory=dict)


def apply_curriculum(
    collection: TrajectoryCollection, config: CurriculumLearningConfig, state: dict[str, Any], epoch: int, seed: int = 0
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
    groups = dict(zip(examples, collection.trajectories, strict=True))
    rewards = {example: [t.reward for t in group] for example, group in groups.items() if group}
    curriculum = CurriculumState.model_validate(state)
    dropped = drop_reasons(config, curriculum, epoch, rewards, seed)
    state.update(curriculum)
    kept = collection.without({id(t): reason for e, reason in dropped.items() for t in groups[e]})
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
            required = f"the metadata of its trajectories must contain one of {', '.join(_ID_KEYS[1:])}"
            raise TrajectoryError(f"group {index} has no example id: {required}")
        if example in seen:
            problem = f"groups {seen[example]} and {index} both belong to example {example!r}"
            raise TrajectoryError(f"{problem}: one group each")
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
