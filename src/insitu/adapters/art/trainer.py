"""The trainer of the ART plugin: the built-in loop, which leaves weighing the trajectories to the ART server."""

import uuid
from typing import Any

from insitu.adapters.art.config import ARTTrainerConfig
from insitu.adapters.art.conversion import check_order
from insitu.registry import Builder
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import Trajectory
from insitu.training.loop import InsituTrainer, InsituTrainerConfig


class ARTTrainer(InsituTrainer):
    """Collects, filters, submits, waits and records each epoch; validates before, between and after.

    Groups without a difference in reward teach nothing, and dialogues that ART cannot train are left out; both are
    counted.
    """

    def __init__(self, trainer_config: ARTTrainerConfig, builder: Builder) -> None:
        super().__init__(InsituTrainerConfig(), builder)
        self.trainer_config = trainer_config
        self.run_id = f"art_run_{uuid.uuid4().hex[:8]}"

    def _unfit(self, trajectory: Trajectory) -> DropReason | None:
        try:
            check_order(trajectory.episode, trajectory.id)
        except ValueError:
            return DropReason.EPISODE_ORDER
        return None

    def _prepare(self, group: list[Trajectory]) -> DropReason | None:
        return DropReason.NO_VARIANCE if len({t.reward for t in group}) < 2 else None

    def _conventions(self) -> dict[str, Any]:
        return {"advantages": "the ART server's"}
