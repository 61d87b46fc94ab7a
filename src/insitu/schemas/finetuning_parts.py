"""Parts of the section `finetuning`: the reward, the curriculum, the validation and the uploads."""

from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from insitu.schemas.components import MayChange, WritableModel
from insitu.schemas.parts import ShapePart

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


class CurriculumLearningConfig(WritableModel):
    """Trains on the easiest examples first and adds the others step by step."""

    enabled: bool = False
    """Enables the curriculum."""
    initial_percentile: float = Field(default=0.3, gt=0, le=1)
    """Fraction of the examples in the first epoch."""
    increment_percentile: float = Field(default=0.2, gt=0, le=1)
    """Fraction added at each expansion."""
    expansion_interval: int = Field(default=5, ge=1)
    """Epochs between expansions."""
    min_reward_diff: float = 0.1
    """Leave out groups whose best and worst reward differ by less than this."""
    sort_ascending: bool = False
    """false: highest mean reward (easiest) first; true: lowest first."""
    random_subsample: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the remaining groups to keep, a seeded random sample of at least one."""


class ValidationConfig(WritableModel):
    """A held-out dataset and when to evaluate it."""

    dataset: str | Path | None = None
    """File of held-out rows; the format follows from the suffix. None: the dataset of `config_file`."""
    interval: MayChange[int] = Field(default=5, ge=1)
    """Epochs between validations; there is also one before the first and one after the last epoch."""
    config_file: str | Path | None = None
    """A configuration file whose `eval` and `workflow` sections are used for validation, with the model under training.
    """
    reps: int = Field(default=1, ge=1)
    """Episodes per row."""
    patience: MayChange[int | None] = Field(default=None, ge=1)
    """End the run, with success, once so many validations in a row have not improved on the best score; none: train all
    epochs."""
    beside: MayChange[bool] = False
    """Validate the weights of an epoch [while the next one is collected and
    trained](../guides/slow-agents.md#validation-beside-training). Scores and their order stay the same."""

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if self.dataset is None and self.config_file is None:
            raise ValueError("dataset is missing (or config_file, whose dataset is then used)")
        return self


class HubConfig(WritableModel):
    """Uploads checkpoints, as `insitu export` writes them, to the Hugging Face Hub while the run goes on."""

    model_config = ConfigDict(extra="forbid")

    repo: str
    """The model repository, `OWNER/NAME`, which is created if it does not exist."""
    push: Literal["best", "last"] = "best"
    """`best`: the weights with the best validation score so far; `last`: the newest that are written."""
    private: bool = True
    """Whether a repository that is created is private."""
    merge: bool = False
    """Merge an adapter into its base model."""
