"""The trainer of the ART plugin: the built-in loop, with advantages computed by the ART server."""

import uuid
from collections.abc import Sequence
from typing import Any

from insitu.adapters.art.config import ARTTrainerConfig
from insitu.adapters.art.conversion import check_order
from insitu.advantages.credit import CallAdvantages
from insitu.advantages.estimator import AdvantageEstimator, estimated_by_backend
from insitu.builder import Builder
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import Trajectory
from insitu.training.loop import InsituTrainer, InsituTrainerConfig


class ARTTrainer(InsituTrainer):
    """Collects, filters, submits, waits and records each epoch; validates before, between and after.

    Groups without variance and conversations that ART cannot train are dropped and counted.
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
