"""The command `init`."""

import json
import shlex
from pathlib import Path

import click

from insitu.cli import options


@click.command("init")
@click.argument("name", type=options.PATH)
@click.option("--framework", metavar="NAME", help="Write an agent of this framework, such as langgraph.")
@click.option(
    "--environment", metavar="KIND:WHAT", help="Train in this environment, such as verifiers:ID for a taskset."
)
@click.option(
    "--model",
    metavar="MODEL",
    help="A folder, GGUF file or Hugging Face name, or smollm2, in place of the small model it comes with.",
)
@click.option(
    "--chat_template", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File with its chat template."
)
def command(
    name: Path, framework: str | None, environment: str | None, model: str | None, chat_template: Path | None
) -> None:
    """Write a small project to start from, in the new folder NAME: an agent, a score, rows, a file and tests.

    With --environment, whose tasks and scores somebody has written already: a file and a README. With --model smollm2,
    or a model whose chat template has no tools: an agent without tools.
    """
    from insitu.config.json_schema import json_schema
    from insitu.errors import install_command
    from insitu.starter import write_project

    files = write_project(name, framework, model, environment, chat_template, json.dumps(json_schema()))
    print(f"{name}: {', '.join(files)}")
    if framework is not None:
        print(f"needs the framework: {install_command(framework.replace('_', '-'))} in the clone of insitu")
    first = ""
    if "make_model.py" in files:
        first = " && python make_model.py"
        print(f"needs the extra gguf: {install_command('local,gguf')} in the clone of insitu")
    print(f"next: cd {shlex.quote(str(name))}{first} && insitu finetune config.yml")
