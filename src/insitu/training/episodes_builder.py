"""The built-in trajectory builder: collects rows x generations and passes each group on as it completes."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

from insitu.advantages.targeting import credited_function, targeted_calls, why_untargeted
from insitu.builder import Builder
from insitu.collect.collector import collect, open_workflow
from insitu.collect.conversations import as_trajectory
from insitu.collect.datasets import load_dataset, rows_of_epoch
from insitu.collect.episodes import EpisodeOptions, ResultPath, fail, run_episode
from insitu.collect.evaluators import ALLOWED_REWARDS, is_reward, parse_score, score
from insitu.collect.groups import GroupRecord
from insitu.collect.shared_run import UsesBuilder, builder_of_run, current_run, watchdog_of
from insitu.collect.watchdog import Watchdog
from insitu.errors import CaptureError, ConfigError, PluginError, TrajectoryError
from insitu.registry import EVALUATOR, LLM, register_trajectory_builder
from insitu.runs.stored import StoredRun, open_stored
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, Outcome
from insitu.schemas.evaluation import EvalInputItem, EvalOutputItem, EvaluatorInfo
from insitu.schemas.finetuning import (
    FinetuneConfig,
    RewardFunctionConfig,
    Trajectory,
    TrajectoryCollection,
)
from insitu.training.builder_config import CollectingBuilderConfig, EpisodesBuilderConfig
from insitu.training.interfaces import TrajectoryBuilder

logger = logging.getLogger(__name__)

_PENALIZED = (
    DropReason.WORKFLOW_ERROR,
    DropReason.TIMEOUT,
    DropReason.EVALUATOR_ERROR,
    DropReason.NAN_SCORE,
)
"""Failures of the workflow and of its evaluator: these get `reward_function.on_failure` if it is a number."""
_REHEARSED_ROWS = 3


@dataclass
class _Collection:
    """An epoch being collected."""

    epoch: int
    on_episode: Callable[[Episode], None]
    on_group: Callable[[GroupRecord], None]
    vocab_size: int | None = None
    finished: list[Episode] = field(default_factory=list)
    waiting: dict[str, list[Episode]] = field(default_factory=dict)
    groups: dict[str, GroupRecord] = field(default_factory=dict)
    first_error: str | None = None
    task: asyncio.Task[None] | None = None


class EpisodesBuilder(UsesBuilder, TrajectoryBuilder):
    """Runs the workflow `num_generations` times on each row and groups the episodes by row.

    `start_run(run_id, meta)` reads from `meta`: `epoch` (default: the next one; the first is 1), `vocab_size`,
    `finished` (episodes of this epoch that an earlier process has run), and the callbacks `on_episode(episode)` and
    `on_group(record)`. Failed and unscored episodes are counted by reason and not returned.
    """

    needs_token_ids = True
    """Whether training needs the token ids of prompts, so that a call without them is a failure."""
    needs_reward = True
    """Whether training needs a reward for each episode."""
    makes_pairs = False
    """Whether its trajectories are preference pairs, which are compared already."""

    def __init__(self, trajectory_builder_config: CollectingBuilderConfig, builder: Builder | None = None) -> None:
        super().__init__(trajectory_builder_config)
        self.config = trajectory_builder_config
        self._given_builder = builder or builder_of_run()
        self._rows: list[EvalInputItem] = []
        self._runs: dict[str, _Collection] = {}
        self._last_epoch = 0
        self._unscored: set[str] = set()
        """Evaluators that have failed to score an episode."""
        self.stored: StoredRun | None = None
        """The run whose episodes are used instead of running the workflow."""
        if self._given_builder is not None:
            self._check()

    def _check(self) -> None:
        """Raises ConfigError before an earlier run is moved aside and a backend is started."""
        if self.config.episodes_from is not None:
            self.stored = open_stored(self._full_config, self.block, self.config.episodes_from)
            return
        if self.needs_reward and self._full_config.finetuning.reward_function is None:
            raise ConfigError("finetuning.reward_function is missing: training needs the name of an evaluator")
        for llm in sorted(self._full_config.trained_llms()):
            if getattr(self._full_config.block(LLM, llm), "seed", None) is not None:
                raise ConfigError(
                    f"llms.{llm}.seed: with a fixed seed all episodes of a group would sample the same; leave it out "
                    "(each episode gets its own seed, derived from general.seed)"
                )

    @property
    def block(self) -> str:
        """The key of its block in the file."""
        return f"trajectory_builders.{self._full_config.finetuning.trajectory_builder}"

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        if self.config.episodes_from is not None:  # opened again: the run may have been moved aside for this one
            self.stored = await asyncio.to_thread(open_stored, self._full_config, self.block, self.config.episodes_from)
            return
        asked = run_config.run_configuration
        self._rows = await asyncio.to_thread(load_dataset, self._full_config, asked.dataset if asked else None)

    @property
    def episodes_per_epoch(self) -> int | None:
        if self.stored is not None:
            return None
        return self.config.num_generations * min(self.config.rows_per_epoch or len(self._rows), len(self._rows))

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        meta = meta or {}
        if run_id in self._runs:
            raise TrajectoryError(f"run {run_id} is already being collected: finalize it first")
        ignore: Callable[[Any], None] = lambda _: None  # noqa: E731
        self._last_epoch = meta.get("epoch", self._last_epoch + 1)
        callbacks = meta.get("on_episode") or ignore, meta.get("on_group") or ignore
        collection = _Collection(self._last_epoch, *callbacks, meta.get("vocab_size"), meta.get("finished") or [])
        self._runs[run_id] = collection
        watchdog = watchdog_of(self._full_config)
        collecting = watchdog.watch(lambda: self._collect(run_id, collection, watchdog))
        collection.task = asyncio.create_task(collecting, name=f"collect {run_id}")

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        collection = self._runs.get(run_id)
        if collection is None or collection.task is None:
            raise TrajectoryError(f"run {run_id} has not been started")
        try:
            await collection.task
        finally:
            collection.task.cancel()
            await asyncio.gather(collection.task, return_exceptions=True)
            del self._runs[run_id]
        order = sorted(collection.groups)  # the order of completion differs between runs; training must not
        dropped: Counter[str] = Counter()
        for record in collection.groups.values():
            dropped.update(record.dropped)
        trajectories = [t for row_id in order if (t := collection.groups[row_id].trajectories)]
        rewards = [t.reward for group in trajectories for t in group]
        if not trajectories:  # a plugin's trainer may ignore an empty collection
            what = "preference pair" if self.makes_pairs else "episode"
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
            why = f"the first error: {collection.first_error}" if collection.first_error else f"dropped: {reasons}"
            logger.warning("run %s: no %s can be trained on; %s", run_id, what, why)
        return TrajectoryCollection(
            trajectories=trajectories,
            run_id=run_id,
            epoch=collection.epoch,
            dropped=dict(dropped),
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Cancels running collections."""
        for collection in self._runs.values():
            if collection.task is not None:
                collection.task.cancel()
                await asyncio.gather(collection.task, return_exceptions=True)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("run %s: collected %s", run_id, metrics)

    def rows_of_epoch(self, epoch: int) -> list[EvalInputItem]:
        size = min(self.config.rows_per_epoch or len(self._rows), len(self._rows))
        return rows_of_epoch(self._rows, size, epoch, self._full_config.general.seed)

    @property
    def _reward_function(self) -> RewardFunctionConfig | None:
        return self.run_config.reward_function if self.needs_reward else None

    async def _evaluators_and_options(self) -> tuple[dict[str, EvaluatorInfo], EpisodeOptions]:
        """The evaluators of training episodes, that of the reward first, and how the episodes are run."""
        monitored = self.run_config.training_evaluators
        others = self._full_config.names(EVALUATOR) if monitored is None else monitored
        names = dict.fromkeys((*([self._reward_function.name] if self._reward_function else ()), *others))
        evaluators = {name: await self._builder.get_evaluator(name) for name in names}
        service = self.run_config.run_configuration
        result = ResultPath.parse(service.result_json_path) if service else None
        targets = self.run_config.target_functions
        options = EpisodeOptions.of(
            self._full_config, self._full_config.trained_llms(), result, self.needs_token_ids, targets
        )
        return evaluators, options

    async def rehearse(self, run_id: str) -> str | None:
        """Plays and scores one row, as epoch 0. If its evaluator fails, up to two more.

        Returns what went wrong; raises PluginError if the evaluator fails on all of them and failures are excluded.
        """
        if self.stored is not None:
            return None
        watchdog = watchdog_of(self._full_config)
        return await watchdog.watch(lambda: self._rehearse(run_id, watchdog))

    async def _rehearse(self, run_id: str, watchdog: Watchdog) -> str | None:
        evaluators, options = await self._evaluators_and_options()
        service, episode = self.run_config.run_configuration, None
        async with open_workflow(self._builder, service, self._full_config.trained_llms(), current_run()) as attempt:
            for row in self.rows_of_epoch(1)[:_REHEARSED_ROWS]:
                key = EpisodeKey(run_id, 0, str(row.id), 0)
                with watchdog.waiting(f"{key.label()}, played before the first epoch", lambda: "it begins"):
                    episode = await run_episode(attempt, row, key, options)
                    await self._reward(episode, row, evaluators)
                if episode.reason is not DropReason.EVALUATOR_ERROR:
                    break
        if episode is None or episode.reason is None:
            return None
        problem = f"row {episode.key.row_id!r}, played once before the first epoch: {episode.reason}: {episode.error}"
        if episode.reason is DropReason.EVALUATOR_ERROR and self._on_failure == "exclude":
            raise PluginError(f"no row could be scored, so nothing can be trained; {problem}")
        return problem

    async def _collect(self, run_id: str, collection: _Collection, watchdog: Watchdog) -> None:
        """Runs the epoch's rows x generations, waits for episodes, and passes each group on with its last episode."""
        if self.stored is not None:
            await self._read_stored(self.stored, run_id, collection)
            return
        evaluators, options = await self._evaluators_and_options()
        for episode in collection.finished:
            self._add(episode, collection)
        finished = {episode.key.member for episode in collection.finished}
        tasks = [
            (row, EpisodeKey(run_id, collection.epoch, str(row.id), generation))
            for row in self.rows_of_epoch(collection.epoch)
            for generation in range(self.config.num_generations)
            if (str(row.id), generation) not in finished
        ]

        async def finish(row: EvalInputItem, episode: Episode) -> None:
            self._check_vocabulary(episode, collection.vocab_size)
            await self._reward(episode, row, evaluators)

        service, limit = self.run_config.run_configuration, self._full_config.max_concurrency
        collecting = collect(self._builder, tasks, options, service, finish, current_run(), limit, watchdog)
        async with aclosing(collecting) as episodes:
            async for episode in episodes:  # each has an outcome, or `collect` raises: every group becomes complete
                self._add(episode, collection)

    def _add(self, episode: Episode, collection: _Collection) -> None:
        """Passes a finished episode on, and its group if it is the last of it."""
        collection.on_episode(episode)
        group = collection.waiting.setdefault(episode.key.row_id, [])
        group.append(episode)
        if len(group) == self.config.num_generations:
            self._complete(collection.waiting.pop(episode.key.row_id), collection)

    async def _read_stored(self, stored: StoredRun, run_id: str, collection: _Collection) -> None:
        """Passes on the recorded groups of an epoch."""
        async for group in stored.replay(run_id, collection.epoch):
            for episode in group:
                self._check_vocabulary(episode, collection.vocab_size)
                collection.on_episode(episode)
            self._complete(group, collection)

    def _complete(self, group: list[Episode], collection: _Collection) -> None:
        record = self._group(group)
        for member in group:
            member.steps = []  # no longer needed; an epoch of steps would not fit into memory
        collection.groups[record.row_id] = record._replace(episodes=[])
        collection.first_error = collection.first_error or next((e.error for e in group if e.error), None)
        collection.on_group(record)

    async def _reward(self, episode: Episode, row: EvalInputItem, evaluators: Mapping[str, EvaluatorInfo]) -> None:
        """Scores an episode with all `evaluators`; the score of the reward function's becomes its reward."""
        if episode.outcome is Outcome.OK:
            await self._score(episode, row, evaluators)
        on_failure = self._on_failure
        if isinstance(on_failure, float) and episode.reason in _PENALIZED:
            episode.reward = on_failure
            if trained := self._trained(episode):  # charged to the last trained call, on top of the step rewards
                episode.step_rewards = episode.step_rewards or [0.0] * len(episode.calls)
                episode.step_rewards[trained[-1]] += on_failure

    @property
    def _on_failure(self) -> float | str:
        return self._reward_function.on_failure if self._reward_function is not None else "exclude"

    async def _score(self, episode: Episode, row: EvalInputItem, evaluators: Mapping[str, EvaluatorInfo]) -> None:
        """Sets the reward, or the reason and error if there is none."""
        item = row.model_copy(update={"output_obj": episode.output, "trajectory": episode.steps})
        limit = self._full_config.eval.scoring_limit(1)
        outputs = await asyncio.gather(*(score(info, key, [item], limit) for key, info in evaluators.items()))
        scored = {key: output.eval_output_items[0] for key, output in zip(evaluators, outputs, strict=True)}
        given = scored.pop(self._reward_function.name) if self._reward_function is not None else None
        monitored = {key: self._monitored(key, other) for key, other in scored.items()}
        if self._reward_function is None or given is None:
            episode.scores = monitored
            return
        value, episode.reason, message = parse_score(given)
        episode.scores = {self._reward_function.name: value, **monitored}
        if episode.reason is not None:
            episode.error = message
            return
        reward = await self.compute_reward(given)
        if not is_reward(reward):
            episode.reason, episode.error = DropReason.NAN_SCORE, f"the reward is {reward}; {ALLOWED_REWARDS}"
            return
        steps = given.step_scores if given.step_scores is not None else episode.step_rewards
        if not all(map(is_reward, steps or ())):
            episode.reason, episode.error = DropReason.NAN_SCORE, f"the step rewards are {steps}; {ALLOWED_REWARDS}"
            episode.step_rewards = None
            return
        episode.reward, episode.reasoning = reward, given.reasoning
        if given.step_scores is not None:
            episode.step_rewards = given.step_scores
            targets = self.run_config.target_functions
            episode.rewarded_functions = sorted({credited_function(call.functions, targets) for call in episode.calls})

    def _check_vocabulary(self, episode: Episode, size: int | None) -> None:
        """Fails an episode with a token id that the model under training lacks; its backend would refuse the job."""
        if size is None or episode.outcome is not Outcome.OK:
            return
        for call in (episode.calls[index] for index in self._trained(episode)):
            highest = max(max(ids, default=0) for ids in (call.prompt_token_ids or (), call.token_ids or ()))
            if highest >= size:
                problem = f"{call.model!r} returned the token id {highest}; the vocabulary ends at {size - 1}"
                fail(episode, DropReason.CAPTURE_ERROR, CaptureError(problem))
                episode.reward = None

    def _monitored(self, evaluator: str, output: EvalOutputItem) -> float | None:
        """A score that is not the reward; warns of the first one that is missing."""
        value, _, message = parse_score(output)
        if message is not None and evaluator not in self._unscored:
            self._unscored.add(evaluator)
            logger.warning("the evaluator %s gave an episode of training no score: %s", evaluator, message)
        return value

    def _group(self, episodes: list[Episode]) -> GroupRecord:
        episodes.sort(key=lambda e: e.key.generation)
        trajectories, dropped = self._trajectories(episodes)
        return GroupRecord(episodes[0].key.row_id, episodes, trajectories, dropped)

    def _trajectories(self, episodes: list[Episode]) -> tuple[list[Trajectory], Counter[str]]:
        """The trajectories of a complete group, and how much of it was dropped, by reason."""
        dropped: Counter[str] = Counter()
        trajectories = []
        for episode in episodes:
            trajectory = self._trajectory(episode) if episode.reward is not None else None
            if trajectory is None:
                dropped[str(episode.reason or DropReason.NO_SCORE)] += 1
            else:
                trajectories.append(trajectory)
        return trajectories, dropped

    def _trained(self, episode: Episode) -> list[int]:
        run = self.run_config
        return targeted_calls(episode.calls, run.target_functions, run.target_model, self._full_config.trained_llms())

    def _trajectory(self, episode: Episode) -> Trajectory | None:
        """The episode as a trajectory; None, with the reason set, if it has no trained call."""
        trained = self._trained(episode)
        if not trained:
            if episode.reason is None:
                episode.reason = DropReason.NO_TARGET_CALLS if episode.calls else DropReason.NO_CALLS
                trained_llms, targets = self._full_config.trained_llms(), self.run_config.target_functions
                episode.error = why_untargeted(episode.calls, targets, trained_llms)
            return None
        return as_trajectory(episode, trained)


@register_trajectory_builder(config_type=EpisodesBuilderConfig)
async def episodes_builder(config: EpisodesBuilderConfig, builder: Builder) -> AsyncIterator[EpisodesBuilder]:
    async with EpisodesBuilder(config, builder) as made:
        yield made
