"""What a Customizer run needs to continue after its process was killed: its pairs, and the state of its job."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from insitu.disk.files import numbered_records
from insitu.errors import ConfigError
from insitu.runs.files import SUBMISSION
from insitu.runs.store import OUTPUT_DIR
from insitu.schemas.episodes import FORMAT_VERSION
from insitu.schemas.finetuning import TrainingJobRef, TrainingStatusEnum, Trajectory, TrajectoryCollection


class Submission(BaseModel):
    """`submission.json`: what a run has collected, and the job that trains on it.

    `phase`: `collected` until the service has accepted the job, `submitted` until the job is known to have ended.
    """

    format: int = FORMAT_VERSION
    run_id: str
    phase: Literal["collected", "submitted", "ended"] = "collected"
    settings: dict[str, Any]
    pairs: dict[str, int]
    """How many were collected and trained."""
    dropped: dict[str, int] = {}
    """What was not trained, by reason."""
    job: TrainingJobRef | None = None
    status: TrainingStatusEnum | None = None

    @property
    def is_completed(self) -> bool:
        return self.phase == "ended" and self.status is TrainingStatusEnum.COMPLETED


def read_submission(folder: Path) -> Submission | None:
    """The submission of the run in `folder`; None if that has not collected all its pairs."""
    path = folder / SUBMISSION
    if not path.is_file():
        return None
    try:
        return Submission.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{OUTPUT_DIR}: {path} is not the state of a submission: {problem}") from None


def pair_records(collection: TrajectoryCollection) -> list[dict[str, Any]]:
    """The lines of `pairs.jsonl`."""
    kept = {"episode", "reward", "metadata", "id"}
    return [
        {"group": number, **trajectory.model_dump(mode="json", include=kept)}
        for number, group in enumerate(collection.trajectories)
        for trajectory in group
    ]


def read_pairs(path: Path, run_id: str) -> TrajectoryCollection:
    """The pairs of `pairs.jsonl`, in the groups in which they were collected."""
    groups: dict[int, list[Trajectory]] = {}
    for _, record in numbered_records(path):
        groups.setdefault(record["group"], []).append(Trajectory.model_validate(record))
    return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id, epoch=1)
