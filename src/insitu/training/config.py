"""The configuration blocks of the built-in trainers and of the trajectory builders that run episodes."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from insitu.advantages.credit import AdvantageConfig
from insitu.runs.stored import StoredEpisodesConfig
from insitu.schemas.finetuning import TrainerConfig, TrajectoryBuilderConfig
from insitu.schemas.parts import AdvantagesPart, SelectionPart


class WarmUpConfig(BaseModel):
    """Demonstrations to imitate before the first epoch."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, frozen=True)

    rows: Path
    """A file of JSON lines, each a dialogue: `{"messages": [...]}` as in OpenAI's API, with `tools` if it has some. The
    assistant's messages are trained, without those that have `weight: 0`."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the dialogues."""
    learning_rate: float | None = Field(default=None, ge=0)
    """Peak learning rate, which falls linearly to 0; none: that of the trainer adapter."""
    mini_batch_size: int | None = Field(default=None, ge=1)
    """Dialogues per optimizer step; none: that of the trainer adapter."""

    def overrides(self) -> dict[str, Any]:
        """The settings of the job that differ from the trainer adapter's."""
        own = {"learning_rate": self.learning_rate, "mini_batch_size": self.mini_batch_size}
        given = {key: value for key, value in own.items() if value is not None}
        return {"method": "sft", "num_iterations": self.epochs, "schedule": "linear", "warmup": 0.0, **given}


def _tag_of_advantages(value: Any) -> str:
    kind = value.get("_type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<group>" if kind in (None, "group_relative") else "<part>"


class InsituTrainerConfig(TrainerConfig, name="insitu_trainer"):
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
    curriculum_state: Path | None = None
    """Path of an earlier run's `curriculum_state.json`. The curriculum resumes from it: included examples, difficulty
    ranking and schedule position."""

    sft: WarmUpConfig | None = None
    """Supervised finetuning on demonstrations before the first epoch."""

    @model_validator(mode="after")
    def _baseline_matches_credit(self) -> "InsituTrainerConfig":
        if isinstance(self.advantages, AdvantagesPart):
            return self
        if self.advantages.baseline == "leave_one_function_out" and self.credit != "function":
            raise ValueError(f"advantages.baseline leave_one_function_out needs credit: function, not {self.credit}")
        return self


class DPOTrainerConfig(TrainerConfig, name="insitu_dpo_trainer"):
    """Collects preference pairs with the newest weights and trains on them, once per epoch (on-policy DPO)."""

    deduplicate_pairs: bool = True
    """Train pairs with the same prompt and responses once per epoch."""
    max_pairs: int | None = Field(default=None, ge=1)
    """Pairs per epoch to train, a seeded random sample; none: all."""


class KTOTrainerConfig(TrainerConfig, name="insitu_kto_trainer"):
    """Collects episodes and trains on which of them are desirable, without pairing them."""

    desirable_above: float | None = None
    """Episodes with a higher reward are desirable, with a lower one undesirable; none: the mean reward of the row's
    episodes."""


class SFTTrainerConfig(TrainerConfig, name="insitu_sft_trainer"):
    """Collects episodes and trains on the best of each row (rejection sampling)."""

    best_per_row: int = Field(default=1, ge=1)
    """Episodes of each row to train."""
    min_reward: float | None = None
    """Train episodes with at least this reward; none: any."""


class CollectingBuilderConfig(TrajectoryBuilderConfig):
    """What all builders that run episodes themselves have in common."""

    num_generations: int = Field(default=1, ge=1)
    """Episodes per row and epoch (the group size)."""
    rows_per_epoch: int | None = Field(default=None, ge=1)
    """Rows per epoch, taken in a seeded order over the dataset; none: all rows. A curriculum can only include rows it
    has seen: a row first seen between two expansions waits for the next."""
    episodes_from: StoredEpisodesConfig | None = None
    """Train on the recorded episodes of an earlier run instead of running the workflow: a run directory, or a block.
    The groups are used as they were recorded, whatever `num_generations` and `rows_per_epoch` say."""


class EpisodesBuilderConfig(CollectingBuilderConfig, name="insitu_traj_builder"):
    """Runs several episodes per row, grouped by row."""

    num_generations: int = Field(default=8, ge=1)
    """Episodes per row and epoch (the group size)."""
