"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def config_file(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--config_file", required=True, type=click.Path(path_type=Path), help="The YAML file of the workflow."
    )(command)


def override(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "-o",
        "--override",
        type=(str, str),
        multiple=True,
        metavar="KEY VALUE",
        help="Set a key of the file, dots between its parts: -o finetuning.num_epochs 5",
    )(command)


def dataset(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--dataset", help="A dataset in place of the file's own: .json .jsonl .csv .parquet .xlsx")(
        command
    )
