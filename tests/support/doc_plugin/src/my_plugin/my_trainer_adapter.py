"""Posts trajectories to a training service and follows the job there."""

import asyncio
import logging
import math
import time
from typing import Any

import httpx
from nat.data_models.finetuning import (
    EpisodeItem,
    EpisodeItemRole,
    FinetuneConfig,
    TrainerAdapterConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from pydantic import BaseModel, Field

logger = logging.getLogger(__name__)

BACKEND = "my-backend"
ENDED = (TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)


class MyBackendConfig(BaseModel):
    """Configuration for the training backend."""

    endpoint: str = Field(description="Training API endpoint URL")
    api_key: str = Field(description="API key for authentication")
    timeout: int = Field(default=3600, description="Request timeout in seconds")
    learning_rate: float = Field(default=1e-5, description="Learning rate")
    batch_size: int = Field(default=4, description="Training batch size")
    gradient_accumulation_steps: int = Field(default=4, description="Gradient accumulation")


class MyTrainerAdapterConfig(TrainerAdapterConfig, name="my_trainer_adapter"):
    """Configuration for my trainer adapter."""

    backend: MyBackendConfig = Field(description="Backend configuration")
    validate_trajectories: bool = Field(default=True, description="Whether to validate trajectories before submission")


class MyTrainerAdapter(TrainerAdapter):
    def __init__(self, adapter_config: MyTrainerAdapterConfig):
        super().__init__(adapter_config)
        self.client: httpx.AsyncClient | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        backend = self.adapter_config.backend
        self.client = httpx.AsyncClient(
            base_url=backend.endpoint, headers={"Authorization": f"Bearer {backend.api_key}"}, timeout=backend.timeout
        )

    async def is_healthy(self) -> bool:
        try:
            return (await self.client.get("/health")).is_success
        except httpx.TransportError as error:
            logger.error("The training service cannot be reached: %s", error)
            return False

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        if self.adapter_config.validate_trajectories:
            for group in trajectories.trajectories:
                for trajectory in group:
                    validate(trajectory)
        response = await self.client.post("/jobs", json=self._job(trajectories))
        response.raise_for_status()
        return TrainingJobRef(
            run_id=trajectories.run_id, backend=BACKEND, metadata={"job_id": response.json()["job_id"]}
        )

    def _job(self, collection: TrajectoryCollection) -> dict[str, Any]:
        backend = self.adapter_config.backend
        return {
            "run_id": collection.run_id,
            "learning_rate": backend.learning_rate,
            "batch_size": backend.batch_size,
            "gradient_accumulation_steps": backend.gradient_accumulation_steps,
            "groups": [
                {
                    "example_id": group[0].metadata["example_id"],
                    "episodes": [{"messages": [wire(i) for i in t.episode], "reward": t.reward} for t in group],
                }
                for group in collection.trajectories
            ],
        }

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        response = await self.client.get(f"/jobs/{ref.metadata['job_id']}")
        response.raise_for_status()
        state = response.json()
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend=ref.backend,
            status=TrainingStatusEnum(state["status"]),
            progress=state["progress"],
            message=state.get("message"),
            metadata=state.get("metrics"),
        )

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        deadline = time.monotonic() + self.adapter_config.backend.timeout
        while (status := await self.status(ref)).status not in ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {ref.metadata['job_id']} is {status.status} after the configured timeout")
            await asyncio.sleep(poll_interval)
        return status

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("job %s: %s", ref.metadata["job_id"], metrics)


def validate(trajectory: Trajectory) -> None:
    """Raise ValueError for what the service could not train on."""
    sampled = [item for item in trajectory.episode if item.role is EpisodeItemRole.ASSISTANT]
    if not sampled or not all(item.logprobs for item in sampled):
        raise ValueError(f"trajectory {trajectory.metadata} has no answer, or one without logprobs")
    if not math.isfinite(trajectory.reward):
        raise ValueError(f"trajectory {trajectory.metadata} has the reward {trajectory.reward}")


def wire(item: EpisodeItem) -> dict[str, Any]:
    return {"role": item.role.value, "content": item.content, "logprobs": item.logprobs, **(item.metadata or {})}
