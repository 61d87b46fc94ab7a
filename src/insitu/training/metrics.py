"""The numbers of one epoch: a line of `training_metrics.jsonl`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from insitu.schemas.finetuning import TrainingStatusEnum


@dataclass(frozen=True)
class EpochResult:
    """Results of one epoch; `metrics()` returns its line of `training_metrics.jsonl`.

    `collected` holds the statistics of all collected trajectories, `trained` those of what was submitted, `backend` the
    metrics of the training job. `policy_version` is the version sampled from and, once the job has completed, the
    version it produced. `job` is its final status; None until it ends, or if nothing was submitted. `seconds` has the
    keys collect, train and validate.
    """

    collected: Mapping[str, Any]
    trained: Mapping[str, Any]
    dropped: Mapping[str, int]
    policy_version: int | None
    seconds: Mapping[str, float]
    job: TrainingStatusEnum | None = None
    backend: Mapping[str, Any] | None = None

    def with_seconds(self, phase: str, seconds: float) -> "EpochResult":
        return replace(self, seconds={**self.seconds, phase: seconds})

    def metrics(self) -> dict[str, Any]:
        return {
            **self.collected,
            **self.trained,
            "dropped": dict(sorted(self.dropped.items())),
            "policy_version": self.policy_version,
            "job": self.job and self.job.value,
            "seconds": dict(self.seconds),
            **(self.backend or {}),
        }
