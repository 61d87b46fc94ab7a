"""Trainers on preferences and on the best episodes; the loop is that of GRPO, what an epoch trains on differs."""

from collections.abc import AsyncIterator
from typing import Any

from insitu.advantages.estimator import EstimatedEpoch
from insitu.builder import Builder
from insitu.errors import ConfigError
from insitu.preferences.selection import best_episodes, distinct_pairs, labeled_episodes, sampled_pairs
from insitu.registry import register_trainer
from insitu.schemas.finetuning import FinetuneConfig, TrainerConfig, TrajectoryCollection
from insitu.training.checks import TrainingNeeds
from insitu.training.config import DPOTrainerConfig, InsituTrainerConfig, KTOTrainerConfig, SFTTrainerConfig
from insitu.training.loop import InsituTrainer


class SelectingTrainer(InsituTrainer):
    """Trains on a selection of what was collected, without advantages."""

    def __init__(self, trainer_config: TrainerConfig, builder: Builder | None = None, **kwargs: Any) -> None:
        super().__init__(InsituTrainerConfig(), builder, **kwargs)
        self.trainer_config = trainer_config

    async def initialize(self, run_config: FinetuneConfig) -> None:
        if run_config.curriculum_learning.enabled:
            raise ConfigError(
                f"finetuning.curriculum_learning.enabled is true, but {self.trainer_config.type} has no curriculum"
            )
        await super().initialize(run_config)

    def apply_curriculum_learning(self, collection: TrajectoryCollection, epoch: int) -> TrajectoryCollection:
        return collection

    def _selection_settings(self) -> dict[str, Any]:
        return self.trainer_config.model_dump(exclude={"type", "reward"})

    def select(self, collection: TrajectoryCollection) -> EstimatedEpoch:
        return EstimatedEpoch(self._selected(collection), [])

    def _selected(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        raise NotImplementedError


class InsituDPOTrainer(SelectingTrainer):
    """Trains preference pairs (Rafailov et al., arXiv:2305.18290)."""

    needs = TrainingNeeds("dpo", pairs=True, groups=False)
    trainer_config: DPOTrainerConfig

    def _selected(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        if self.trainer_config.deduplicate_pairs:
            collection = distinct_pairs(collection)
        if self.trainer_config.max_pairs is not None:
            collection = sampled_pairs(collection, self.trainer_config.max_pairs, self._full_config.general.seed)
        return collection


class InsituKTOTrainer(SelectingTrainer):
    """Trains desirable and undesirable episodes (Ethayarajh et al., arXiv:2402.01306)."""

    needs = TrainingNeeds("kto", groups=False)
    trainer_config: KTOTrainerConfig

    def _selected(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        return labeled_episodes(collection, self.trainer_config.desirable_above)


class InsituSFTTrainer(SelectingTrainer):
    """Trains the best episodes as if they were demonstrations."""

    needs = TrainingNeeds("sft", groups=False)
    trainer_config: SFTTrainerConfig

    def _selected(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        return best_episodes(collection, self.trainer_config.best_per_row, self.trainer_config.min_reward)


@register_trainer(config_type=DPOTrainerConfig)
async def dpo_trainer(config: DPOTrainerConfig, builder: Builder) -> AsyncIterator[InsituDPOTrainer]:
    yield InsituDPOTrainer(config, builder)


@register_trainer(config_type=KTOTrainerConfig)
async def kto_trainer(config: KTOTrainerConfig, builder: Builder) -> AsyncIterator[InsituKTOTrainer]:
    yield InsituKTOTrainer(config, builder)


@register_trainer(config_type=SFTTrainerConfig)
async def sft_trainer(config: SFTTrainerConfig, builder: Builder) -> AsyncIterator[InsituSFTTrainer]:
    yield InsituSFTTrainer(config, builder)
