"""The command `train`."""

import shlex
from typing import Any

import click

from insitu.cli import options
from insitu.wire.redaction import results_console


@click.command("train")
@click.argument("agent")
@click.option("--score", required=True, help="FILE.py:FUNCTION, or a ready-made one, such as exact_match.")
@click.option("--rows", required=True, type=options.PATH, help="The rows: .json .jsonl .csv .parquet .xlsx")
@click.option("--model", required=True, help="A folder, or a name on the Hugging Face Hub.")
@click.option("--epochs", type=click.IntRange(min=1), default=1, help="Epochs to train.")
@click.option("--rows_per_epoch", type=click.IntRange(min=1), metavar="N", help="Rows of an epoch (default: all).")
@click.option("--held_out", default="0.2", help="Fraction of the rows that is scored and not trained, or their file.")
@click.option("--output_dir", type=options.PATH, help="Run directory (default: runs/FUNCTION).")
@click.option("--save", type=options.PATH, metavar="FILE", help="Also write the settings, for `insitu finetune FILE`.")
@click.option("--resume", is_flag=True, help="Continue the run in the output directory, which was interrupted.")
@options.override
def command(rows_per_epoch: int | None, override: tuple[tuple[str, str], ...], **settings: Any) -> None:
    """Train the model behind AGENT, which is FILE.py:FUNCTION or MODULE:FUNCTION.

    Prints the score on rows that are held out before and after, and what to do next.
    """
    from insitu.api.train import ROWS_PER_EPOCH, train

    if rows_per_epoch is not None:
        override = ((ROWS_PER_EPOCH, str(rows_per_epoch)), *override)
    trained = train(**settings, overrides=override, console=results_console())
    print("next:")
    for step in trained.next_steps():
        print(f"  {shlex.join(step)}")
