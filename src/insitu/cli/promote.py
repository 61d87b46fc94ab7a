"""The command `promote`."""

from pathlib import Path

import click

from insitu.cli import options


@click.command("promote")
@click.argument("run_dir", type=options.PATH)
@click.argument("destination", type=options.PATH)
@click.option("--checkpoint", metavar="NAME", help="best, latest or step_N (default: best).")
@click.option(
    "--confidence",
    type=options.Number(0.5, 0.9999, min_open=True),
    default=0.95,
    help="Confidence that it scores higher than what it replaces.",
)
@click.option("--merge", is_flag=True, help="Merge an adapter into its base model.")
def command(run_dir: Path, destination: Path, checkpoint: str | None, confidence: float, merge: bool) -> None:
    """Export the best version of a run to DESTINATION if it scores significantly higher than what it replaces.

    The scores are those of the run's validations, compared row by row. Exit code 1 if they are not higher; then
    DESTINATION does not change.
    """
    from insitu.release.promotion import promote

    done = promote(run_dir, destination, confidence, checkpoint, merge)
    print(f"promoted {done.candidate} to {destination}: {done.text()}")
    if done.previous is not None:
        print(f"the previous version is {done.previous}")
