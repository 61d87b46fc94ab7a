"""The curriculum applied to an epoch's groups, for every trainer, and the state file from which it goes on."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from insitu.algorithms.curriculum import CurriculumState, select
from insitu.errors import ConfigError, TrajectoryError
from insitu.schemas.finetuning import CurriculumLearningConfig, Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)

_ID_KEYS = ("row_id", "example_id", "id")


def apply_curriculum(
    collection: TrajectoryCollection,
    config: CurriculumLearningConfig,
    state: dict[str, Any],
    epoch: int,
    seed: int = 0,
) -> TrajectoryCollection:
    """The part of the collection that `epoch` (1 first) trains on; what is left out is counted in `dropped`.

    `state` is a trainer's `_curriculum_state`, brought up to date: call this once for each epoch. Which example a group
    belongs to stands in the metadata of its trajectories under `row_id`, `example_id` or `id`; TrajectoryError without.
    """
    if not config.enabled:
        return collection
    if epoch < 1:
        raise TrajectoryError(f"the curriculum is asked for epoch {epoch}; the first epoch is 1")
    examples = examples_of(collection)
    groups = {e: group for e, group in zip(examples, collection.trajectories, strict=True) if group}
    known = CurriculumState.model_validate(state)
    left_out = select(config, known, epoch, {e: [t.reward for t in group] for e, group in groups.items()}, seed)
    state.update(known)
    kept = without(collection, {i: str(left_out[e]) for i, e in enumerate(examples) if e in left_out})
    logger.log(
        logging.INFO if kept.trajectories else logging.WARNING,
        "epoch %d: the curriculum trains on %d of %d groups (%.0f %%: %d of %d examples); groups left out: %s",
        epoch,
        len(kept.trajectories),
        len(examples),
        100 * known.current_percentile,
        len(known.included_groups),
        known.total_groups,
        ", ".join(f"{n} {reason}" for reason, n in sorted(Counter(map(str, left_out.values())).items())) or "none",
    )
    return kept


def examples_of(collection: TrajectoryCollection) -> list[str]:
    """The example id of each group; TrajectoryError for a group that has none, or that of another group."""
    seen: dict[str, int] = {}
    for place, group in enumerate(collection.trajectories):
        example = _example_of(group) if group else f"(empty group {place})"
        if example is None:
            raise TrajectoryError(
                f"group {place} does not say which example it belongs to: the metadata of its trajectories needs "
                f"one of {', '.join(_ID_KEYS)}"
            )
        if example in seen:
            raise TrajectoryError(f"groups {seen[example]} and {place} are both of example {example!r}: one group each")
        seen[example] = place
    return list(seen)


def _example_of(group: Sequence[Trajectory]) -> str | None:
    metadata = group[0].metadata or {}
    return next((str(metadata[key]) for key in _ID_KEYS if metadata.get(key) is not None), None)


def mark_dropped(trajectory: Trajectory, reason: str) -> None:
    """Say in a trajectory's metadata why it is left out of training."""
    trajectory.metadata = {**(trajectory.metadata or {}), "dropped": reason}


def without(collection: TrajectoryCollection, reasons: Mapping[int, str]) -> TrajectoryCollection:
    """The collection less the groups at the places in `reasons`, whose episodes are marked and counted as dropped."""
    dropped = Counter(collection.dropped)
    for place, reason in reasons.items():
        dropped[reason] += len(collection.trajectories[place])
        for trajectory in collection.trajectories[place]:
            mark_dropped(trajectory, reason)
    kept = [group for place, group in enumerate(collection.trajectories) if place not in reasons]
    return collection.model_copy(update={"trajectories": kept, "dropped": dict(dropped)})


def read_curriculum_state(path: Path, key: str) -> dict[str, Any]:
    """The state in which an earlier run left the curriculum (its `curriculum_state.json`), as a trainer keeps it.

    `key` is where the path stands in the configuration; ConfigError names it if the file cannot be used.
    """
    try:
        state = CurriculumState.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{key}: {path} is no state of a curriculum: {place and place + ': '}{first['msg']}"
        ) from None
    ranked, included = len(state.reward_sums), len(state.included_groups & state.reward_sums.keys())
    if state.epoch < 1 or state.total_groups != ranked or len(state.included_groups) not in range(1, included + 1):
        raise ConfigError(
            f"{key}: {path} holds no curriculum to go on with: epoch {state.epoch}, {state.total_groups} examples, "
            f"{ranked} of them ranked, {len(state.included_groups)} included, {included} of these ranked"
        )
    return dict(state)
