"""The command `backend`."""

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import click

from insitu.backend import SAMPLER_KEY_VARIABLE, TOKEN_VARIABLE, BackendOptions, configure_math_libraries
from insitu.cli import options
from insitu.errors import InsituError, install_command, memory_problem
from insitu.wire.log_lines import log_line


def serve(backend_options: BackendOptions) -> int:
    """Runs the server until it is stopped, and returns the exit code. Raises ConfigError before it starts."""
    from insitu.wire.http_server import prepare_process

    backend_options.access()
    gc.disable()  # until the model is loaded: searching all modules again and again takes over half a second
    prepare_process()
    configure_math_libraries()
    try:
        import uvloop

        from insitu.backend.server import run
    except ImportError as error:
        if memory_problem(error) is not None:
            raise
        install = install_command("local")
        problem = f"insitu backend needs the extra `local` ({install} in the clone of insitu): {error}"
        print(log_line(problem), file=sys.stderr)
        return 2
    parent = backend_options.parent_pid
    whose = f" for process {parent}" if parent is not None else ""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(backend_options, lambda url: print(f"insitu backend ready at {url}{whose}", flush=True)))
    except InsituError as error:
        print(log_line(f"insitu backend: {error}"), file=sys.stderr)
        return 1
    sys.stdout.flush()
    # Does not join the training thread, whose current step can take long and is discarded.
    os._exit(0)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for each in reversed(fields(BackendOptions)):
        if each.metadata:
            default = None if each.default is MISSING else each.default or None
            command = click.option(f"--{each.name}", default=default, **each.metadata)(command)
    return command


@click.command("backend")
@_options
@options.access(TOKEN_VARIABLE)
def command(**values: Any) -> None:
    """Serve and train a model: inference and training jobs on one port."""
    from insitu.runs.checkpoints import model_of_run

    values["model"] = model_of_run(values["model"], "--model")
    if values["sampler_addresses"]:
        values["sampler_api_key"] = os.environ.get(SAMPLER_KEY_VARIABLE) or None
    sys.exit(serve(BackendOptions(**values)))
