"""MLflow, configured by MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables."""

import os
import re
import time
from typing import Any

from insitu.training.trackers import PROJECT, Step, TrackedRun, Tracker

_MOST_PARAMS, _MOST_METRICS, _LONGEST = 100, 1000, 500
"""What MLflow takes at once, and characters of a parameter."""
_STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    package = extra = "mlflow"

    @classmethod
    def server(cls) -> str | None:
        url = os.environ.get("MLFLOW_TRACKING_URI", "")
        return url if url.startswith(("http://", "https://")) else None

    def start(self, run: TrackedRun, continued: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient()
        if continued is not None:
            self._id = continued
            self._client.update_run(continued, status="RUNNING")
            return continued
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        self._id = str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)
        params = [Param(_name(key), str(value)[:_LONGEST]) for key, value in run.settings.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])
        return self._id

    def log(self, step: Step) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, step.epoch) for name, value in step.metrics.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_METRICS])
        for name, table in step.tables.items():
            columns = {column: [row[index] for row in table.rows] for index, column in enumerate(table.columns)}
            self._client.log_table(self._id, columns, f"{name}/{step.epoch:06d}.json")

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._id, _STATUSES.get(status, "KILLED"))


def _name(name: str) -> str:
    """With the characters that MLflow allows."""
    return re.sub(r"[^\w\-./ ]", "_", name)
