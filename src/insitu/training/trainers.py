"""The built-in trainers: one loop; what an epoch trains on differs."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from insitu.advantages.credit import AdvantageConfig, Credit
from insitu.advantages.estimator import AdvantageEstimator, EstimatedEpoch, FunctionEstimator, GroupRelativeEstimator
from insitu.algorithms.selection import apply_selection
from insitu.builder import Builder, name_being_built
from insitu.config.code import LoadedPart, call_with, load_part
from insitu.errors import ConfigError
from insitu.preferences.selection import best_episodes, distinct_pairs, labeled_episodes, sampled_pairs
from insitu.registry import register_trainer
from insitu.runs.resume import read_curriculum
from insitu.schemas.finetuning import FinetuneConfig, TrajectoryCollection
from insitu.schemas.parts import AdvantagesPart
from insitu.training.checks import check_takes_advantages
from insitu.training.config import DPOTrainerConfig, InsituTrainerConfig, KTOTrainerConfig, SFTTrainerConfig
from insitu.training.interfaces import GroupTrainer, PairTrainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.loop import LoopTrainer
from insitu.training.warm_up import read_warm_up


class RowTrainer(LoopTrainer):
    """Trainer that decides what each row weighs, so that the backend must not."""

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        await super().bind_components(trajectory_builder, trainer_adapter)
        check_takes_advantages(self)


class InsituTrainer(RowTrainer, GroupTrainer):
    """Trains on the advantages of episodes over the others of their row (GRPO and its variants)."""

    def __init__(self, trainer_config: InsituTrainerConfig, builder: Builder | None = None, **kwargs: Any) -> None:
        super().__init__(trainer_config, builder, **kwargs)
        self.config = trainer_config
        key, folder = f"trainers.{name_being_built()}", self._full_config.folder
        parts = {f"{key}.selection.{number}": part for number, part in enumerate(trainer_config.selection or ())}
        self._selections = {where: load_part(part, where, folder) for where, part in parts.items()}
        self._advantages: LoadedPart | None = None
        if isinstance(trainer_config.advantages, AdvantagesPart):
            self._advantages = load_part(trainer_config.advantages, f"{key}.advantages", folder)
        # read now: `initialize` may move the folder with the files
        if trainer_config.curriculum_state is not None:
            self._earlier_curriculum = read_curriculum(self._full_config, trainer_config.curriculum_state)
        if trainer_config.sft is not None:
            self._warm_up = read_warm_up(self._full_config, trainer_config.sft)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        if self._earlier_curriculum is not None and not self._durable.continues:
            last_epoch, path = self._earlier_curriculum["epoch"], self.config.curriculum_state
            self.report.note(f"the curriculum continues after epoch {last_epoch} of {path}")

    def select(self, collection: TrajectoryCollection) -> EstimatedEpoch:
        metrics: dict[str, Any] = {}
        offered = {"epoch": collection.epoch or 1, "seed": self._full_config.general.seed}
        for key, (function, _) in self._selections.items():
            collection, own = apply_selection(collection, partial(call_with, function, **offered), key)
            metrics |= own
        return super().select(collection)._replace(metrics=metrics)

    def _selection_settings(self) -> dict[str, Any]:
        selections = [settings for _, settings in self._selections.values()]
        return super()._selection_settings() | ({"selection": selections} if selections else {})

    def _estimator(self) -> AdvantageEstimator:
        config, targets = self.config, self.run_config.target_functions
        if self._advantages is not None:
            return FunctionEstimator(self._advantages.function, {"advantages": self._advantages.settings})
        assert isinstance(config.advantages, AdvantageConfig)
        return GroupRelativeEstimator(config.advantages, Credit(config.credit, config.discount, targets))


class SelectingTrainer(RowTrainer):
    """Trains on a selection of what was collected, without advantages."""

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


class InsituDPOTrainer(SelectingTrainer, PairTrainer):
    """Trains preference pairs (Rafailov et al., arXiv:2305.18290)."""

    method = "dpo"
    trainer_config: DPOTrainerConfig

    def _selected(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        if self.trainer_config.deduplicate_pairs:
            collection = distinct_pairs(collection)
        if self.trainer_config.max_pairs is not None:
            collection = sampled_pairs(collection, self.trainer_config.max_pairs, self._full_config.general.seed)
        return collection


class InsituKTOTrainer(SelectingTrainer):
    """Trains desirable and undesirable episodes (Ethayarajh et al., arXiv:2402.01306)."""

    method = "kto"
    trainer_config: KTOTrainerConfig

    def _selected(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        return labeled_episodes(collection, self.trainer_config.desirable_above)


class InsituSFTTrainer(SelectingTrainer):
    """Trains the best episodes as if they were demonstrations."""

    method = "sft"
    trainer_config: SFTTrainerConfig

    def _selected(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        return best_episodes(collection, self.trainer_config.best_per_row, self.trainer_config.min_reward)


@register_trainer(config_type=InsituTrainerConfig)
async def insitu_trainer(config: InsituTrainerConfig, builder: Builder) -> AsyncIterator[InsituTrainer]:
    yield InsituTrainer(config, builder)


@register_trainer(config_type=DPOTrainerConfig)
async def dpo_trainer(config: DPOTrainerConfig, builder: Builder) -> AsyncIterator[InsituDPOTrainer]:
    yield InsituDPOTrainer(config, builder)


@register_trainer(config_type=KTOTrainerConfig)
async def kto_trainer(config: KTOTrainerConfig, builder: Builder) -> AsyncIterator[InsituKTOTrainer]:
    yield InsituKTOTrainer(config, builder)


@register_trainer(config_type=SFTTrainerConfig)
async def sft_trainer(config: SFTTrainerConfig, builder: Builder) -> AsyncIterator[InsituSFTTrainer]:
    yield InsituSFTTrainer(config, builder)
