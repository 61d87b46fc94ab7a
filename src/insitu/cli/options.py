"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_PATH = click.Path(path_type=Path)

config_file = click.option("--config_file", required=True, type=_PATH, help="The YAML file.")
dataset = click.option("--dataset", help="Replaces the dataset of the file: .json .jsonl .csv .parquet .xlsx")
checkpoint = click.option(
    "--checkpoint",
    type=_PATH,
    metavar="CHECKPOINT",
    help="Weights for llms of _type policy: a folder, a run directory, best, or latest.",
)
override = click.option(
    "-o",
    "--override",
    type=(str, str),
    multiple=True,
    metavar="KEY VALUE",
    help="Set a key of the file, such as -o finetuning.num_epochs 5",
)
_endpoint = click.option("--endpoint", metavar="URL", help="Run the workflow on this `insitu serve`.")
_timeout = click.option(
    "--endpoint_timeout", type=click.IntRange(min=1), default=300, help="Seconds per attempt there."
)
_result_path = click.option(
    "--result_json_path", default="$", help="JSONPath of the workflow's output in its answer, such as $.answer"
)


def endpoint(command: Callable[..., Any]) -> Callable[..., Any]:
    """--endpoint, --endpoint_timeout, --result_json_path."""
    return _endpoint(_timeout(_result_path(command)))
