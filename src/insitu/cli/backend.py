"""`insitu backend`: serve a model, and train it on request, until asked to stop."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click

from insitu.backend import BackendOptions
from insitu.errors import BackendError


def serve(options: BackendOptions) -> int:
    """Print the address when it serves, and return the exit code when it has stopped."""
    try:
        import uvloop

        from insitu.backend.server import run
    except ImportError as error:
        print(f"insitu backend needs the extra `local` (pip install 'insitu[local]'): {error}", file=sys.stderr)
        return 2
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(options, _announce))
    except BackendError as error:
        print(f"insitu backend: {error}", file=sys.stderr)
        return 1
    sys.stdout.flush()
    # A training step may still be computing in its thread; nothing it does is wanted, and joining it can take long.
    os._exit(0)


def _announce(address: str) -> None:
    print(f"insitu backend ready at {address}", flush=True)


@click.command("backend")
@click.option("--model", required=True, help="A Hugging Face model folder or hub name.")
@click.option("--name", default="policy", help="The name the model is served under.")
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", default=8700, type=click.IntRange(0, 65535), help="0 picks a free one.")
@click.option("--device", default="auto", help="cpu, cuda, cuda:1 ..., or auto.")
@click.option("--dtype", default="auto", help="float32, bfloat16, float16, or auto.")
@click.option("--output_dir", type=click.Path(path_type=Path), help="Where checkpoints go; none: a temporary folder.")
@click.option("--token", envvar="INSITU_BACKEND_TOKEN", help="Asked of every request as a bearer token.")
@click.option("--max_length", type=click.IntRange(min=2), help="Longest prompt and completion together, in tokens.")
@click.option("--max_batch", type=click.IntRange(min=1), help="Most requests sampled at once.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads for sampling.")
@click.option("--lora_rank", type=click.IntRange(min=1), help="Train adapters of this rank; none: all weights.")
@click.option("--log_samples", type=click.Path(path_type=Path), help="A file that gets a line for every completion.")
@click.option("--parent_pid", type=int, help="End when this process is gone.")
def command(**given: Any) -> None:
    """Serve and train a model: inference and training jobs on one port."""
    sys.exit(serve(BackendOptions(**given)))
