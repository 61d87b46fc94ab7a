"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def config_file(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--config_file", required=True, type=click.Path(path_type=Path), help="The YAML file.")(command)


def override(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "-o",
        "--override",
        type=(str, str),
        multiple=True,
        metavar="KEY VALUE",
        help="Set a key of the file, such as -o finetuning.num_epochs 5",
    )(command)


def dataset(command: Callable[..., Any]) -> Callable[..., Any]:
    help_text = "Replaces the dataset of the file: .json .jsonl .csv .parquet .xlsx"
    return click.option("--dataset", help=help_text)(command)


def checkpoint(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--checkpoint", type=click.Path(path_type=Path), help="A folder of weights for llms of _type policy."
    )(command)


def endpoint(command: Callable[..., Any]) -> Callable[..., Any]:
    """--endpoint, --endpoint_timeout, --result_json_path."""
    for option in (
        click.option(
            "--result_json_path",
            default="$",
            help="JSONPath of the workflow's output in its answer, such as $.answer",
        ),
        click.option("--endpoint_timeout", type=click.IntRange(min=1), default=300, help="Seconds per attempt there."),
        click.option("--endpoint", metavar="URL", help="Run the workflow on this `insitu serve`."),
    ):
        command = option(command)
    return command
