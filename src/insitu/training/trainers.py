"""The built-in trainers: one loop; what an epoch trains on differs."""

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from insitu.advantages.credit import AdvantageConfig, Credit
from insitu.advantages.distillation import TeacherEstimator, teacher_metrics
from insitu.advantages.estimator import AdvantageEstimator, EstimatedEpoch, FunctionEstimator, GroupRelativeEstimator
from insitu.builder import Builder, name_being_built
from insitu.config.code import LoadedPart, load_part
from insitu.errors import ConfigError
from insitu.preferences.selection import best_episodes, chosen_pairs, labeled_episodes
from insitu.registry import register_trainer
from insitu.schemas.finetuning import FinetuneConfig, TrajectoryCollection
from insitu.schemas.parts import AdvantagesPart, SelectionPart
from insitu.training.interfaces import GroupTrainer, PairTrainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.loop import LoopTrainer
from insitu.training.schedule import LoopTrainerConfig
from insitu.training.teacher import Teacher, TeacherConfig
from insitu.training.warm_up import WarmUpConfig, read_warm_up


def _tag_of_advantages(value: Any) -> str:
    kind = value.get("_type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<group>" if kind in (None, "group_relative") else "<part>"


class InsituTrainerConfig(LoopTrainerConfig, name="insitu_trainer"):
    """Collects, trains and validates, one epoch at a time."""

    advantages: Annotated[AdvantageConfig, Tag("<group>")] | Annotated[AdvantagesPart, Tag("<part>")] = Field(
        default_factory=AdvantageConfig, discriminator=Discriminator(_tag_of_advantages)
    )
    """How rewards of a group become advantages: `group_relative` (the default), or a
    [function](../guides/extend.md#advantages), for which `credit` and `discount` have no effect."""
    selection: list[SelectionPart] | None = None
    """[Functions](../guides/extend.md#a-selection) that leave out groups or episodes, one after the other, after the
    curriculum: `no_variance`, `random_subsample`, or yours."""
    credit: Literal["episode", "step", "function"] = "episode"
    """`episode`: every call gets its episode's advantage. `step`: the return of each call is compared with those of all
    calls in the group. `function`: with those of the same function in the group's other episodes."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """Discount factor for the rewards of later steps, with `credit: step` or `function`."""
    sft: WarmUpConfig | None = None
    """Supervised finetuning on demonstrations before the first epoch."""
    teacher: TeacherConfig | None = None
    """[On-policy distillation](../guides/distill.md): what is trained is what a teacher says about each sampled token,
    instead of the rewards or beside them."""

    @property
    def warms_up(self) -> bool:
        return self.sft is not None

    @model_validator(mode="after")
    def _advantages_match_credit(self) -> "InsituTrainerConfig":
        if isinstance(self.advantages, AdvantagesPart):
            return self
        if self.credit == "episode" and self.discount != 1:
            raise ValueError(f"discount is {self.discount:g}, which needs credit: step or function, not episode")
        if self.advantages.baseline == "leave_one_function_out" and self.credit != "function":
            raise ValueError(f"advantages.baseline leave_one_function_out needs credit: function, not {self.credit}")
        return self


class DPOTrainerConfig(LoopTrainerConfig, name="insitu_dpo_trainer"):
    """Collects preference pairs with the newest weights and trains on them, once per epoch (on-policy DPO)."""

    deduplicate_pairs: bool = True
    """Train pairs with the same prompt and responses once per epoch."""
    max_pairs: int | None = Field(default=None, ge=1)
    """Pairs per epoch to train, a seeded random sample; none: all."""


class KTOTrainerConfig(LoopTrainerConfig, name="insitu_kto_trainer"):
    """Collects episodes and trains on which of them are desirable, without pairing them."""

    desirable_above: float | None = None
    """Episodes with a higher reward are desirable, with a lower one undesirable; none: the mean reward of the row's
    episodes."""


class SFTTrainerConfig(LoopTrainerConfig, name="insitu_sft_trainer"):
    """Collects episodes and trains on the best of each row (rejection sampling)."""

    best_per_row: int = Field(default=1, ge=1)
    """Episodes of each row to train."""
    min_reward: float | None = None
    """Train episodes with at least this reward; none: any."""


@register_trainer(config_type=InsituTrainerConfig)
class InsituTrainer(LoopTrainer, GroupTrainer):
    """Trains on the advantages of episodes over the others of their row (GRPO and its variants)."""

    computes_advantages = True
    trainer_config: InsituTrainerConfig

    def __init__(self, trainer_config: InsituTrainerConfig, builder: Builder | None = None, **kwargs: Any) -> None:
        super().__init__(trainer_config, builder, **kwargs)
        key, folder = f"trainers.{name_being_built()}", self._full_config.folder
        parts = {f"{key}.selection.{number}": part for number, part in enumerate(trainer_config.selection or ())}
        self._selections = {where: load_part(part, where, folder) for where, part in parts.items()}
        self._advantages: LoadedPart | None = None
        self.teacher: Teacher | None = None
        if isinstance(trainer_config.advantages, AdvantagesPart):
            self._advantages = load_part(trainer_config.advantages, f"{key}.advantages", folder)
        if trainer_config.teacher is not None:
            self.teacher = Teacher(trainer_config.teacher, f"{key}.teacher")
            self.own_metrics = teacher_metrics
        if trainer_config.sft is not None:  # read now: `initialize` may move the folder with the files
            self._stages.append(read_warm_up(self._full_config, trainer_config.sft))

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        await super().bind_components(trajectory_builder, trainer_adapter)
        if self.teacher is not None:
            self._schedule.teacher = self.teacher
            self.teacher.check(self, self._full_config)
            await self.teacher.check_server(self._full_config, trainer_adapter.adapter_config.starts_from)

    @property
    def compares_episodes(self) -> bool:
        return self.teacher is None

    def budget_obstacle(self) -> str | None:
        config = self.trainer_config
        if self.teacher is not None:
            return ": a teacher also says something about episodes of equal rewards"
        if config.credit == "episode":
            return None
        compared = f" compares the rewards of episodes, but {config.type} has credit: {config.credit}, which compares"
        return f"{compared} those of steps; leave it out, or set credit: episode"

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        if self.teacher is not None:
            await self.teacher.open(await self.trainer_adapter.policy_endpoint())

    async def cleanup(self) -> None:
        try:
            await super().cleanup()
        finally:
            if self.teacher is not None:
                await self.teacher.close()

    def _selection_settings(self) -> dict[str, Any]:
        settings = super()._selection_settings()
        return settings | ({"teacher": self.teacher.settings()} if self.teacher is not None else {})

    @cached_property
    def _estimator(self) -> AdvantageEstimator:
        rewards, teacher = self._estimator_of_rewards(), self.trainer_config.teacher
        if teacher is None:
            return rewards
        coefficients, baseline = (teacher.coefficient, teacher.reward_coefficient), teacher.baseline != "none"
        return TeacherEstimator(*coefficients, rewards, baseline=baseline)

    def _estimator_of_rewards(self) -> AdvantageEstimator:
        config, targets = self.trainer_config, self.run_config.target_functions
        if self._advantages is not None:
            return FunctionEstimator(self._advantages.function, {"advantages": self._advantages.settings})
        assert isinstance(config.advantages, AdvantageConfig)
        return GroupRelativeEstimator(config.advantages, Credit(config.credit, config.discount, targets))


class SelectingTrainer(LoopTrainer):
    """Trains on a selection of what was collected, without advantages; a subclass defines `select`."""

    computes_advantages = True

    async def initialize(self, run_config: FinetuneConfig) -> None:
        if run_config.curriculum_learning.enabled:
            raise ConfigError(
                f"finetuning.curriculum_learning.enabled is true, but {self.trainer_config.type} has no curriculum"
            )
        await super().initialize(run_config)

    def _selection_settings(self) -> dict[str, Any]:
        return self.trainer_config.model_dump(exclude={"type", "reward", *LoopTrainerConfig.model_fields})


@register_trainer(config_type=DPOTrainerConfig)
class InsituDPOTrainer(SelectingTrainer, PairTrainer):
    """Trains preference pairs (Rafailov et al., arXiv:2305.18290)."""

    method = "dpo"
    compared = "the pairs of an epoch are selected together"
    trainer_config: DPOTrainerConfig

    def select(self, collection: TrajectoryCollection) -> EstimatedEpoch:
        config, seed = self.trainer_config, self._full_config.general.seed
        unique, count = config.deduplicate_pairs, config.max_pairs
        return EstimatedEpoch(chosen_pairs(collection, distinct=unique, count=count, seed=seed), [])


@register_trainer(config_type=KTOTrainerConfig)
class InsituKTOTrainer(SelectingTrainer):
    """Trains desirable and undesirable episodes (Ethayarajh et al., arXiv:2402.01306)."""

    method = "kto"
    compared = "the reference point of KTO is that of all its episodes"
    trainer_config: KTOTrainerConfig

    def select(self, collection: TrajectoryCollection) -> EstimatedEpoch:
        return EstimatedEpoch(labeled_episodes(collection, self.trainer_config.desirable_above), [])


@register_trainer(config_type=SFTTrainerConfig)
class InsituSFTTrainer(SelectingTrainer):
    """Trains the best episodes as if they were demonstrations."""

    method = "sft"
    trainer_config: SFTTrainerConfig

    def select(self, collection: TrajectoryCollection) -> EstimatedEpoch:
        config = self.trainer_config
        return EstimatedEpoch(best_episodes(collection, config.best_per_row, config.min_reward), [])
