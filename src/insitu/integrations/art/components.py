"""The trajectory builder and the trainer of the ART plugin, and the registration of its three components."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from typing import Any

from insitu.advantages.credit import CallAdvantages
from insitu.advantages.estimator import AdvantageEstimator, estimated_by_backend
from insitu.builder import Builder
from insitu.integrations.art.config import (
    ARTTrainerAdapterConfig,
    ARTTrainerConfig,
    ARTTrajectoryBuilderConfig,
    load_art,
)
from insitu.integrations.art.conversion import check_order
from insitu.integrations.art.trainer_adapter import ARTTrainerAdapter
from insitu.registry import register_trainer, register_trainer_adapter, register_trajectory_builder
from insitu.schemas.episodes import DropReason, Needs
from insitu.schemas.finetuning import Trajectory
from insitu.training.episodes_builder import EpisodesBuilder
from insitu.training.interfaces import GroupTrainer
from insitu.training.loop import LoopTrainer


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
class ARTTrajectoryBuilder(EpisodesBuilder):
    """Runs the workflow `num_generations` times per row and groups the episodes by row.

    One asyncio task collects all generations of a run, under one concurrency limit.
    """

    needs = Needs.LOGPROBS  # ART applies the chat template itself and recovers the sampled tokens from the logprobs


@register_trainer(config_type=ARTTrainerConfig)
class ARTTrainer(LoopTrainer, GroupTrainer):
    """The built-in training loop, except that the ART server computes the advantages.

    Groups whose rewards are all equal and conversations ART cannot train on are dropped and counted.
    """

    run_prefix = "art_run"

    @cached_property
    def _estimator(self) -> AdvantageEstimator:
        return _ServerEstimator()


class _ServerEstimator(AdvantageEstimator):
    """Drops trajectories the ART server cannot train on; the server computes the advantages of the rest."""

    def settings(self) -> dict[str, Any]:
        return {"advantages": "computed by the ART server"}

    def drop_reason(self, trajectory: Trajectory) -> DropReason | None:
        try:
            check_order(trajectory.episode, trajectory.id)
        except ValueError:
            return DropReason.EPISODE_ORDER
        return None

    def estimate(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        return estimated_by_backend(group)


@register_trainer_adapter(config_type=ARTTrainerAdapterConfig)
async def art_trainer_adapter(config: ARTTrainerAdapterConfig, builder: Builder) -> AsyncIterator[ARTTrainerAdapter]:
    await asyncio.to_thread(load_art)  # importing ART takes seconds: do it off the event loop
    adapter = ARTTrainerAdapter(config)
    try:
        yield adapter
    finally:
        await adapter.close()
