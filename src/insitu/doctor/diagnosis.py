"""Examines a file: plays a few rows as epoch 1 would, trains on them once, and judges what was seen."""

import asyncio
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from insitu.builder import Builder
from insitu.collect.collector import Observer, stray_completions
from insitu.collect.collector import Plan as EpochPlan
from insitu.collect.conversations import collection_of
from insitu.collect.evaluators import parse_score, score
from insitu.collect.shared_run import share
from insitu.config import Config, changed_config
from insitu.disk.files import nearest_folder, new_draft
from insitu.disk.json_files import write_json
from insitu.disk.memory import numbers
from insitu.doctor.estimate import Estimate, Measures, about_disk, checkpoint_sizes, estimate
from insitu.doctor.findings import Evidence, Finding, Rescored, will_learn, worst_first
from insitu.doctor.judgements import Decoder, judge, rows_per_episode
from insitu.doctor.plan import Plan
from insitu.errors import BackendError, ConfigError, InsituError, PluginError, TrajectoryError
from insitu.gateway.workspace_config import WorkspaceKeys
from insitu.runs.episodes import load_decoder
from insitu.runs.files import CHECKPOINTS, GROUPS
from insitu.runs.records import new_run_id
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import DropReason, Episode, EpisodeStatus
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import FinetuneRunConfig, TrainingStatusEnum, TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.schemas.kinds import TRAJECTORY_BUILDER
from insitu.training.budget import KnownGroups
from insitu.training.episodes_builder import CollectingBuilderConfig, EpisodesBuilder
from insitu.training.interfaces import GroupTrainer, PairTrainer, SingleJobTrainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.jobs import wait_for_job
from insitu.training.loop import LoopTrainer
from insitu.training.memory_plan import MemoryPlan, check_memory
from insitu.training.metrics import collected_metrics, most_frequent_answers
from insitu.training.runtime import ReadyRun, prepared, ready_run
from insitu.training.schedule import check_sampled, collected
from insitu.training.trainers import InsituTrainer

_ROWS = 8
_EPISODES = 64
_FIRST = 10
"""The first episode may take this part of the time, if another one is to be measured."""
_SECONDS = 120.0
_RESCORED = 16
"""Outputs that are scored a second time."""


@dataclass(frozen=True)
class Budget:
    """What may be played: at most so many episodes, for so many seconds.

    None: 8 rows, and at most 64 episodes; for two minutes, or longer with a slow model.
    """

    episodes: int | None = None
    seconds: float | None = None

    def limit(self, first: float = 0.0) -> float:
        """The seconds that may be played, if the first row was played in `first`."""
        return self.seconds or max(_SECONDS, _FIRST * first)

    def rows_and_generations(self, generations: int) -> tuple[int, int]:
        episodes = self.episodes or min(_ROWS * generations, _EPISODES)
        generations = min(generations, episodes)
        return max(1, episodes // generations), generations


async def _rehearse(builder: TrajectoryBuilder, run_id: str) -> float:
    """The seconds for which one row is played."""
    began = time.perf_counter()
    with suppress(PluginError):  # no row could be scored: the episodes that are played next say so, too
        await builder.rehearse(run_id)
    return time.perf_counter() - began


class _Played(Observer):
    """Keeps what was played: of a collection that takes too long, too."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.groups: list[GroupRecord] = []
        self.plan: EpochPlan | None = None

    def on_episode(self, episode: Episode) -> None:
        self._evidence.episodes.append(episode)

    def on_group(self, group: GroupRecord) -> None:
        self.groups.append(group)

    def so_far(self) -> list[GroupRecord]:
        """The complete groups, and of the others of a plan those episodes that have ended."""
        complete = {episode.key for group in self.groups for episode in group.episodes}
        if self.plan is None:
            return self.groups
        others: dict[str, list[Episode]] = {}
        for episode in self._evidence.episodes:
            if episode.key not in complete:
                row_id = episode.key.row_id
                others.setdefault(self.plan.group_of.get(row_id, row_id), []).append(episode)
        return [*self.groups, *map(self.plan.group, others.values())]


class Examination:
    """A run in a temporary folder, of which one epoch is played and trained."""

    def __init__(
        self, ready: ReadyRun, config: Config, plan: Plan, budget: Budget, scratch: Path, start: float
    ) -> None:
        self._state, self._builder, self._trainer, self._adapter = ready
        self._config = config
        self._budget = budget
        self._scratch = scratch
        self.plan = plan
        self.measures = Measures(start)
        self.seconds = budget.limit()
        """How long may be played."""

    async def play(self) -> Evidence:
        """Plays the rows until they or the time are over.

        As in a run, a row is played before them, for which clients are imported and connections opened.
        """
        run_id = new_run_id()
        served = await self._adapter.policy_endpoint() if isinstance(self._adapter, TrainerAdapter) else None
        collection = TrajectoryCollection(trajectories=[], run_id=run_id, epoch=1)
        evidence = Evidence(collection, collection, served=served)
        played = _Played(evidence)
        builder, began = self._trainer.trajectory_builder, time.perf_counter()
        try:
            async with asyncio.timeout(self.seconds) as limit:
                self.measures.start += (first := await _rehearse(builder, run_id))
                evidence.first = first if builder.plans_episodes else None
                self.seconds = self._budget.limit(first)
                limit.reschedule(asyncio.get_running_loop().time() + self.seconds - first)
                if self.plan.concurrency > (builder.episodes_per_epoch or 0) and first < self.seconds / _FIRST:
                    self.measures.alone = await _rehearse(builder, run_id)
                stray, began = stray_completions(self._builder).total(), time.perf_counter()
                plan = builder.plan(run_id, 1, KnownGroups(self._scratch / GROUPS))
                if plan is not None:
                    teacher = self._trainer.teacher if isinstance(self._trainer, InsituTrainer) else None
                    vocab_size = served.vocab_size if served is not None else None
                    plan = replace(plan, vocab_size=vocab_size, budget=None, teacher=teacher)  # groups are judged whole
                played.plan = plan
                collection = await collected(builder, plan, self._state, [played], run_id=run_id, epoch=1)
                evidence.stray_completions = stray_completions(self._builder).total() - stray
        except TimeoutError:
            if not limit.expired():
                raise
            evidence.ended_early, collection = True, collection_of(played.so_far(), run_id, 1)
        self.measures.playing = time.perf_counter() - began
        if (groups := played.so_far()) and isinstance(self._trainer, LoopTrainer):  # written for their size
            for group in groups:
                self._trainer.store.append_group(group, 1)
            self.measures.stored = sum(self._trainer.store.sizes().values())
        self._judge_as_trainer(evidence, collection)
        return evidence

    def _judge_as_trainer(self, evidence: Evidence, collection: TrajectoryCollection) -> None:
        """Adds the collection, what would be trained of it, and the settings that only live components know."""
        evidence.collection = evidence.selected = collection
        trainer, builder = self._trainer, self._trainer.trajectory_builder
        groups, plan = collection.trajectories, self.plan
        if not isinstance(builder, EpisodesBuilder):
            self.plan = replace(plan, generations=max(map(len, groups), default=1))
        elif plan.replays:  # all of its episodes have been read
            self.plan = replace(plan, rows_per_epoch=len(groups), generations=max(map(len, groups), default=1))
        if not isinstance(trainer, LoopTrainer):
            return
        self.plan = replace(self.plan, training=self._adapter.training_settings())
        evidence.compares_groups = isinstance(trainer, GroupTrainer) and trainer.compares_episodes
        evidence.makes_pairs = isinstance(trainer, PairTrainer)
        try:
            check_sampled(trainer, evidence.collection, evidence.served)
        except (BackendError, TrajectoryError) as error:
            evidence.sampled_problem = str(error)
        if not isinstance(trainer, SingleJobTrainer):
            try:
                evidence.selected = trainer.select(evidence.collection).collection
            except TrajectoryError as error:
                evidence.job_problem = f"the episodes cannot be trained: {error}"

    async def rescore(self, evidence: Evidence) -> None:
        """Scores some outputs a second time."""
        builder, reward = self._trainer.trajectory_builder, self.plan.reward
        if reward is None or not isinstance(builder, EpisodesBuilder) or builder.stored is not None:
            return
        rows = {str(row.id): row for row in builder.rows_of_epoch(1)}
        scored = [e for e in evidence.episodes if e.outcome is EpisodeStatus.OK and e.scores.get(reward) is not None]
        again = (self._score(episode, rows, reward) for episode in scored[:_RESCORED])
        with suppress(TimeoutError):  # what is known of a slow evaluator is how slow it is
            async with asyncio.timeout(self.seconds):
                evidence.rescored = await asyncio.gather(*again)

    async def _score(self, episode: Episode, rows: dict[str, EvalInputItem], reward: str) -> Rescored:
        info = await self._builder.get_evaluator(reward)
        item = episode.fill(rows[episode.key.row_id].model_copy())
        output = await score(info, reward, [item], self._config.eval.scoring_limit(1))
        value, _, _ = parse_score(output.eval_output_items[0])
        return Rescored(episode.key.label(), episode.scores[reward], value)

    async def train(self, evidence: Evidence) -> None:
        """Trains once on what was played, if the backend belongs to this examination."""
        adapter = self._adapter
        owned = isinstance(adapter, TrainerAdapter) and adapter.backend_pid is not None
        trained = sum(map(len, evidence.selected.trajectories))
        if not owned or not trained or evidence.sampled_problem or evidence.job_problem:
            return
        started = time.perf_counter()
        try:
            ref = await adapter.submit(evidence.selected)
            status = await wait_for_job(adapter, ref, self._state.watchdog)
        except InsituError as error:
            evidence.job_problem = f"a training job on the episodes failed: {error}"
            return
        if status.status is not TrainingStatusEnum.COMPLETED:
            evidence.job_problem = f"a training job on the episodes failed: {status.message or 'no reason given'}"
            return
        metrics = status.metadata or {}
        if self.plan.training.get("method") == "grpo":
            evidence.job_kl, evidence.job_gap = metrics.get("kl"), metrics.get("reference_gap")
        self.measures.job = time.perf_counter() - started
        self.measures.job_training = float(metrics.get("seconds", 0.0))
        self.measures.trained_episodes = trained

    def measure(self, evidence: Evidence) -> None:
        """Adds what can be read while the backend runs."""
        measures, adapter = self.measures, self._adapter
        measures.collected = sum(map(len, evidence.groups))
        measures.episodes = len(evidence.episodes) or measures.collected
        if evidence.episodes:
            measures.together = fmean(episode.seconds for episode in evidence.episodes)
        pid = adapter.backend_pid if isinstance(adapter, TrainerAdapter) else None
        measures.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        measures.backend_memory = peak_memory(pid) if pid is not None else None

    def measure_checkpoint(self) -> Measures:
        """Adds the sizes of the checkpoint, which is written at the latest when the backend ends."""
        self.measures.weights, self.measures.optimizer = checkpoint_sizes(self._scratch / CHECKPOINTS)
        return self.measures

    def decoder(self) -> Decoder | None:
        """The decoder of the model's tokenizer, once a checkpoint has been written."""
        files = (self._scratch / CHECKPOINTS).glob("*/tokenizer.json")
        folder = next((file.parent for file in files), None)
        try:
            return load_decoder(folder) if folder is not None else None
        except ConfigError:  # tokenizers is not installed: token ids are shown
            return None


def peak_memory(pid: int) -> int | None:
    """The highest resident memory of a process and its children so far, in bytes; None if the system does not say."""
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return None
    own = numbers(Path(f"/proc/{pid}/status")).get("VmHWM", 0) * 1024
    return own + sum(filter(None, map(peak_memory, children)))


@dataclass
class Diagnosis:
    """`played` are the numbers behind the findings, with the names of `training_metrics.jsonl`."""

    findings: list[Finding]
    estimate: Estimate
    memory: MemoryPlan | None
    budget: dict[str, Any]
    played: dict[str, Any] = field(default_factory=dict)

    @property
    def will_learn(self) -> bool:
        return will_learn(self.findings)


async def examine(request: FinetuneRunConfig, budget: Budget) -> Diagnosis:
    """Plays, trains and judges; writes nothing into the folder of the run.

    Raises what `finetune` raises at its start.
    """
    started = time.perf_counter()
    config, request = await prepared(request)
    plan, output_dir = Plan.of(config, request.dataset), config.finetuning.output_dir
    memory = await _memory_plan(config, request)
    with _scratch_beside(output_dir) as scratch:
        config, request, rows, generations = _limited(config, request, plan, budget, scratch)
        async with ready_run(config, request, Console(quiet=True), scratch) as ready:
            examination = Examination(ready, config, plan, budget, scratch, time.perf_counter() - started)
            evidence = await examination.play()
            await examination.rescore(evidence)
            await examination.train(evidence)
            examination.measure(evidence)
            plan = examination.plan
            keep = ready.adapter.adapter_config.keeps if isinstance(ready.adapter, TrainerAdapter) else None
        measures, decode = examination.measure_checkpoint(), examination.decoder()
    estimated = estimate(plan, measures, keep, output_dir, memory)
    findings = worst_first([*judge(plan, evidence, decode), *about_disk(plan, estimated, output_dir)])
    if plan.replays:
        rows, generations = plan.rows_per_epoch, plan.generations
    limits = {"rows": rows, "generations": generations, "seconds": examination.seconds}
    used = {"episodes_played": measures.episodes, "seconds_played": measures.playing}
    return Diagnosis(findings, estimated, memory, {**limits, **used}, _played(evidence))


async def _memory_plan(config: Config, request: FinetuneRunConfig) -> MemoryPlan | None:
    """Memory plan of the run that the file describes. Raises like `finetune` if the run does not fit."""
    async with Builder(config, request=request) as builder:
        with share(builder):
            adapter = await builder.get_trainer_adapter(str(config.finetuning.trainer_adapter))
            return check_memory(adapter.memory_plan() if isinstance(adapter, TrainerAdapter) else None, free=True)


@contextmanager
def _scratch_beside(output_dir: Path) -> Iterator[Path]:
    """A temporary folder on the disk of the run, which has to have space for a checkpoint. Raises ConfigError."""
    folder = nearest_folder(output_dir.absolute().parent)
    scratch = new_draft(folder / "insitu-doctor")
    try:
        scratch.mkdir()
    except OSError as error:
        raise ConfigError(f"finetuning.output_dir: {folder} cannot be written: {error.strerror}") from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _limited(
    config: Config, request: FinetuneRunConfig, plan: Plan, budget: Budget, scratch: Path
) -> tuple[Config, FinetuneRunConfig, int, int | None]:
    """The file and request with which its trajectory builder plays few rows and generations, and how many.

    A plugin's gets a dataset with a few rows, which it plays as often as it does. The files of its evaluations
    are written to `scratch`, too. No workspaces of agents are kept, which would be in the folder of the run.
    """
    changes: dict[tuple[str, ...], Any] = {
        (*(("workflow",) if name == WORKFLOW else (section, name)), "workspace", "keep"): "none"
        for (section, name), part in config.blocks.items()
        if isinstance(part, WorkspaceKeys) and part.workspace is not None
    }
    name = str(config.finetuning.trajectory_builder)
    block = config.block(TRAJECTORY_BUILDER, name)
    if isinstance(block, CollectingBuilderConfig):
        rows, generations = budget.rows_and_generations(block.num_generations)
        rows = min(rows, plan.rows_per_epoch) or rows
        limits = {"rows_per_epoch": rows, "num_generations": generations}
        section = TRAJECTORY_BUILDER.section
        limited = changed_config(config, changes | {(section, name, key): value for key, value in limits.items()})
        return limited, request, rows, generations
    rows = min(budget.rows_and_generations(1)[0], len(plan.rows))
    few = scratch / "rows.json"
    write_json(few, [row.full_dataset_entry for row in plan.rows[:rows]])
    limited = changed_config(config, changes | {("eval", "general", "output_dir"): str(scratch / "eval")})
    return limited, request.model_copy(update={"dataset": few}), rows, None


def _played(evidence: Evidence) -> dict[str, Any]:
    """The numbers of what was played."""
    calls = [call for call in evidence.answers if call.prompt_token_ids is not None]
    prompts = [len(call.prompt_token_ids or ()) for call in calls]
    metrics = collected_metrics(evidence.groups, evidence.scored)
    ended = (episode.output for episode in evidence.episodes if episode.outcome is EpisodeStatus.OK)
    outputs = Counter(output for output in ended if isinstance(output, str))  # of others, what the model has said
    if not (evidence.compares_groups or evidence.makes_pairs):
        metrics["frac_reward_zero_std"] = None  # a teacher judges each token, whatever the rewards
    return {
        **metrics,
        "most_frequent_answers": outputs.most_common(3) or most_frequent_answers(evidence.groups, 3),
        "rows_per_episode": rows_per_episode(evidence.groups),
        "prompts_max_length": max(prompts, default=None),
        "completions_max_length": max((len(call.token_ids or ()) for call in calls), default=None),
        "context_length": evidence.served.max_length if evidence.served is not None else None,
        "failed_episodes": sum(episode.reason not in (None, DropReason.NO_PAIR) for episode in evidence.episodes),
    }
