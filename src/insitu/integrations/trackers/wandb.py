"""Weights & Biases, configured by WANDB_PROJECT, WANDB_MODE and its other variables."""

import os
import secrets
from typing import Any

from insitu.training.trackers import PROJECT, Step, TrackedRun, Tracker


class WandB(Tracker):
    package = extra = "wandb"

    @classmethod
    def server(cls) -> str | None:
        is_online = os.environ.get("WANDB_MODE", "online") == "online"
        return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai") if is_online else None

    def start(self, run: TrackedRun, continued: str | None) -> str:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=continued or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
            resume="allow",
            config=run.settings,
            dir=str(run.folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        return str(self._run.id)

    def log(self, step: Step) -> None:
        import wandb

        tables = {
            name: wandb.Table(columns=[*table.columns], data=[[*row] for row in table.rows])
            for name, table in step.tables.items()
        }
        self._run.log({**step.metrics, **tables}, step=step.epoch)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=int(status != "completed"))
