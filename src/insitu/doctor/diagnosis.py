"""Examines a file: plays and trains, and judges what was seen."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from insitu.config import Config, changed_config
from insitu.disk.json_files import write_json
from insitu.doctor.episodes import about_calls, about_failures, about_lengths, about_scores
from insitu.doctor.estimate import Estimate, about_disk, estimate, nearest_folder
from insitu.doctor.findings import Evidence, Finding, Severity, is_random, will_learn, worst_first
from insitu.doctor.groups import about_groups
from insitu.doctor.plan import Plan, about_rows, about_settings
from insitu.doctor.play import Budget, Examination
from insitu.doctor.prefixes import Decoder, about_prefixes, rows_per_episode
from insitu.errors import ConfigError
from insitu.registry import TRAJECTORY_BUILDER
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.training.episodes_builder import CollectingBuilderConfig
from insitu.training.metrics import collected_metrics
from insitu.training.runtime import prepared, ready_run


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
    config, request = await prepared(request)
    plan, output_dir = Plan.of(config, request.dataset), config.finetuning.output_dir
    with _scratch_beside(output_dir) as scratch:
        config, request, rows, generations = _limited(config, request, plan, budget, scratch)
        async with ready_run(config, request, Console(quiet=True), scratch) as ready:
            examination = Examination(ready, config, plan, budget, scratch, time.perf_counter() - started)
            evidence = await examination.play()
            await examination.rescore(evidence)
            await examination.train(evidence)
            examination.measure(evidence)
            measures, decode = examination.measures, examination.decoder()
            plan, keep = examination.plan, getattr(getattr(ready.adapter, "adapter_config", None), "keep", None)
    estimated = estimate(plan, measures, keep, output_dir)
    findings = worst_first([*judge(plan, evidence, decode), *about_disk(plan, estimated, output_dir)])
    if plan.replays:
        rows, generations = plan.rows_per_epoch, plan.generations
    limits = {"rows": rows, "generations": generations, "seconds": budget.seconds}
    used = {"episodes_played": measures.episodes, "seconds_played": evidence.seconds}
    return Diagnosis(findings, estimated, {**limits, **used}, _played(evidence))


@contextmanager
def _scratch_beside(output_dir: Path) -> Iterator[Path]:
    """A temporary folder on the disk of the run, which has to have space for a checkpoint. Raises ConfigError."""
    folder = nearest_folder(output_dir.absolute().parent)
    try:
        temporary = TemporaryDirectory(prefix=".insitu-doctor-", dir=folder)
    except OSError as error:
        raise ConfigError(f"finetuning.output_dir: {folder} cannot be written: {error.strerror}") from error
    with temporary:
        yield Path(temporary.name)


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
        ended = len(evidence.episodes) or sum(map(len, evidence.groups))
        what = f"the time was over before all episodes had ended: {ended} did"
        severity = Severity.NOTE if ended else Severity.STOPS_LEARNING
        change = "raise --seconds" + ("" if ended else ", or set an episode_timeout if the agent hangs")
        yield Finding("time_over", severity, what, "eval.general.episode_timeout", change)


def _limited(
    config: Config, request: FinetuneRunConfig, plan: Plan, budget: Budget, scratch: Path
) -> tuple[Config, FinetuneRunConfig, int, int | None]:
    """The file and request with which its trajectory builder plays few rows and generations, and how many.

    A plugin's gets a dataset with a few rows, which it plays as often as it does. The files of its evaluations
    are written to `scratch`, too.
    """
    name = str(config.finetuning.trajectory_builder)
    block = config.block(TRAJECTORY_BUILDER, name)
    if isinstance(block, CollectingBuilderConfig):
        rows, generations = budget.rows_and_generations(block.num_generations)
        rows = min(rows, plan.rows_per_epoch) or rows
        limits = {"rows_per_epoch": rows, "num_generations": generations}
        section = TRAJECTORY_BUILDER.section
        limited = changed_config(config, {(section, name, key): value for key, value in limits.items()})
        return limited, request, rows, generations
    rows = min(budget.rows_and_generations(1)[0], len(plan.rows))
    few = scratch / "rows.json"
    write_json(few, [row.full_dataset_entry for row in plan.rows[:rows]])
    limited = changed_config(config, {"eval.general.output_dir": str(scratch / "eval")})
    return limited, request.model_copy(update={"dataset": few}), rows, None


def _played(evidence: Evidence) -> dict[str, Any]:
    """The numbers of what was played."""
    calls = [call for call in evidence.answers if call.prompt_token_ids is not None]
    prompts = [len(call.prompt_token_ids or ()) for call in calls]
    metrics = collected_metrics(evidence.groups)
    return {
        **metrics,
        "rows_per_episode": rows_per_episode(evidence.groups),
        "prompts_max_length": max(prompts, default=None),
        "completions_max_length": max((len(call.token_ids or ()) for call in calls), default=None),
        "context_length": evidence.served.max_length if evidence.served is not None else None,
        "failed_episodes": sum(episode.reason is not None for episode in evidence.episodes),
    }
