"""The trajectory builder of the ART plugin: the built-in one, with the tasks of its runs for all to see."""

import asyncio
from typing import Any

from insitu.adapters.art.config import ARTTrajectoryBuilderConfig
from insitu.builder import Builder
from insitu.trajectories.builder import EpisodesBuilder


class ARTTrajectoryBuilder(EpisodesBuilder):
    """Runs the workflow `num_generations` times on each row and groups the episodes by row.

    All generations of a run are one task, under one limit of episodes.
    """

    needs_token_ids = False  # servers of ART make the prompts themselves, and spell what was sampled in the logprobs

    def __init__(self, trajectory_builder_config: ARTTrajectoryBuilderConfig, builder: Builder) -> None:
        super().__init__(trajectory_builder_config, builder)

    @property
    def evaluation_runs(self) -> dict[str, list[asyncio.Task[Any]]]:
        """What is collecting for each run that has been started and not been finalized."""
        return {run_id: [c.task] for run_id, c in self._runs.items() if c.task is not None}
