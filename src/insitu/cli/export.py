"""The command `export`."""

from pathlib import Path

import click

from insitu.cli import options


@click.command("export")
@click.argument("run_dir", type=options.PATH)
@click.argument("out", type=options.PATH)
@click.option("--checkpoint", metavar="NAME", help="best, latest or step_N (default: the best, else the latest).")
@click.option("--merge", is_flag=True, help="Merge an adapter into its base model.")
@click.option("--as", "kind", metavar="KIND", help="Export a YAML file instead of a run: verifiers (a taskset).")
@click.option("--push", metavar="NAME", help="Also upload the folder to this repository of the Hugging Face Hub.")
def command(run_dir: Path, out: Path, checkpoint: str | None, merge: bool, kind: str | None, push: str | None) -> None:
    """Write a checkpoint of a run as a Hugging Face folder with a model card.

    OUT must not exist, or be empty. The state of the optimizer is left out. With --as, RUN_DIR is a YAML file, whose
    rows and evaluators become a package.
    """
    if kind is not None:
        unused = {"--checkpoint": checkpoint, "--merge": merge, "--push": push}
        if conflicts := [name for name, value in unused.items() if value]:
            raise click.UsageError(f"{', '.join(conflicts)} cannot be used with --as {kind}, which exports no model")
        from insitu.errors import ConfigError, not_found
        from insitu.schemas.parts import load_named, names

        if kind not in names("exports"):
            raise ConfigError(not_found("--as: the kind", kind, names("exports")))
        print(load_named("exports", kind)(run_dir, out))
        return
    from insitu.errors import BackendError
    from insitu.release.model_export import check_push, create_repository, export_model, open_source, upload
    from insitu.runs.checkpoints import checkpoint_of_run

    source = open_source(run_dir, checkpoint_of_run(run_dir, checkpoint, "--checkpoint"))
    if push is not None:
        check_push(push, source, merge)
    export_model(source, out, merge=merge, name=push)
    kind = "adapter" if source.is_adapter and not merge else "model"
    print(f"exported {source.folder.name} of {run_dir} to {out} ({kind})")
    if push is not None:
        try:
            url = create_repository(push)
            upload(out, push, f"exported by insitu: {out.name}")
        except BackendError as error:
            raise BackendError(f"{out} is complete, but {error}") from error
        print(f"uploaded to {url}")
