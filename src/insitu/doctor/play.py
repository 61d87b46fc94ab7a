"""Plays a few rows as epoch 1 would, trains on them once, and judges what it saw."""

import asyncio
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from insitu.config import Config, load_config
from insitu.doctor.episodes import about_calls, about_failures, about_lengths, about_scores
from insitu.doctor.estimate import Estimate, Measures, about_disk, checkpoint_sizes, estimate
from insitu.doctor.evidence import Evidence, Rescored, is_random
from insitu.doctor.findings import Finding, Severity, will_learn, worst_first
from insitu.doctor.groups import about_groups
from insitu.doctor.plan import Plan, about_rows, about_settings
from insitu.doctor.prefixes import Decoder, about_prefixes
from insitu.errors import BackendError, ConfigError, InsituError, PluginError
from insitu.evaluation.evaluators import parse_score, score
from insitu.interfaces import TrainerAdapter
from insitu.registry import TRAJECTORY_BUILDER
from insitu.schemas.episodes import Episode, Outcome
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import FinetuneRunConfig, TrainingStatusEnum, TrajectoryCollection
from insitu.training.checks import check_sampled
from insitu.training.inspection import load_decoder
from insitu.training.jobs import wait_for_job
from insitu.training.loop import InsituTrainer
from insitu.training.metrics import collected_metrics
from insitu.training.progress import new_run_id
from insitu.training.runtime import ReadyRun, check_ready, prepared, ready_run
from insitu.training.store import BACKEND_FOLDER
from insitu.training.traffic import PolicyTraffic
from insitu.trajectories.builder import EpisodesBuilder, GroupRecord
from insitu.trajectories.config import CollectingBuilderConfig
from insitu.trajectories.recovery import with_recovered_calls

_ROWS = 8
_EPISODES = 64
_RESCORED = 16
"""Outputs that are scored a second time."""


@dataclass(frozen=True)
class Budget:
    """What may be played: at most so many episodes, for so many seconds. None: 8 rows, and at most 64 episodes."""

    episodes: int | None = None
    seconds: float = 120.0

    def rows_and_generations(self, generations: int) -> tuple[int, int]:
        episodes = self.episodes or min(_ROWS * generations, _EPISODES)
        generations = min(generations, episodes)
        return max(1, episodes // generations), generations


@dataclass
class Diagnosis:
    """`played` are the numbers behind the findings, with the names of `training_metrics.jsonl`."""

    findings: list[Finding]
    estimate: Estimate
    budget: dict[str, Any]
    played: dict[str, Any] = field(default_factory=dict)

    @property
    def will_learn(self) -> bool:
        return will_learn(self.findings)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def examine(request: FinetuneRunConfig, budget: Budget) -> Diagnosis:
    """Plays, trains and judges; writes nothing into the folder of the run.

    Raises what `finetune` raises at its start.
    """
    started = time.perf_counter()
    config = load_config(request.config_file, request.override)
    check_ready(config)
    config = await prepared(request.model_copy(update={"config_file": config, "override": ()}))
    plan, output_dir = Plan.of(config), config.finetuning.output_dir
    rows, generations = _limit(config, plan, budget)
    with TemporaryDirectory(prefix="insitu-doctor-") as scratch:
        finetuning = config.finetuning.model_copy(update={"output_dir": Path(scratch)})
        async with ready_run(config, finetuning, Console(quiet=True)) as ready:
            examination = _Examination(ready, config, plan, budget, Path(scratch))
            examination.start_seconds = time.perf_counter() - started
            evidence = await examination.play()
            await examination.rescore(evidence)
            await examination.train(evidence)
            measures, decode = examination.measures(evidence), examination.decoder()
            plan, keep = examination.plan, getattr(ready.adapter.adapter_config, "keep", None)
    estimated = estimate(plan, measures, keep, output_dir)
    findings = worst_first([*judge(plan, evidence, decode), *about_disk(plan, estimated, output_dir)])
    limits = {"rows": rows, "generations": generations, "seconds": budget.seconds}
    used = {"episodes_played": len(evidence.episodes), "seconds_played": evidence.seconds}
    return Diagnosis(findings, estimated, {**limits, **used}, _played(evidence))


def judge(plan: Plan, evidence: Evidence, decode: Decoder | None = None) -> Iterator[Finding]:
    """All findings about a run but those about its disk."""
    calls = [*about_calls(plan, evidence)]
    yield from about_settings(plan)
    yield from about_rows(plan, random_environment=is_random(evidence.groups))
    yield from calls
    yield from about_failures(plan, evidence, calls)
    groups = [*about_groups(plan, evidence)]
    yield from groups
    codes = {finding.code for finding in groups}
    yield from (finding for finding in about_lengths(plan, evidence) if finding.code not in codes)
    yield from about_scores(plan, evidence)
    yield from about_prefixes(plan, evidence, decode)
    if evidence.job_problem is not None:
        change = "see the message; if the loss or a gradient is not finite, lower learning_rate"
        where = f"{plan.adapter}.training"
        yield Finding("job_failed", Severity.STOPS_LEARNING, evidence.job_problem, where, change)
    if evidence.ended_early:
        ended, what = len(evidence.episodes), "the time was over before all episodes had ended"
        severity = Severity.NOTE if ended else Severity.STOPS_LEARNING
        change = "raise --seconds" + ("" if ended else ", or set an episode_timeout if the agent hangs")
        yield Finding("time_over", severity, f"{what}: {ended} did", "eval.general.episode_timeout", change)


def _limit(config: Config, plan: Plan, budget: Budget) -> tuple[int, int]:
    """Limits the rows and generations of the file's trajectory builder; raises ConfigError if it has no limits."""
    name = str(config.finetuning.trajectory_builder)
    block = config.block(TRAJECTORY_BUILDER, name)
    if not isinstance(block, CollectingBuilderConfig):
        raise ConfigError(
            f"trajectory_builders.{name} ({block.type}) has no num_generations and rows_per_epoch, so that no few rows "
            "can be played; `insitu validate` checks the rest of the file"
        )
    rows, generations = budget.rows_and_generations(block.num_generations)
    rows = min(rows, plan.rows_per_epoch) or rows
    limits = {"rows_per_epoch": rows, "num_generations": generations}
    config.blocks[TRAJECTORY_BUILDER.section, name] = block.model_copy(update=limits)
    return rows, generations


class _Examination:
    """A run in a temporary folder, of which one epoch is played and trained."""

    def __init__(self, ready: ReadyRun, config: Config, plan: Plan, budget: Budget, scratch: Path) -> None:
        self._trainer, self._adapter, self._builder = ready.trainer, ready.adapter, ready.builder
        self._config = config
        self._budget = budget
        self._scratch = scratch
        self._steps: dict[str, tuple[Episode, list[Any]]] = {}
        self._job: tuple[float, float, int] | None = None
        self._bytes: int | None = None
        self.plan = plan
        self.start_seconds = 0.0

    async def play(self) -> Evidence:
        """Plays the rows until they or the time are over.

        As in a run, a row is played before them, for which clients are imported and connections opened.
        """
        run_id = new_run_id()
        served = await self._adapter.policy_endpoint() if isinstance(self._adapter, TrainerAdapter) else None
        nothing = TrajectoryCollection(trajectories=[], run_id=run_id, epoch=1)
        evidence = Evidence(nothing, nothing, served=served)
        records: list[GroupRecord] = []
        traffic = PolicyTraffic(self._builder, served)

        def on_episode(episode: Episode) -> None:
            traffic.add(episode)
            evidence.episodes.append(episode)
            self._steps[episode.key.text()] = episode, episode.steps

        meta = {
            "epoch": 1,
            "vocab_size": served.vocab_size if served is not None else None,
            "on_episode": on_episode,
            "on_group": records.append,
        }
        builder, began = self._trainer.trajectory_builder, time.perf_counter()
        try:
            async with asyncio.timeout(self._budget.seconds) as limit:
                with suppress(PluginError):  # no row could be scored: the episodes say so, too
                    await builder.rehearse(run_id)
                self.start_seconds += time.perf_counter() - began
                await traffic.start()
                began = time.perf_counter()
                await builder.start_run(run_id, meta)
                await builder.finalize(run_id, meta)
        except TimeoutError:
            if not limit.expired():
                raise
            evidence.ended_early = True
        evidence.seconds = time.perf_counter() - began
        if not evidence.ended_early:  # what was cancelled was requested, too
            evidence.leftovers, evidence.traffic_problem = await traffic.finish()
        self._record(records)
        self._collect(evidence, records, run_id)
        return evidence

    def _record(self, records: list[GroupRecord]) -> None:
        """Writes the groups as a run does, for their size."""
        if isinstance(self._trainer, InsituTrainer):
            for record in records:
                self._trainer.store.append_group(record, 1)
            self._bytes = sum(self._trainer.store.sizes().values())

    def _collect(self, evidence: Evidence, records: list[GroupRecord], run_id: str) -> None:
        """Adds the collection, and what would be trained of it."""
        groups = [r.trajectories for r in sorted(records, key=lambda r: r.row_id) if r.trajectories]
        dropped: dict[str, int] = {}
        for record in records:
            for reason, count in record.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + count
        collection = TrajectoryCollection(trajectories=groups, run_id=run_id, epoch=1, dropped=dropped)
        evidence.collection = evidence.selected = with_recovered_calls(collection, run_id, 1)
        trainer = self._trainer
        if not isinstance(trainer, InsituTrainer):
            return
        self.plan = self._with_training_settings()
        evidence.compares_groups, evidence.makes_pairs = trainer.needs.groups, trainer.needs.pairs
        try:
            check_sampled(trainer, trainer.needs, evidence.collection, evidence.served)
        except BackendError as error:
            evidence.sampled_problem = str(error)
        if trainer.trains_every_epoch:
            evidence.selected = trainer.select(evidence.collection).collection

    def _with_training_settings(self) -> Plan:
        return replace(self.plan, training=self._adapter.training_settings())

    async def rescore(self, evidence: Evidence) -> None:
        """Scores some outputs a second time."""
        builder, reward = self._trainer.trajectory_builder, self.plan.reward
        if reward is None or not isinstance(builder, EpisodesBuilder) or builder.stored is not None:
            return
        rows = {str(row.id): row for row in builder.rows_of_epoch(1)}
        played = [each for each in self._steps.values() if reward in each[0].scores and each[0].outcome is Outcome.OK]
        again = (self._score(*each, rows, reward) for each in played[:_RESCORED])
        evidence.rescored = await asyncio.gather(*again)

    async def _score(self, episode: Episode, steps: list[Any], rows: dict[str, EvalInputItem], reward: str) -> Rescored:
        info = await self._builder.get_evaluator(reward)
        item = rows[episode.key.row_id].model_copy(update={"output_obj": episode.output, "trajectory": steps})
        output = await score(info, reward, [item], self._config.eval.scoring_limit(1))
        value, _, _ = parse_score(output.eval_output_items[0])
        return Rescored(episode.key.label(), episode.scores[reward], value)

    async def train(self, evidence: Evidence) -> None:
        """Trains once on what was played, if the backend belongs to this examination."""
        adapter = self._adapter
        owned = isinstance(adapter, TrainerAdapter) and adapter.backend_pid is not None
        trained = sum(map(len, evidence.selected.trajectories))
        if not owned or not trained or evidence.sampled_problem is not None:
            return
        started = time.perf_counter()
        try:
            ref = await adapter.submit(evidence.selected)
            status = await wait_for_job(adapter, ref, self._config)
        except InsituError as error:
            evidence.job_problem = f"a training job on the episodes failed: {error}"
            return
        if status.status is not TrainingStatusEnum.COMPLETED:
            evidence.job_problem = f"a training job on the episodes failed: {status.message or 'no reason given'}"
            return
        seconds = float((status.metadata or {}).get("seconds", 0.0))
        self._job = time.perf_counter() - started, seconds, trained

    def measures(self, evidence: Evidence) -> Measures:
        """Read while the backend runs."""
        job, training, trained = self._job or (None, 0.0, 0)
        sizes = checkpoint_sizes(self._scratch / BACKEND_FOLDER / "checkpoints")
        pid = self._adapter.backend_pid if isinstance(self._adapter, TrainerAdapter) else None
        return Measures(
            start=self.start_seconds,
            playing=evidence.seconds,
            episodes=len(evidence.episodes),
            collected=sum(map(len, evidence.groups)),
            job=job,
            job_training=training,
            trained_episodes=trained,
            memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            backend_memory=peak_memory(pid) if pid is not None else None,
            stored=self._bytes,
            weights=sizes[0] if sizes is not None else None,
            optimizer=sizes[1] if sizes is not None else 0,
        )

    def decoder(self) -> Decoder | None:
        """That of the model, once a checkpoint has been written."""
        files = (self._scratch / BACKEND_FOLDER / "checkpoints").glob("*/tokenizer.json")
        folder = next((file.parent for file in files), None)
        try:
            return load_decoder(folder) if folder is not None else None
        except ConfigError:  # tokenizers is not installed: token ids are shown
            return None


def peak_memory(pid: int) -> int | None:
    """The highest resident memory of a process and its children so far, in bytes; None if the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return None
    own = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    return own + sum(filter(None, map(peak_memory, children)))


def _played(evidence: Evidence) -> dict[str, Any]:
    """The numbers of what was played."""
    calls = [call for call in evidence.answers if call.prompt_token_ids is not None]
    prompts = [len(call.prompt_token_ids or ()) for call in calls]
    metrics = collected_metrics(evidence.groups)
    return {
        **metrics,
        "prompts_max_length": max(prompts, default=None),
        "completions_max_length": max((len(call.token_ids or ()) for call in calls), default=None),
        "context_length": evidence.served.max_length if evidence.served is not None else None,
        "failed_episodes": sum(episode.reason is not None for episode in evidence.episodes),
    }
