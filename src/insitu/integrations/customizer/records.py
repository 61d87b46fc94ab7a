"""Preference pairs as the records of a customization job, one JSON object a line.

{"prompt": "3 + 4 =", "chosen_response": "7", "rejected_response": "8"}                        training_type dpo
{"prompt": [{"role": "user", "content": "3 + 4 ="}], "chosen_response": ...}                   with the full history
{"prompt": "3 + 4 =", "completion": "7"}                                                       training_type sft
{"messages": [{"role": "user", ...}, {"role": "assistant", "content": "7"}]}                   with the full history
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from insitu.disk.json_files import dump_json
from insitu.errors import TrajectoryError
from insitu.preferences.selection import pair_item
from insitu.runs.files import PAIRS
from insitu.runs.reader import RunReader
from insitu.schemas.finetuning import DPOItem, Trajectory, TrajectoryCollection
from insitu.wire.json_values import has_lone_surrogate

_TURN_KEYS = ("row_id", "example_id", "generation", "turn_id")
"""Metadata that together name a turn, as far as they are given."""


class Split(NamedTuple):
    """The records of a job; those of one turn are all in the same part."""

    training: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    turns: int
    shortened_prompts: int
    """Prompts of several messages of which only the last is sent."""


def single_pairs(collection: TrajectoryCollection) -> TrajectoryCollection:
    """A copy in which every trajectory holds one pair. Raises TrajectoryError for one that holds something else."""
    groups = []
    for number, group in enumerate(collection.trajectories):
        pairs = []
        for trajectory in group:
            name = trajectory.id or f"a trajectory of group {number}"
            if not trajectory.episode:
                raise TrajectoryError(f"{name} holds no preference pair")
            for item in trajectory.episode:
                if not isinstance(item, DPOItem):
                    problem = f"{name} holds messages, not preference pairs"
                    raise TrajectoryError(f"{problem}: NeMo Customizer is trained on the pairs of dpo_traj_builder")
                if has_lone_surrogate("".join(_texts(item))):
                    row = (trajectory.metadata or {}).get("row_id")
                    of_row = "" if row is None else f" (row {row!r})"
                    raise TrajectoryError(f"{name}{of_row} has a lone surrogate in its text, which no file can hold")
                pairs.append(trajectory.model_copy(update={"episode": [item]}))
        groups.append(pairs)
    return collection.model_copy(update={"trajectories": groups})


def _texts(item: DPOItem) -> list[str]:
    prompt = [item.prompt] if isinstance(item.prompt, str) else [message.content for message in item.prompt]
    return [*prompt, item.chosen_response, item.rejected_response]


def split_records(
    collection: TrajectoryCollection, training_type: str, full_history: bool, validation_fraction: float, seed: int
) -> Split:
    """The records for training and for validation, divided by turn.

    Raises TrajectoryError if one of the two would be empty.
    """
    pairs = [trajectory for group in collection.trajectories for trajectory in group]
    if not pairs:
        raise TrajectoryError(f"run {collection.run_id}: there are no preference pairs to train on")
    turns = sorted({turn_of(trajectory) for trajectory in pairs})
    if len(turns) < 2:
        problem = f"all {len(pairs)} preference pairs are of one turn, so the validation records would be empty"
        raise TrajectoryError(f"run {collection.run_id}: {problem}; collect more rows, or more runs with num_runs")
    count = min(max(1, round(validation_fraction * len(turns))), len(turns) - 1)
    held_out = set(random.Random(f"{seed}|validation records").sample(turns, count))
    parts: tuple[list[Trajectory], list[Trajectory]] = ([], [])
    for trajectory in pairs:
        parts[turn_of(trajectory) in held_out].append(trajectory)
    training, validation = (_records(part, training_type, full_history) for part in parts)
    shortened = 0 if full_history else sum(_is_shortened(pair_item(trajectory)) for trajectory in pairs)
    return Split(training, validation, len(turns), shortened)


def turn_of(trajectory: Trajectory) -> str:
    """The name of the turn in which the candidates of a pair were sampled; the prompt, if the metadata has none."""
    metadata = trajectory.metadata or {}
    if metadata.get("turn_id") is None:
        return dump_json(pair_item(trajectory).model_dump()["prompt"]).decode()
    return "/".join(str(metadata[key]) for key in _TURN_KEYS if metadata.get(key) is not None)


def pair_records(collection: TrajectoryCollection) -> list[dict[str, Any]]:
    """The lines of `pairs.jsonl`."""
    return [
        {"group": number, **trajectory.model_dump(mode="json", include={"episode", "reward", "metadata", "id"})}
        for number, group in enumerate(collection.trajectories)
        for trajectory in group
    ]


def read_pairs(run: Path, run_id: str) -> TrajectoryCollection:
    """The pairs of `pairs.jsonl` in a run's directory, in the groups in which they were collected."""
    groups: dict[int, list[Trajectory]] = {}
    for record in RunReader(run).records(PAIRS):
        groups.setdefault(record["group"], []).append(Trajectory.model_validate(record))
    return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id, epoch=1)


def _records(pairs: Sequence[Trajectory], training_type: str, full_history: bool) -> list[dict[str, Any]]:
    records = [_record(pair_item(trajectory), training_type, full_history) for trajectory in pairs]
    if training_type == "dpo":
        return records
    return list({dump_json(record): record for record in records}.values())  # a response may be chosen repeatedly


def _record(item: DPOItem, training_type: str, full_history: bool) -> dict[str, Any]:
    prompt = _prompt(item, full_history)
    if training_type == "dpo":
        return {"prompt": prompt, **item.model_dump(include={"chosen_response", "rejected_response"})}
    if full_history:
        return {"messages": [*prompt, {"role": "assistant", "content": item.chosen_response}]}
    return {"prompt": prompt, "completion": item.chosen_response}


def _prompt(item: DPOItem, full_history: bool) -> Any:
    """The messages of a prompt, or the text of the last one."""
    if isinstance(item.prompt, str):
        return [{"role": "user", "content": item.prompt}] if full_history else item.prompt
    if full_history:
        return [message.model_dump(include={"role", "content"}) for message in item.prompt]
    return item.prompt[-1].content if item.prompt else ""


def _is_shortened(item: DPOItem) -> bool:
    return not isinstance(item.prompt, str) and len(item.prompt) > 1
