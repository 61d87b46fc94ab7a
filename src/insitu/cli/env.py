"""The command `env`."""

import json
from dataclasses import asdict

import click

from insitu.cli import options


@click.command("env")
@options.as_json
def command(as_json: bool) -> None:
    """Print what a bug report needs: versions, processors, memory, GPUs and optional programs."""
    from insitu.disk.files import readable_bytes
    from insitu.doctor.environment import this_environment

    environment = asdict(this_environment())
    if as_json:
        click.echo(json.dumps(environment))
        return
    size = environment["memory"]
    environment["memory"] = "unknown" if size is None else readable_bytes(size)
    environment["gpus"] = "; ".join(environment["gpus"]) or "none that torch sees"
    packages = environment.pop("packages")
    programs = environment.pop("programs")
    for name, value in [*environment.items(), *packages.items(), *programs.items()]:
        click.echo(f"{name}: {value}")
