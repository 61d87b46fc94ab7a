"""Trackio, configured by TRACKIO_DIR, TRACKIO_PROJECT and its other variables."""

import os
from typing import Any

from insitu.training.trackers import PROJECT, Step, TrackedRun, Tracker


class Trackio(Tracker):
    package = extra = "trackio"

    @classmethod
    def server(cls) -> str | None:
        if os.environ.get("TRACKIO_SPACE_ID"):
            return "https://huggingface.co"
        return os.environ.get("TRACKIO_SERVER_URL")

    def start(self, run: TrackedRun, continued: str | None) -> str:
        import trackio

        name = continued or f"{run.name}-{run.run_id}"
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run: Any = trackio.init(project=project, name=name, config=run.settings, resume="allow")
        return name

    def log(self, step: Step) -> None:
        import trackio
        from pandas import DataFrame

        tables = {
            name: trackio.Table(dataframe=DataFrame(table.rows, columns=[*table.columns]))
            for name, table in step.tables.items()
        }
        self._run.log({**step.metrics, **tables}, step=step.epoch)

    def finish(self, status: str) -> None:
        self._run.finish()
