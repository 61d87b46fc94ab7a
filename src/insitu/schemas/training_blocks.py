"""The blocks of a file's trainer, trajectory builder and trainer adapter, and its reward."""

from typing import ClassVar

from pydantic import ConfigDict, field_validator

from insitu.schemas.components import BaseModelRegistryTag, TypedBaseModel, WritableModel
from insitu.schemas.parts import ShapePart
from insitu.schemas.training_jobs import KeepConfig

MAX_REWARD = 1e30
"""Largest magnitude of a reward: squares and sums of larger ones overflow."""
ALLOWED_REWARDS = f"from {-MAX_REWARD:g} to {MAX_REWARD:g}"
"""For messages."""


def parse_reward(name: str) -> tuple[str, int]:
    """The evaluator and sign of a reward: `NAME`, or `-NAME` if less is better."""
    return (name[1:], -1) if name.startswith("-") else (name, 1)


def signed(value: float, sign: int) -> float:
    """A score as a reward; 0 stays 0.0, not -0.0."""
    return value if sign > 0 else 0.0 - value


class RewardFunctionConfig(WritableModel):
    """The evaluator that provides the reward, and the reward of failed episodes."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    name: str
    """A key under `eval.evaluators`; `-NAME` if less is better: all rewards are then negated scores."""
    on_failure: float | str = "exclude"
    """`exclude` leaves failed episodes out of their group; a number is used as their reward."""
    shape: ShapePart | None = None
    """A [function](../guides/extend.md#a-reward-shape) that turns the score into the reward; none: the score is the
    reward."""

    @property
    def evaluator(self) -> str:
        """The key under `eval.evaluators`."""
        return parse_reward(self.name)[0]

    @property
    def sign(self) -> int:
        """1, or -1 if less is better."""
        return parse_reward(self.name)[1]

    @field_validator("on_failure")
    @classmethod
    def _exclude_or_number(cls, value: float | str) -> float | str:
        if value == "exclude":
            return value
        try:
            number = float(value)
        except ValueError:
            raise ValueError("allowed: exclude, or a number") from None
        if not abs(number) <= MAX_REWARD:  # NaN too
            raise ValueError(f"allowed: exclude, or a number {ALLOWED_REWARDS}")
        return number


class TrainerConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `trainers`."""

    reward: RewardFunctionConfig | None = None

    @property
    def epochs_ahead(self) -> int:
        """Epochs that are collected while earlier ones train."""
        return 0

    @property
    def warms_up(self) -> bool:
        """Whether something is trained before the first epoch."""
        return False


class TrajectoryBuilderConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `trajectory_builders`."""

    reward: RewardFunctionConfig | None = None

    @property
    def needs_dataset(self) -> bool:
        """Whether it runs the workflow on the rows of the dataset."""
        return True


class TrainerAdapterConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `trainer_adapters`."""

    reward: RewardFunctionConfig | None = None
    bridges_tokens: ClassVar[bool] = False
    """Whether its backend continues from the tokens of earlier calls, as `token_bridge` of an llm asks."""

    @property
    def trains_shaped_logits(self) -> bool:
        """Whether it trains calls whose logits the sampler has changed."""
        return False

    @property
    def keeps(self) -> KeepConfig | None:
        """Which checkpoints its backend keeps; None if it does not say."""
        return None

    @property
    def served_name(self) -> str | None:
        """The name its model is served under; None if only the running backend knows it."""
        return None

    @property
    def starts_from(self) -> str | None:
        """The model whose weights it serves and trains, its key `model`; None if it does not start the backend."""
        return None
