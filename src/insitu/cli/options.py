"""Options that several commands share."""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)
_FILE = click.argument("file", required=False, type=PATH)
_CONFIG_FILE = click.option("--config_file", type=PATH, help="The YAML file, instead of FILE.")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.FloatRange):
    """A number in a range, by default any; `nan` is none: no number is above or below it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if math.isnan(number := click.FLOAT.convert(value, param, ctx)):
            self.fail(f"{value} cannot be compared; give a number", param, ctx)
        return super().convert(number, param, ctx)


def request(kind: str, *options: Decorator) -> Decorator:
    """FILE or --config_file, `options` and -o: the command gets them as `request`, a `kind` of RunRequest."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_request(file: Path | None, config_file: Path | None, **others: Any) -> Any:
            from insitu.schemas import evaluation, finetuning

            model = getattr(finetuning, kind, None) or getattr(evaluation, kind)
            name = click.get_current_context().command_path
            if file is not None and config_file is not None:
                raise click.UsageError(f"two files were given: {file}, and --config_file {config_file}")
            if file is None and config_file is None:
                raise click.UsageError(f"Missing the YAML file: {name} FILE, or {name} --config_file FILE")
            values = {key: others.pop(key) for key in model.model_fields.keys() & others.keys()}
            values = {key: value for key, value in values.items() if value is not None}
            return command(request=model(config_file=file or config_file, **values), **others)

        decorated: Callable[..., Any] = with_request
        every: tuple[Decorator, ...] = (_FILE, _CONFIG_FILE, *options, override)
        for option in reversed(every):
            decorated = option(decorated)
        return decorated

    return decorate


dataset = click.option("--dataset", help="Replaces the dataset of the file: .json .jsonl .csv .parquet .xlsx")
checkpoint = click.option(
    "--checkpoint",
    type=PATH,
    metavar="CHECKPOINT",
    help="Weights for llms of _type policy: a folder, a run directory, best, latest, or step_N.",
)
override = click.option(
    "-o",
    "--override",
    type=(str, str),
    multiple=True,
    metavar="KEY VALUE",
    help="Set a key of the file, such as -o finetuning.num_epochs 5",
)
endpoint = (
    click.option("--endpoint", metavar="URL", help="Run the workflow on this `insitu serve`."),
    click.option("--endpoint_timeout", type=click.IntRange(min=1), default=300, help="Seconds per attempt there."),
    click.option(
        "--result_json_path", default="$", help="JSONPath of the workflow's output in its answer, such as $.answer"
    ),
)
validation = (
    click.option("--validation_dataset", help="Held-out rows, replacing those of the file."),
    click.option("--validation_interval", type=click.IntRange(min=1), help="Epochs between validations."),
    click.option("--validation_config_file", type=PATH, help="A file with the workflow and evaluators for validation."),
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def access(variable: str) -> Decorator:
    """--token, --insecure_no_auth, --allowed_host of a server; `variable` is the environment variable of the token."""

    def empty_is_not_unset(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        return os.environ.get(variable) if value is None else value  # click ignores an empty variable

    token = click.option(
        "--token", envvar=variable, callback=empty_is_not_unset, help="Bearer token required for requests."
    )
    no_auth = click.option(
        "--insecure_no_auth", is_flag=True, help="Serve other machines without a token: everyone may use the server."
    )
    allowed_host = click.option(
        "--allowed_host",
        multiple=True,
        metavar="NAME",
        help="Without a token: a further host name by which clients may call the server.",
    )
    return lambda command: token(no_auth(allowed_host(command)))


def server(variable: str, port: int) -> Decorator:
    """--host, --port and the options of `access`: the command gets `host`, `port`, and an AccessPolicy as `access`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_access(
            host: str, token: str | None, insecure_no_auth: bool, allowed_host: tuple[str, ...], **others: Any
        ) -> Any:
            from insitu.wire.http_access import AccessPolicy

            policy = AccessPolicy.of(
                host, token, variable=variable, allow_anyone=insecure_no_auth, allowed_hosts=allowed_host
            )
            return command(host=host, access=policy, **others)

        address = click.option("--host", default="127.0.0.1", help="The address to bind.")
        free_port = click.option("--port", default=port, type=click.IntRange(0, 65535), help="0 picks a free port.")
        return address(free_port(access(variable)(with_access)))

    return decorate
