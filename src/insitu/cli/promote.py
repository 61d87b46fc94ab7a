"""The command `promote`."""

from pathlib import Path

import click

from insitu.cli import options


@click.command("promote")
@click.argument("run_dir", type=options.PATH, required=False)
@click.argument("destination", type=options.PATH, required=False)
@click.option("--checkpoint", metavar="NAME", help="best, latest or step_N (default: best).")
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
    default=0.95,
    help="Confidence that it scores higher than what it replaces.",
)
@click.option("--merge", is_flag=True, help="Merge an adapter into its base model.")
@click.option("--rollback", type=options.PATH, metavar="DESTINATION", help="Instead: put the previous version back.")
def command(
    run_dir: Path | None,
    destination: Path | None,
    checkpoint: str | None,
    confidence: float,
    merge: bool,
    rollback: Path | None,
) -> None:
    """Export the best version of a run to DESTINATION if it scores significantly higher than what it replaces.

    The scores are those of the run's validations, compared row by row. Exit code 1 if they are not higher; then
    DESTINATION does not change.
    """
    from insitu.release.promotion import promote, roll_back

    if rollback is not None:
        if run_dir is not None or checkpoint is not None or merge:
            raise click.UsageError("--rollback DESTINATION takes no run and no other option")
        print(f"{rollback} is now {roll_back(rollback)}")
        return
    if run_dir is None or destination is None:
        raise click.UsageError("Missing argument: insitu promote RUN_DIR DESTINATION")
    done = promote(run_dir, destination, confidence, checkpoint, merge)
    print(f"promoted {done.candidate} to {destination}: {done.text()}")
    if done.previous is not None:
        print(f"the previous version is {done.previous}")
