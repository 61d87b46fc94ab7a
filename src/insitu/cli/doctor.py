"""The command `doctor`."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from insitu.cli import options
from insitu.wire.redaction import results_console

if TYPE_CHECKING:
    from insitu.doctor.diagnosis import Diagnosis
    from insitu.doctor.estimate import Estimate
    from insitu.schemas.finetuning import FinetuneRunConfig

_EPISODES = click.option(
    "--episodes", type=click.IntRange(min=2), help="Play at most so many; 8 rows and at most 64 by default."
)
_SECONDS = click.option(
    "--seconds",
    type=options.Number(min=1),
    help="Play at most for so long; by default for 120 s, or ten times as long as one row takes.",
)


@click.command("doctor")
@options.request("FinetuneRunConfig", _EPISODES, _SECONDS, options.as_json)
def command(request: "FinetuneRunConfig", episodes: int | None, seconds: float | None, as_json: bool) -> None:
    """Say whether a run will learn, and what it will cost: plays a few rows and trains on them once.

    Writes nothing into the run's folder. Exit code 1 if the run will not learn.
    """
    from insitu.doctor.diagnosis import Budget, examine
    from insitu.workflow.event_loop import run_async

    diagnosis = run_async(examine(request, Budget(episodes, seconds)))
    if as_json:
        click.echo(json.dumps(asdict(diagnosis), default=str))
    else:
        console = results_console()
        for line in _lines(diagnosis):
            console.print(line, markup=False, soft_wrap=True)
    click.get_current_context().exit(0 if diagnosis.will_learn else 1)


def _lines(diagnosis: "Diagnosis") -> Iterator[str]:
    """The findings, the worst first, and the estimate."""
    from insitu.disk.files import readable_bytes, readable_seconds

    for finding in diagnosis.findings:
        yield f"{finding.severity.replace('_', ' ')}: {finding.what}  [{finding.code}]"
        yield f"  where: {finding.where}"
        yield f"  change: {finding.change}"
    of, budget = diagnosis.estimate, diagnosis.budget
    generations = f" x {budget['generations']}" if budget["generations"] is not None else ""
    yield (
        f"played {budget['episodes_played']} episodes ({budget['rows']} rows{generations}, at most "
        f"{budget['seconds']:g} s) in {readable_seconds(budget['seconds_played'])}"
    )
    if (mean := diagnosis.played["avg_reward"]) is not None:
        alike = diagnosis.played["frac_reward_zero_std"]
        variance = "" if alike is None else f", variance in {100 * (1 - alike):.0f} % of groups"
        yield f"reward: {mean:.3g} on average{variance}"
    if answers := diagnosis.played["most_frequent_answers"]:
        yield f"most frequent answers: {', '.join(f'{text!r:.60} ({count})' for text, count in answers)}"
    roughly = diagnosis.memory.epoch_seconds if diagnosis.memory is not None else None
    yield f"time: {_time(of, roughly)}"
    if diagnosis.memory is not None:
        yield from diagnosis.memory.table(of.backend_memory_bytes)
    elif of.memory_bytes is not None:
        backend = of.backend_memory_bytes
        more = "" if backend is None else f", the backend {readable_bytes(backend)}"
        yield f"memory: at least {readable_bytes(of.memory_bytes)}{more}"
    if of.episodes_bytes is not None:
        checkpoints = of.checkpoint_bytes
        more = "" if checkpoints is None else f", {readable_bytes(checkpoints)} of checkpoints"
        yield f"disk: about {readable_bytes(of.episodes_bytes)} of episodes{more}"
    yield f"free disk: {readable_bytes(of.disk_free_bytes)}"


def _time(of: "Estimate", roughly: float | None) -> str:
    from insitu.disk.files import readable_seconds

    if of.collect_seconds_per_epoch is None:
        return (
            "unknown, as no episode has ended" if roughly is None else f"roughly {readable_seconds(roughly)} an epoch"
        )
    total = f"about {readable_seconds(of.total_seconds)}: " if of.total_seconds is not None else ""
    training = f"{readable_seconds(of.train_seconds_per_epoch)} training" if of.train_seconds_per_epoch else ""
    text = f"{total}{of.epochs} epoch{'s' * (of.epochs != 1)} of {readable_seconds(of.collect_seconds_per_epoch)} "
    text += f"collecting and {training}" if training else "collecting (no training job could be measured)"
    if of.validations:
        each = readable_seconds(of.validation_seconds) if of.validation_seconds is not None else "unknown length"
        text += f", {of.validations} validations of {each}"
    return f"{text}, and {readable_seconds(of.start_seconds)} to start" if total else text
