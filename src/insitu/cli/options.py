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


def who_answers(command: Callable[..., Any]) -> Callable[..., Any]:
    """--endpoint, --endpoint_timeout, --result_json_path."""
    for option in (
        click.option(
            "--result_json_path",
            default="$",
            help="A JSONPath: which part of the workflow's answer is its output, such as $.answer",
        ),
        click.option(
            "--endpoint_timeout", type=click.IntRange(min=1), default=300, help="Seconds for each attempt there."
        ),
        click.option("--endpoint", metavar="URL", help="Let the workflow run there, in an `insitu serve`."),
    ):
        command = option(command)
    return command
