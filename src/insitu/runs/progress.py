"""The records from which a run continues after its process has ended.

`RunProgress` is the state after the last complete epoch: where a run continues. `EpochState` is what is known of the
earlier epochs only after them: where a fork can begin. The journal has the finished episodes of the epoch in progress,
which are not run again. Lines of the other files that were written after that point are removed when the run
continues, and written again.
"""

import uuid
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from insitu.algorithms.curriculum import CurriculumState
from insitu.runs.files import PROGRESS_HISTORY
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


def journal_record(episode: Episode) -> dict[str, Any]:
    """A finished episode whose group may be incomplete: with the steps that its group may need."""
    steps = [step for step in episode.steps.reported() if step.event_type is IntermediateStepType.TTC_END]
    return {
        "episode": episode_record(episode),
        "calls": call_records(episode.key.text(), episode.calls),
        "steps": [step.model_dump(mode="json") for step in steps],
        "abandoned_attempts": episode.abandoned_attempts,
    }


def first_problem(error: ValidationError) -> str:
    """The first of what is wrong with a record, in words."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field and field + ': '}{first['msg']}"


def restore_journaled(record: Mapping[str, Any]) -> Episode:
    """The inverse of `journal_record`."""
    episode = restore_episode(record["episode"], restore_calls(record["calls"]))
    episode.steps = StepLog(IntermediateStep.model_validate(step) for step in record["steps"])
    episode.abandoned_attempts = record["abandoned_attempts"]
    return episode
