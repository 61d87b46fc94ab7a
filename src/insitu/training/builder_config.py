"""The configuration blocks of the trajectory builders that run episodes themselves."""

from pydantic import Field

from insitu.runs.stored import StoredEpisodesConfig
from insitu.schemas.finetuning import TrajectoryBuilderConfig


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
