"""What a run needs to continue after its process has ended.

progress.json    the state after the last complete epoch, replaced after each: the point from which a run continues
journal.jsonl    the finished episodes of the epoch in progress, which are not run again

Lines of the other files that were written after that point are removed when the run continues, and written again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from insitu.algorithms.curriculum import CurriculumState
from insitu.errors import ConfigError
from insitu.files import read_line, whole_lines
from insitu.schemas.episodes import FORMAT_VERSION, Episode
from insitu.schemas.finetuning import TrainingJobStatus
from insitu.schemas.steps import IntermediateStep, IntermediateStepType
from insitu.trajectories.records import call_records, episode_record, restore_calls, restore_episode

PROGRESS = "progress.json"
JOURNAL = "journal.jsonl"

RunStatus = Literal["running", "completed", "interrupted", "failed"]


class RunProgress(BaseModel):
    """`progress.json`.

    `epoch` is the last complete one (0: none), `policy_version` the version served after it, `sizes` the bytes that
    each file of lines had then. A run whose process was killed is left as `running`.
    """

    format: int = FORMAT_VERSION
    run_id: str
    status: RunStatus = "running"
    error: str | None = None
    epoch: int = 0
    policy_version: int | None = None
    warmed_up: bool = False
    curriculum: CurriculumState | None = None
    epochs_before: int = 0
    """Epochs of the earlier run whose curriculum this one continues."""
    rewards: list[dict[str, Any]] = []
    jobs: list[TrainingJobStatus] = []
    """Of each epoch that trained."""
    sizes: dict[str, int] = {}


def read_progress(folder: Path) -> RunProgress | None:
    """None if no run in the folder has begun. Raises ConfigError if the file cannot be used."""
    path = folder / PROGRESS
    if not path.is_file():
        return None
    try:
        progress = RunProgress.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is not the progress of a run: {field and field + ': '}{first['msg']}") from None
    if progress.format != FORMAT_VERSION:
        raise ConfigError(f"{path} has format {progress.format}; supported: {FORMAT_VERSION}")
    return progress


def journal_record(episode: Episode) -> dict[str, Any]:
    """A finished episode whose group may be incomplete: with the steps that its group may need."""
    steps = [step for step in episode.steps if step.event_type is IntermediateStepType.TTC_END]
    return {
        "episode": episode_record(episode),
        "calls": call_records(episode.key.text(), episode.calls),
        "steps": [step.model_dump(mode="json") for step in steps],
        "abandoned_attempts": episode.abandoned_attempts,
    }


def read_journal(folder: Path, epoch: int) -> list[Episode]:
    """The finished episodes of an epoch."""
    path = folder / JOURNAL
    if not path.is_file():
        return []
    records = (read_line(path, number, line) for number, line in whole_lines(path))
    return [_restore(record) for record in records if record.get("episode", {}).get("epoch") == epoch]


def _restore(record: Mapping[str, Any]) -> Episode:
    episode = restore_episode(record["episode"], restore_calls(record["calls"]))
    episode.steps = [IntermediateStep.model_validate(step) for step in record["steps"]]
    episode.abandoned_attempts = record["abandoned_attempts"]
    return episode
