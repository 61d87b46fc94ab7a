"""What a run needs to continue after its process has ended.

progress.json             the state after the last complete epoch, replaced after each: where a run continues
progress_history.jsonl    a line per epoch with what is known of the earlier ones only then: where a fork can begin
journal.jsonl             the finished episodes of the epoch in progress, which are not run again

Lines of the other files that were written after that point are removed when the run continues, and written again.
"""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError

from insitu.algorithms.curriculum import CurriculumState
from insitu.disk.files import numbered_records, read_line, whole_lines
from insitu.errors import ConfigError, InsituError
from insitu.runs.files import JOURNAL, PROGRESS, PROGRESS_HISTORY
from insitu.runs.records import call_records, episode_record, restore_calls, restore_episode
from insitu.schemas.episodes import FORMAT_VERSION, Episode, StepLog
from insitu.schemas.finetuning import TrainingJobStatus
from insitu.schemas.steps import IntermediateStep, IntermediateStepType

Phase = Literal["collected", "submitted"]
RunStatus = Literal["running", "completed", "interrupted", "failed", "forked"]


def new_run_id() -> str:
    return f"insitu_run_{uuid.uuid4().hex[:8]}"


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
    submitted_epoch: int = 0
    """The epoch whose job may have been submitted; its job and episodes are recorded once `epoch` is as high."""
    phase: Phase | None = None
    """How far a run with a single job is. None: it is collecting, or it has a job per epoch."""
    sizes: dict[str, int] = {}


class EpochState(BaseModel):
    """A line of `progress_history.jsonl`: the state after an epoch, as in `progress.json`.

    `jobs` is the number of its jobs so far. With its rewards, they are the first of those in `progress.json`.
    """

    epoch: int
    policy_version: int | None
    warmed_up: bool
    curriculum: CurriculumState | None
    jobs: int
    sizes: dict[str, int]

    @classmethod
    def of(cls, progress: RunProgress) -> "EpochState":
        sizes = {name: size for name, size in progress.sizes.items() if name != PROGRESS_HISTORY}
        fields = progress.model_dump(include=cls.model_fields.keys() - {"jobs", "sizes"})
        return cls(**fields, jobs=len(progress.jobs), sizes=sizes)

    def restore(self, progress: RunProgress) -> RunProgress:
        """The progress as it was after this epoch."""
        return progress.model_copy(
            update={
                **{name: getattr(self, name) for name in EpochState.model_fields},
                "rewards": [rewards for rewards in progress.rewards if rewards["epoch"] <= self.epoch],
                "jobs": progress.jobs[: self.jobs],
            }
        )


def read_history(folder: Path, progress: RunProgress) -> dict[int, EpochState]:
    """The state after each complete epoch, from 0, as far as it was recorded; that after the last one always is.

    Raises InsituError if the file is damaged.
    """
    path, end = folder / PROGRESS_HISTORY, progress.sizes.get(PROGRESS_HISTORY, 0)
    states: dict[int, EpochState] = {}
    position = 0
    for number, line in whole_lines(path) if path.is_file() else ():
        if (position := position + len(line)) > end:  # of an epoch that is being completed
            break
        record = read_line(path, number, line)
        if "format" in record:
            continue
        try:
            state = EpochState.model_validate(record)
        except ValidationError as error:
            raise InsituError(f"{path}, line {number} is not the state of an epoch: {_first_problem(error)}") from None
        states[state.epoch] = state  # a warm-up comes after the first line of epoch 0
    return states | {progress.epoch: EpochState.of(progress)}


def read_progress(folder: Path) -> RunProgress | None:
    """None if no run in the folder has begun. Raises ConfigError if the file cannot be used."""
    path = folder / PROGRESS
    if not path.is_file():
        return None
    try:
        progress = RunProgress.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{path} is not the progress of a run: {_first_problem(error)}") from None
    if progress.format != FORMAT_VERSION:
        raise ConfigError(f"{path} has format {progress.format}; supported: {FORMAT_VERSION}")
    return progress


def journal_record(episode: Episode) -> dict[str, Any]:
    """A finished episode whose group may be incomplete: with the steps that its group may need."""
    steps = [step for step in episode.steps.reported() if step.event_type is IntermediateStepType.TTC_END]
    return {
        "episode": episode_record(episode),
        "calls": call_records(episode.key.text(), episode.calls),
        "steps": [step.model_dump(mode="json") for step in steps],
        "abandoned_attempts": episode.abandoned_attempts,
    }


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field and field + ': '}{first['msg']}"


class JournalSize(NamedTuple):
    """The epoch that the episodes of a journal belong to, and their number."""

    epoch: int
    episodes: int


def journal_size(folder: Path) -> JournalSize | None:
    """Reads only the first episode, which belongs to the same epoch as the others; None if there is no episode."""
    path = folder / JOURNAL
    first: dict[str, Any] | None = None
    count = 0
    for number, line in whole_lines(path) if path.is_file() else ():
        if number == 2:
            first = read_line(path, number, line)
        count += number > 1
    return JournalSize(first.get("episode", {}).get("epoch"), count) if first is not None else None


def read_journal(folder: Path, epoch: int) -> list[Episode]:
    """The finished episodes of an epoch."""
    records = (record for _, record in numbered_records(folder / JOURNAL))
    return [_restore(record) for record in records if record.get("episode", {}).get("epoch") == epoch]


def _restore(record: Mapping[str, Any]) -> Episode:
    episode = restore_episode(record["episode"], restore_calls(record["calls"]))
    episode.steps = StepLog(IntermediateStep.model_validate(step) for step in record["steps"])
    episode.abandoned_attempts = record["abandoned_attempts"]
    return episode
