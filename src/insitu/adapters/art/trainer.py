"""The trainer of the ART plugin: the built-in loop, which leaves weighing the trajectories to the ART server."""

import uuid
from collections.abc import Sequence
from typing import Any

from insitu.adapters.art.config import ARTTrainerConfig
from insitu.adapters.art.conversion import check_order
from insitu.builder import Builder
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import Trajectory
from insitu.training.loop import InsituTrainer, InsituTrainerConfig
from insitu.training.weighing import CallAdvantages, Weigher, weighed_by_server


class ARTTrainer(InsituTrainer):
    """Collects, filters, submits, waits and records each epoch; validates before, between and after.

    Groups without a difference in reward teach nothing, and dialogues that ART cannot train are left out; both are
    counted.
    """

    computes_advantages = False

    def __init__(self, trainer_config: ARTTrainerConfig, builder: Builder) -> None:
        super().__init__(InsituTrainerConfig(), builder)
        self.trainer_config = trainer_config
        self.run_id = f"art_run_{uuid.uuid4().hex[:8]}"

    def _weigher(self) -> Weigher:
        return _ServersWeigher()


class _ServersWeigher:
    """Sees to it that the server can weigh what it is sent."""

    def conventions(self) -> dict[str, Any]:
        return {"advantages": "the ART server's"}

    def unfit(self, trajectory: Trajectory) -> DropReason | None:
        try:
            check_order(trajectory.episode, trajectory.id)
        except ValueError:
            return DropReason.EPISODE_ORDER
        return None

    def weigh(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        return weighed_by_server(group)
