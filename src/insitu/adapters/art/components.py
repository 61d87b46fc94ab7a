"""The trajectory builder and the trainer of the ART plugin, and the registration of its three components."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from insitu.adapters.art.config import ARTTrainerAdapterConfig, ARTTrainerConfig, ARTTrajectoryBuilderConfig, load_art
from insitu.adapters.art.conversion import check_order
from insitu.adapters.art.trainer_adapter import ARTTrainerAdapter
from insitu.advantages.credit import CallAdvantages
from insitu.advantages.estimator import AdvantageEstimator, estimated_by_backend
from insitu.builder import Builder
from insitu.registry import register_trainer, register_trainer_adapter, register_trajectory_builder
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import Trajectory
from insitu.training.loop import InsituTrainer, InsituTrainerConfig
from insitu.trajectories.builder import EpisodesBuilder


class ARTTrajectoryBuilder(EpisodesBuilder):
    """Runs the workflow `num_generations` times per row and groups the episodes by row.

    All generations of a run share one task and one concurrency limit.
    """

    needs_token_ids = False  # ART servers render prompts themselves and get the sampled tokens from the logprobs

    @property
    def evaluation_runs(self) -> dict[str, list[asyncio.Task[Any]]]:
        """The collecting task of each run that was started and not finalized."""
        return {run_id: [c.task] for run_id, c in self._runs.items() if c.task is not None}


class ARTTrainer(InsituTrainer):
    """The built-in training loop, with advantages computed by the ART server.

    Groups without reward variance and conversations that ART cannot train are dropped and counted.
    """

    computes_advantages = False

    def __init__(self, trainer_config: ARTTrainerConfig, builder: Builder) -> None:
        super().__init__(InsituTrainerConfig(), builder)
        self.trainer_config = trainer_config
        self.run_id = f"art_run_{uuid.uuid4().hex[:8]}"

    def _estimator(self) -> AdvantageEstimator:
        return _ServerEstimator()


class _ServerEstimator:
    """Drops what the ART server cannot train; it computes the advantages of the rest."""

    def settings(self) -> dict[str, Any]:
        return {"advantages": "the ART server's"}

    def drop_reason(self, trajectory: Trajectory) -> DropReason | None:
        try:
            check_order(trajectory.episode, trajectory.id)
        except ValueError:
            return DropReason.EPISODE_ORDER
        return None

    def estimate(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        return estimated_by_backend(group)


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
async def art_trajectory_builder(
    config: ARTTrajectoryBuilderConfig, builder: Builder
) -> AsyncIterator[ARTTrajectoryBuilder]:
    trajectory_builder = ARTTrajectoryBuilder(config, builder)
    try:
        yield trajectory_builder
    finally:
        await trajectory_builder.stop()


@register_trainer_adapter(config_type=ARTTrainerAdapterConfig)
async def art_trainer_adapter(config: ARTTrainerAdapterConfig, builder: Builder) -> AsyncIterator[ARTTrainerAdapter]:
    await asyncio.to_thread(load_art)  # takes seconds; keeps the event loop free
    adapter = ARTTrainerAdapter(config)
    try:
        yield adapter
    finally:
        await adapter.close()


@register_trainer(config_type=ARTTrainerConfig)
async def art_trainer(config: ARTTrainerConfig, builder: Builder) -> AsyncIterator[ARTTrainer]:
    yield ARTTrainer(config, builder)
