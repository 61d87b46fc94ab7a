"""TensorBoard: event files in `trackers/tensorboard/` of the run directory."""

import time

from insitu.training.trackers import Step, Table, TrackedRun, Tracker

_MAIN = "validation/score"
"""The metric of the hyperparameter table."""


class TensorBoard(Tracker):
    package, extra = "tensorboardX", "tensorboard"

    def start(self, run: TrackedRun, continued: str | None) -> str:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        folder = run.folder / "tensorboard"
        # Its own names count in seconds: a run continued within one would overwrite the file before.
        self._writer = SummaryWriter(str(folder), filename_suffix=f".{time.time_ns()}")
        if continued is None:
            numbers = {key: value for key, value in run.settings.items() if isinstance(value, int | float)}
            texts = {key: str(value) for key, value in run.settings.items() if key not in numbers}
            for summary in hparams(numbers | texts, {_MAIN: 0}):
                self._writer.file_writer.add_summary(summary)
            rows = [(f"`{key}`", value) for key, value in run.settings.items()]
            self._writer.add_text("settings", _markdown(Table(("key", "value"), rows)), 0)
            self._writer.flush()
        return str(folder)

    def log(self, step: Step) -> None:
        for name, value in step.metrics.items():
            self._writer.add_scalar(name, value, step.epoch)
        for name, table in step.tables.items():
            self._writer.add_text(name, _markdown(table), step.epoch)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")
