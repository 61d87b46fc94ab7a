"""Parts of the section `finetuning`: the curriculum and the validation."""

from pathlib import Path
from typing import Self

from pydantic import ConfigDict, Field, model_validator

from insitu.schemas.components import MayChange, WritableModel

_DOCUMENTED = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class CurriculumLearningConfig(WritableModel):
    """Trains on the easiest examples first and adds the others step by step."""

    model_config = _DOCUMENTED

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

    model_config = _DOCUMENTED

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
