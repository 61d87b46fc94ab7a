"""The trajectory builder and the trainer of the ART plugin, and the registration of its three components."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from insitu.advantages.credit import CallAdvantages
from insitu.advantages.estimator import AdvantageEstimator, estimated_by_backend
from insitu.builder import Builder
from insitu.collect.collector import Plan
from insitu.collect.datasets import equal_rows
from insitu.errors import ConfigError
from insitu.integrations.art.config import (
    ARTTrainerAdapterConfig,
    ARTTrainerConfig,
    ARTTrajectoryBuilderConfig,
    load_art,
)
from insitu.integrations.art.conversion import check_order
from insitu.integrations.art.trainer_adapter import ARTTrainerAdapter
from insitu.registry import register_trainer, register_trainer_adapter, register_trajectory_builder
from insitu.schemas.episodes import DropReason, Needs
from insitu.schemas.finetuning import Trajectory
from insitu.training.budget import KnownGroups
from insitu.training.episodes_builder import EpisodesBuilder
from insitu.training.interfaces import GroupTrainer
from insitu.training.loop import LoopTrainer


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
class ARTTrajectoryBuilder(EpisodesBuilder):
    """Runs the workflow `num_generations` times per row and groups the episodes by row.

    With one generation, rows with the same question and answer are a group, as in the documents' example. One asyncio
    task collects all generations of a run, under one concurrency limit.
    """

    needs = Needs.LOGPROBS  # ART applies the chat template itself and recovers the sampled tokens from the logprobs

    @property
    def num_generations(self) -> int:
        return self.config.num_generations

    @cached_property
    def _group_of(self) -> dict[str, str]:
        return equal_rows(self._rows) if self._groups_equal_rows else {}

    @property
    def _groups_equal_rows(self) -> bool:
        return self.num_generations == 1 and self.plans_episodes

    def settings(self) -> dict[str, Any]:
        sizes = Counter(self._group_of.values())
        if not sizes:
            return super().settings()
        alone = [*sizes.values()].count(1)
        teaches_nothing = f"; {alone} rows equal no other and teach nothing" if alone else ""
        groups = f"{len(sizes)}, of the {len(self._rows)} rows those with equal question and answer{teaches_nothing}"
        return {"groups": groups} | super().settings()

    def plan(self, run_id: str, epoch: int, known: KnownGroups | None = None) -> Plan | None:
        plan = super().plan(run_id, epoch, known)
        return None if plan is None else replace(plan, group_of=self._group_of)

    def check_group_size(self, trainer: str) -> None:
        if not self._groups_equal_rows:
            super().check_group_size(trainer)
        elif self.config.rows_per_epoch is not None:
            problem = "which would split the groups of equal rows that num_generations: 1 makes"
            advice = "leave it out, or set num_generations to 2 or more"
            raise ConfigError(f"{self.block}.rows_per_epoch is {self.config.rows_per_epoch}, {problem}; {advice}")
        elif len({*equal_rows(rows := self.load_rows()).values()}) == len(rows):
            problem = f"no two of the {len(rows)} rows have the same question and answer"
            reason = f"{trainer} compares episodes with one another"
            raise ConfigError(f"{self.block}.num_generations is 1, and {problem}, but {reason}; allowed: 2 or more")


@register_trainer(config_type=ARTTrainerConfig)
class ARTTrainer(LoopTrainer, GroupTrainer):
    """The built-in training loop, except that the ART server computes the advantages.

    Groups whose rewards are all equal and conversations ART cannot train on are dropped and counted.
    """

    run_prefix = "art_run"

    @cached_property
    def _estimator(self) -> AdvantageEstimator:
        return _ServerEstimator()


class _ServerEstimator(AdvantageEstimator):
    """Drops trajectories the ART server cannot train on; the server computes the advantages of the rest."""

    def settings(self) -> dict[str, Any]:
        return {"advantages": "computed by the ART server"}

    def drop_reason(self, trajectory: Trajectory) -> DropReason | None:
        try:
            check_order(trajectory.episode, trajectory.id)
        except ValueError:
            return DropReason.EPISODE_ORDER
        return None

    def estimate(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        return estimated_by_backend(group)


@register_trainer_adapter(config_type=ARTTrainerAdapterConfig)
async def art_trainer_adapter(config: ARTTrainerAdapterConfig, builder: Builder) -> AsyncIterator[ARTTrainerAdapter]:
    await asyncio.to_thread(load_art)  # importing ART takes seconds: do it off the event loop
    adapter = ARTTrainerAdapter(config)
    try:
        yield adapter
    finally:
        await adapter.close()
