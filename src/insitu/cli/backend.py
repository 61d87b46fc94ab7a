"""The command `backend`."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from insitu.backend import SAMPLER_KEY_VARIABLE, TOKEN_VARIABLE, BackendOptions
from insitu.cli import options
from insitu.errors import InsituError, install_command, memory_problem


def serve(backend_options: BackendOptions) -> int:
    """Runs the server until it is stopped, and returns the exit code. Raises ConfigError before it starts."""
    from insitu.wire.http_server import prepare_process

    backend_options.access()
    prepare_process()
    try:
        import uvloop

        from insitu.backend.server import run
    except ImportError as error:
        if memory_problem(error) is not None:
            raise
        install = install_command("local")
        print(f"insitu backend needs the extra `local` ({install} in the clone of insitu): {error}", file=sys.stderr)
        return 2
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(backend_options, lambda url: print(f"insitu backend ready at {url}", flush=True)))
    except InsituError as error:
        print(f"insitu backend: {error}", file=sys.stderr)
        return 1
    sys.stdout.flush()
    # Does not join the training thread, whose current step can take long and is discarded.
    os._exit(0)


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(map(int, value.split(","))) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r}; give numbers such as 0,1") from None


def _addresses(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (each.strip() for each in (value or "").split(","))))


def _object(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        if value is None or isinstance(json.loads(value), dict):
            return value
    except ValueError:
        pass
    raise click.BadParameter(f'{value!r}; give a JSON object such as {{"max-num-seqs": 64}}')


@click.command("backend")
@click.option("--model", required=True, help="A Hugging Face model folder or Hub name.")
@click.option("--name", default="policy", help="The name the model is served under.")
@click.option("--host", default="127.0.0.1", help="The address to bind.")
@click.option("--port", default=8700, type=click.IntRange(0, 65535), help="0 picks a free port.")
@click.option("--device", default="auto", help="cpu, cuda, cuda:1 ..., or auto.")
@click.option("--dtype", default="auto", help="float32, bfloat16, float16, or auto.")
@click.option("--output_dir", type=click.Path(path_type=Path), help="Folder for checkpoints (default: temporary).")
@options.access(TOKEN_VARIABLE)
@click.option("--max_length", type=click.IntRange(min=2), help="Maximum tokens of prompt and completion.")
@click.option("--max_batch", type=click.IntRange(min=1), help="Maximum number of concurrent requests.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads for sampling.")
@click.option("--lora_rank", type=click.IntRange(min=1), help="LoRA rank (default: train all weights).")
@click.option("--learner_processes", type=click.IntRange(min=1), default=1, help="Processes that train together.")
@click.option("--learner_gpus", callback=_numbers, help="Their GPUs, as 0,1,2 (default: the first ones).")
@click.option("--learner_strategy", type=click.Choice(["auto", "ddp", "fsdp"]), default="auto", help="How they share.")
@click.option("--learner_nodes", type=click.IntRange(min=1), default=1, help="Machines that train together.")
@click.option("--learner_rendezvous", help="HOST:PORT of this machine for the others.")
@click.option("--sampler", type=click.Choice(["embedded", "vllm"]), default="embedded", help="What samples.")
@click.option("--sampler_gpus", callback=_numbers, help="GPUs of the vLLM to start, as 0,1.")
@click.option("--sampler_tensor_parallel", type=click.IntRange(min=1), default=1, help="GPUs for each vLLM server.")
@click.option("--sampler_args", callback=_object, metavar="JSON", help="Further arguments of vLLM, as a JSON object.")
@click.option("--sampler_addresses", callback=_addresses, help="URLs of running vLLM servers, separated by commas.")
@click.option("--log_samples", type=click.Path(path_type=Path), help="Append a JSON line per completion.")
@click.option("--keep_last", type=click.IntRange(min=1), default=3, help="Checkpoints to keep, the latest ones.")
@click.option("--keep_every", type=click.IntRange(min=1), help="Also keep every Nth checkpoint; 1 keeps all.")
@click.option(
    "--allow_code",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder whose Python files jobs may run as losses, optimizers and schedules (default: none).",
)
@click.option("--parent_pid", type=int, help="Exit when this process has exited.")
def command(**values: Any) -> None:
    """Serve and train a model: inference and training jobs on one port."""
    if values["sampler_addresses"]:
        values["sampler_api_key"] = os.environ.get(SAMPLER_KEY_VARIABLE) or None
    sys.exit(serve(BackendOptions(**values)))
