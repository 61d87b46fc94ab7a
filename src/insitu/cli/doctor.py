"""The command `doctor`."""

import json
from typing import TYPE_CHECKING, Any

import click

from insitu.cli import consoles, options

if TYPE_CHECKING:
    from insitu.doctor.diagnosis import Diagnosis


@click.command("doctor")
@options.config_file
@click.option("--episodes", type=click.IntRange(min=2), help="Play at most so many; 8 rows and at most 64 by default.")
@click.option("--seconds", type=click.FloatRange(min=1), default=120.0, help="Play at most for so long.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@options.override
@click.pass_context
def command(ctx: click.Context, episodes: int | None, seconds: float, as_json: bool, **run_options: Any) -> None:
    """Say whether a run will learn, and what it will cost: plays a few rows and trains on them once.

    Writes nothing into the run's folder. Exit code 1 if the run will not learn.
    """
    from insitu.doctor.diagnosis import examine
    from insitu.doctor.play import Budget
    from insitu.schemas.finetuning import FinetuneRunConfig
    from insitu.training.event_loop import run_async

    diagnosis = run_async(examine(FinetuneRunConfig(**run_options), Budget(episodes, seconds)))
    if as_json:
        click.echo(json.dumps(diagnosis.as_json(), default=str))
    else:
        _print(diagnosis)
    ctx.exit(0 if diagnosis.will_learn else 1)


def _print(diagnosis: "Diagnosis") -> None:
    """The findings, the worst first, and the estimate."""
    console = consoles.results()
    for finding in diagnosis.findings:
        for line in (
            f"{finding.severity.replace('_', ' ')}: {finding.what}  [{finding.code}]",
            f"  where: {finding.where}",
            f"  change: {finding.change}",
        ):
            console.print(line, markup=False, soft_wrap=True)
    for line in _estimate(diagnosis):
        console.print(line, markup=False, soft_wrap=True)


def _estimate(diagnosis: "Diagnosis") -> list[str]:
    from insitu.doctor.estimate import readable_bytes, readable_seconds

    def seconds(value: float | None) -> str:
        return "?" if value is None else readable_seconds(value)

    def size(value: int | None) -> str:
        return "?" if value is None else readable_bytes(value)

    of, budget = diagnosis.estimate, diagnosis.budget
    validations = f", {of.validations} validations of {seconds(of.validation_seconds)}" if of.validations else ""
    return [
        f"played {budget['episodes_played']} episodes ({budget['rows']} rows x {budget['generations']}, at most "
        f"{budget['seconds']:g} s) in {readable_seconds(budget['seconds_played'])}",
        f"time: about {seconds(of.total_seconds)} for {of.epochs} epochs of {seconds(of.collect_seconds_per_epoch)} "
        f"collecting and {seconds(of.train_seconds_per_epoch)} training{validations}",
        f"memory: at least {size(of.memory_bytes)}, the backend {size(of.backend_memory_bytes)}",
        f"disk: about {size(of.disk_bytes)} (episodes {size(of.episodes_bytes)}, checkpoints "
        f"{size(of.checkpoint_bytes)}); {size(of.disk_free_bytes)} are free",
    ]
