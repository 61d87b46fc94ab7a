"""Runs the epochs: gather, choose by the curriculum, submit, wait, validate, record."""

import asyncio
import json
import logging
import uuid
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from nat.data_models.finetuning import (
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from nat.finetuning.interfaces.finetuning_runner import Trainer
from pydantic import Field

from insitu.plugin_api import apply_curriculum  # the one thing that the guide leaves to the reader

logger = logging.getLogger(__name__)


class MyTrainerConfig(TrainerConfig, name="my_trainer"):
    """Configuration for my trainer."""

    poll_interval: float = Field(default=0.01, gt=0, description="Seconds between two looks at a job")


class MyTrainer(Trainer):
    def __init__(self, trainer_config: MyTrainerConfig, **kwargs):
        super().__init__(trainer_config, **kwargs)
        self.pending_tasks: dict[str, asyncio.Task[TrainingJobStatus]] = {}
        self.metrics: dict[str, list[dict[str, Any]]] = {}

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        run_id = f"my_run_{uuid.uuid4().hex[:8]}"
        if not await self.trainer_adapter.is_healthy():
            raise ConnectionError("the training service is not healthy")
        statuses = []
        for epoch in range(1, num_epochs + 1):
            ref = await self.run_epoch(epoch, run_id)
            metrics = self.metrics[run_id][-1]
            if ref is not None:
                status = await self._wait(ref)
                statuses.append(status)
                metrics |= {"job": status.status.value, **(status.metadata or {})}
            metrics["validation"] = await self._validate(epoch, run_id)
            self.log_progress(epoch, metrics, str(self.run_config.output_dir))
            if ref is not None and status.status is not TrainingStatusEnum.COMPLETED:
                break
        return statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        try:
            await self.trajectory_builder.start_run(run_id)
            gathered = await self.trajectory_builder.finalize(run_id)
            rewards = {g[0].metadata["example_id"]: [t.reward for t in g] for g in gathered.trajectories}
            if not rewards:
                raise ValueError(f"epoch {epoch} has gathered no trajectory")
            self.trajectory_builder.log_progress(run_id, {"groups": len(rewards)})
            chosen = self.apply_curriculum_learning(gathered, epoch)
            logger.info("Starting epoch %d with %d examples", epoch, len(chosen.trajectories))
            metrics = {"epoch": epoch, "rewards": rewards, "avg_reward": fmean(chain(*rewards.values()))}
            self.metrics.setdefault(run_id, []).append(metrics)
            return await self.trainer_adapter.submit(chosen) if chosen.trajectories else None
        except Exception:
            logger.exception("Error in epoch %d", epoch)
            raise

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        return apply_curriculum(trajectory_collection, self.curriculum_config, self._curriculum_state, epoch)

    async def _wait(self, ref: TrainingJobRef) -> TrainingJobStatus:
        waiting = self.trainer_adapter.wait_until_complete(ref, poll_interval=self.trainer_config.poll_interval)
        task = self.pending_tasks[ref.metadata["job_id"]] = asyncio.create_task(waiting)
        status = await task
        del self.pending_tasks[ref.metadata["job_id"]]
        self.trainer_adapter.log_progress(ref, status.metadata or {})
        return status

    async def _validate(self, epoch: int, run_id: str) -> dict[str, Any] | None:
        asked = self.run_config.run_configuration
        if asked is None or asked.validation_dataset is None or epoch % asked.validation_interval:
            return None
        return await self.run_validation_evaluation(epoch, run_id)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {"epochs": self.metrics[run_id]}

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        folder = Path(output_dir or self.run_config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "training_metrics.jsonl").open("a") as file:
            file.write(json.dumps({**metrics, "curriculum_state": self.get_curriculum_state()}) + "\n")

    async def cleanup(self) -> None:
        gathering = [task for tasks in self.trajectory_builder.evaluation_runs.values() for task in tasks]
        for task in [*self.pending_tasks.values(), *gathering]:
            if not task.done():
                task.cancel()
        if self.trainer_adapter.client is not None:
            await self.trainer_adapter.client.aclose()
        self.pending_tasks.clear()
