"""`insitu backend`: serve a model, and train it on request, until asked to stop."""

import asyncio
import os
import sys

from insitu.backend.options import BackendOptions
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
