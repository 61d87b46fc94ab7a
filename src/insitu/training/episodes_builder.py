"""The built-in trajectory builder: the plan of each epoch, from its block of the file."""

import asyncio
import random
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from pydantic import Field, model_validator

from insitu.advantages.credit import TrainedCalls
from insitu.builder import Builder
from insitu.collect.collector import Observer, Plan, collect_epoch
from insitu.collect.conversations import collection_of, scored_group
from insitu.collect.datasets import load_dataset
from insitu.collect.episodes import EpisodeOptions
from insitu.collect.evaluators import Scoring, as_reward, parse_score
from insitu.collect.scores import shaped
from insitu.collect.shared_run import builder_of_run, run_of
from insitu.config.code import LoadedPart, load_part
from insitu.errors import ConfigError, PluginError
from insitu.registry import register_trajectory_builder
from insitu.runs.replay import StoredEpisodesConfig, StoredRun, open_stored
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus, Needs, StepLog
from insitu.schemas.evaluation import EvalInputItem, EvalOutputItem, EvaluationRunOutput
from insitu.schemas.finetuning import FinetuneConfig, TrajectoryBuilderConfig, TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.schemas.kinds import EVALUATOR
from insitu.training.budget import BudgetConfig, EpochRows, KnownGroups, PlannedRows
from insitu.training.interfaces import GroupTrainer, PairTrainer, Trainer, TrajectoryBuilder
from insitu.training.planned_builder import PlannedBuilder
from insitu.workflow.steps import calls_of_steps

_REHEARSED_ROWS = 3


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

    @property
    def needs_dataset(self) -> bool:
        return self.episodes_from is None


class EpisodesBuilderConfig(CollectingBuilderConfig, name="insitu_traj_builder"):
    """Runs several episodes per row, grouped by row."""

    num_generations: int = Field(default=8, ge=1)
    """Episodes per row and epoch (the group size)."""
    budget: BudgetConfig | None = None
    """Saves episodes that teach nothing; see [slow agents](../guides/slow-agents.md#a-rollout-budget)."""

    @model_validator(mode="after")
    def _budget_fits(self) -> "EpisodesBuilderConfig":
        if self.budget is not None:
            self.budget.check(self.num_generations)
        return self


class _Played(Observer):
    """Keeps the last episode that has ended."""

    episode: Episode

    def on_episode(self, episode: Episode) -> None:
        self.episode = episode


@register_trajectory_builder(config_type=EpisodesBuilderConfig)
class EpisodesBuilder(PlannedBuilder):
    """Runs the workflow `num_generations` times on each row and groups the episodes by row."""

    needs = Needs.TOKEN_IDS
    """What training needs of each call, unless the trainer adapter needs less; a call without it is a failure."""
    needs_reward = True
    """Whether training needs a reward for each episode."""

    def __init__(self, trajectory_builder_config: CollectingBuilderConfig, builder: Builder | None = None) -> None:
        super().__init__(trajectory_builder_config)
        self.config = trajectory_builder_config
        self._given_builder = builder or builder_of_run()
        self._rows: list[EvalInputItem] = []
        self.shape: LoadedPart | None = None
        """Turns scores into rewards."""
        self.stored: StoredRun | None = None
        self.budget = self.config.budget if isinstance(self.config, EpisodesBuilderConfig) else None
        self._planned_rows: PlannedRows | None = None
        if self._given_builder is not None:
            self._check()

    def _check(self) -> None:
        """Raises ConfigError before an earlier run is moved aside and a backend is started."""
        if self.budget is not None:
            self._check_budget(self.budget)
        if self.config.episodes_from is not None:
            self.stored = open_stored(self._builder, self.block, self.config.episodes_from)
            return
        reward = self._full_config.finetuning.reward_function
        if self.needs_reward and reward is None:
            raise ConfigError("finetuning.reward_function is missing: training needs the name of an evaluator")
        if reward is not None and reward.shape is not None:
            self.shape = load_part(reward.shape, "finetuning.reward_function.shape", self._full_config.folder)
        for llm in sorted(self._full_config.trained_llms()):
            if "seed" in self._full_config.llm(llm).request_settings():
                raise ConfigError(
                    f"llms.{llm}.seed: with a fixed seed all episodes of a group would sample the same; leave it out "
                    "(each episode gets its own seed, derived from general.seed)"
                )

    def _check_budget(self, budget: BudgetConfig) -> None:
        if self.config.episodes_from is not None or self._evaluates:
            what = "run_eval" if self._evaluates else "episodes_from"
            raise ConfigError(f"{self.block}.budget: with {what} no episodes are planned, so leave it out")
        if budget.retry_solved < 1 and self._full_config.finetuning.curriculum_learning.enabled:
            raise ConfigError(
                f"{self.block}.budget.retry_solved is {budget.retry_solved:g}, but finetuning.curriculum_learning, "
                "which ranks all rows by their rewards, is enabled; allowed: 1"
            )

    @property
    def _evaluates(self) -> bool:
        """Whether the builder overrides `run_eval`, which is then called instead of running the workflow."""
        return getattr(self.run_eval, "__func__", None) is not TrajectoryBuilder.run_eval

    @property
    def plans_episodes(self) -> bool:
        return self.stored is None and not self._evaluates

    @property
    def block(self) -> str:
        """The key of its block in the file."""
        return f"trajectory_builders.{self._full_config.finetuning.trajectory_builder}"

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        if self._evaluates:
            return
        if self.config.episodes_from is not None:  # opened again: the run may have been moved aside for this one
            self.stored = await asyncio.to_thread(open_stored, self._builder, self.block, self.config.episodes_from)
            return
        self._rows = await asyncio.to_thread(self.load_rows)

    def load_rows(self) -> list[EvalInputItem]:
        request = self._builder.request
        path = request.dataset if request is not None else None
        return load_dataset(self._full_config, path, moved=self._builder.moved)

    def streaming_obstacle(self) -> str | None:
        if self.budget is None or (not self.budget.replace and self.budget.retry_solved == 1):
            return None
        return f"{self.block}.budget: which rows an epoch has depends on their rewards"

    def settings(self) -> dict[str, Any]:
        shape = {"reward_shape": self.shape.settings} if self.shape is not None else {}
        return shape | ({"budget": self.budget.model_dump(exclude_none=True)} if self.budget is not None else {})

    def check_trainer(self, trainer: Trainer) -> None:
        name = trainer.trainer_config.type
        if self.makes_pairs != isinstance(trainer, PairTrainer):
            made, trained = ("preference pairs", "episodes") if self.makes_pairs else ("episodes", "preference pairs")
            raise ConfigError(f"trajectory_builders: {self.config.type} makes {made}, but {name} trains {trained}")
        if isinstance(trainer, GroupTrainer) and trainer.compares_episodes and self.stored is None:
            self.check_group_size(name)
        if self.budget is not None and (obstacle := trainer.budget_obstacle()) is not None:
            raise ConfigError(f"{self.block}.budget{obstacle}")

    def check_group_size(self, trainer: str) -> None:
        """Raises ConfigError if a trainer that compares episodes of a row gets one of each."""
        if self.config.num_generations < 2:
            raise ConfigError(
                f"{self.block}.num_generations is 1, but {trainer} compares the episodes of a row with one another; "
                "allowed: 2 or more"
            )

    @property
    def episodes_per_epoch(self) -> int | None:
        if not self.plans_episodes:
            return None
        return self.config.num_generations * min(self.config.rows_per_epoch or len(self._rows), len(self._rows))

    def rows_of_epoch(self, epoch: int) -> list[EvalInputItem]:
        """At most `rows_per_epoch` rows in the order they are run: shuffled passes over the dataset."""
        total = len(self._rows)
        size = min(self.config.rows_per_epoch or total, total)
        positions = range((epoch - 1) * size, epoch * size)
        passes = {p // total for p in (positions[0], positions[-1])}
        orders = {p: self._order(p) for p in passes}
        rows = [orders[p // total][p % total] for p in positions]
        return list({str(row.id): row for row in rows}.values())  # the last row of a pass may be the first of the next

    def _order(self, number: int) -> list[EvalInputItem]:
        """The order of the rows in a pass over the dataset."""
        seed = self._every_epoch.options.seed
        return random.Random(f"{seed}|dataset|{number}").sample(self._rows, len(self._rows))

    def plan(self, run_id: str, epoch: int, known: KnownGroups | None = None) -> Plan | None:
        if self._evaluates:
            return None
        every, size = replace(self._every_epoch, run_id=run_id, epoch=epoch), self.config.num_generations
        if self.stored is not None:
            return replace(every, recorded=self.stored.replay(run_id, epoch))
        planned = self._planned_by_budget(epoch, known)
        return replace(
            every,
            members=[(row, generation) for row in planned.rows for generation in range(size)],
            budget=self.budget.of_epoch(epoch, planned, self._rows, size) if self.budget is not None else None,
        )

    def _planned_by_budget(self, epoch: int, known: KnownGroups | None) -> EpochRows:
        seed = self._every_epoch.options.seed
        if self.budget is None or self.budget.retry_solved == 1:
            return EpochRows(self.rows_of_epoch(epoch), epoch, seed)
        if known is None:
            raise ConfigError(f"{self.block}.budget.retry_solved: the trainer records no groups; allowed: 1")
        if self._planned_rows is None:
            size = min(self.config.rows_per_epoch or len(self._rows), len(self._rows))
            self._planned_rows = PlannedRows(self._rows, self._order, size, seed, self.budget.retry_solved, known)
        return self._planned_rows.of_epoch(epoch)

    @cached_property
    def _every_epoch(self) -> Plan:
        """What the plans of all epochs have in common."""
        run, config, trained = self.run_config, self._full_config, self.trained
        service = self._builder.request
        reward = run.reward_function if self.needs_reward else None
        monitored = config.names(EVALUATOR) if run.training_evaluators is None else run.training_evaluators
        computes_reward = type(self).compute_reward is not TrajectoryBuilder.compute_reward
        return Plan(
            run_id="",
            epoch=0,
            members=(),
            options=EpisodeOptions.of(
                config,
                training=trained.llms,
                result=service.result_json_path if service else "$",
                needs=self._needs,
                target_functions=tuple(trained.functions),
            ),
            limit=config.max_concurrency,
            service=service,
            trained=trained,
            scoring=Scoring(
                evaluators=[*dict.fromkeys((*([reward.evaluator] if reward is not None else ()), *monitored))],
                reward=reward,
                limit=config.eval.scoring_limit(1),
                compute_reward=self.compute_reward if computes_reward else None,
                shape=partial(shaped, self.shape.function) if self.shape is not None else None,
            ),
            rewarded=self.needs_reward,
            pairs=self.pairs if self.makes_pairs else None,
        )

    @cached_property
    def trained(self) -> TrainedCalls:
        if self._evaluates and self._given_builder is None and builder_of_run() is None:
            return TrainedCalls(as_text=True)
        run = self.run_config
        as_text = self._needs <= Needs.TEXT
        return TrainedCalls(run.target_functions, self._full_config.trained_llms(), run.target_model, as_text)

    @property
    def _needs(self) -> Needs:
        return min(self.needs, run_of(self._builder).needs)

    def pairs(self, group: GroupRecord) -> GroupRecord:
        """The preference pairs of a group; called if `makes_pairs`."""
        raise NotImplementedError

    async def rehearse(self, run_id: str) -> str | None:
        """Plays and scores one row, as epoch 0. If its evaluator fails, up to two more.

        Returns what went wrong; raises PluginError if the evaluator fails on all of them and failures are excluded.
        """
        if not self.plans_episodes:
            return None
        run, played = run_of(self._builder), _Played()
        every, purpose = replace(self._every_epoch, run_id=run_id, epoch=0), ", played before the first epoch"
        for row in self.rows_of_epoch(1)[:_REHEARSED_ROWS]:
            plan = replace(every, members=[(row, 0)], rewarded=False, pairs=None, purpose=purpose)
            await run.watchdog.watch(partial(collect_epoch, plan, self._builder, run, [played]))
            if played.episode.reason is not DropReason.EVALUATOR_ERROR:
                break
        episode, problems = played.episode, []
        if episode.outcome is EpisodeStatus.OK and episode.output is None:
            problems.append("the workflow returned None; is a `return` missing?")
        if episode.reason is not None:
            problems.append(f"{episode.reason}: {episode.error}")
        if not problems:
            return None
        problem = f"row {episode.key.row_id!r}, played once before the first epoch: {' '.join(problems)}"
        reward = plan.scoring.reward
        if episode.reason is DropReason.EVALUATOR_ERROR and (reward is None or reward.on_failure == "exclude"):
            raise PluginError(f"no row could be scored, so nothing can be trained; {problem}")
        return problem

    async def unplanned(self, run_id: str, epoch: int) -> TrajectoryCollection:
        """The trajectories of `num_generations` calls of `run_eval`."""
        outputs = await asyncio.gather(*(self.run_eval() for _ in range(self.config.num_generations)))
        rows: dict[str, list[Episode]] = {}
        for output in outputs:
            scores = {str(item.id): item for item in self._rewarded(output)}
            for item in output.eval_input.eval_input_items:
                row = rows.setdefault(str(item.id), [])
                steps = [*(item.trajectory or ())]
                outcome = EpisodeStatus.OK if item.error is None else EpisodeStatus.FAILED
                key = EpisodeKey(run_id, epoch, str(item.id), len(row))
                calls = calls_of_steps(steps)
                episode = Episode(key, outcome, item.output_obj, calls, StepLog(steps), error=item.error)
                if (score := scores.get(str(item.id))) is not None and parse_score(score)[1] is None:
                    episode.reward = await self.compute_reward(score)
                row.append(episode)
        groups = [scored_group(episodes, self.trained, rewarded=self.needs_reward) for episodes in rows.values()]
        return collection_of([self.pairs(g) if self.makes_pairs else g for g in groups], run_id, epoch)

    def _rewarded(self, output: EvaluationRunOutput) -> list[EvalOutputItem]:
        """The scores of the evaluator that gives the reward: the configured one, or else the first."""
        reward = self.run_config.reward_function if self.run_config else None
        results = dict(output.evaluation_results)
        name, sign = (reward.evaluator, reward.sign) if reward else (next(iter(results), ""), 1)
        return [as_reward(item, sign) for item in results[name].eval_output_items] if name in results else []
