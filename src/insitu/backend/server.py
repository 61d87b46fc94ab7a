"""One process, one port: inference and training over HTTP, both on the weights that the compute thread holds."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

import insitu
from insitu.backend.art.jobs import ArtJobs
from insitu.backend.art.models import ArtModels
from insitu.backend.art.server import art_routes
from insitu.backend.art.serverless import serverless_routes
from insitu.backend.compute import Compute
from insitu.backend.http import EXCEPTION_HANDLERS, JSON, TokenGate
from insitu.backend.inference.chat import ChatRequest
from insitu.backend.inference.completions import Completions, Models, PolicyNames, SampleLog
from insitu.backend.inference.engine import Engine
from insitu.backend.inference.lane import EngineOptions
from insitu.backend.inference.text import TextRequest
from insitu.backend.model import LoadedModel, load_model
from insitu.backend.openapi import document
from insitu.backend.options import BackendOptions
from insitu.backend.training.jobs import Jobs, training_routes
from insitu.backend.training.lineages import Lineages
from insitu.errors import BackendError
from insitu.schemas.training_jobs import LoRASettings

logger = logging.getLogger(__name__)

PARENT_POLL = 0.5
"""Seconds between two looks at whether the parent process still lives."""
GRACE = 2
"""Seconds that open requests get to end when the server is asked to stop."""


@dataclass(frozen=True)
class Backend:
    """The parts of a running backend. `app` serves them; it must run on the event loop that awaits `start`."""

    app: ASGIApp
    compute: Compute
    engine: Engine
    jobs: Jobs

    async def start(self) -> None:
        """Check the model and begin to serve it. Raises BackendError where it cannot be served."""
        self.compute.start()
        try:
            await self.engine.start()
        except BaseException:  # the thread must not outlive a failed start; raised again
            self.compute.close()
            raise

    async def close(self) -> None:
        """Cancel what trains, and stop; what the thread is in the middle of gets `GRACE` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.jobs.close(), GRACE)
        self.compute.close(timeout=GRACE)


def create_backend(loaded: LoadedModel, options: BackendOptions, output_dir: Path) -> Backend:
    """Engine, learner and the routes to both, not yet started."""
    compute = Compute()
    lora = LoRASettings(rank=options.lora_rank, alpha=2 * options.lora_rank) if options.lora_rank else None
    lineages = Lineages(loaded, output_dir, lora)
    engine = Engine(loaded, compute, lineages.module_at, _engine_options(loaded, options))
    jobs = Jobs(lineages.own, compute, engine.publish, output_dir)
    base = options.model, options.name
    art_models = ArtModels(lineages, engine, compute, base, output_dir / "art")
    art_jobs = ArtJobs(art_models, jobs, engine.tokens)
    models = Models(PolicyNames(options.name, lambda: lineages.own.versions), art_models)
    log = SampleLog(options.log_samples) if options.log_samples else None

    async def health(request: Request) -> Response:
        return JSON({"status": "ok", "policy_version": engine.version})

    async def openapi(request: Request) -> Response:
        return JSON(document(routes, insitu.__version__))

    routes: list[BaseRoute] = [
        Route("/health", health),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.get),
        Route("/v1/chat/completions", Completions(ChatRequest, engine, models, log), methods=["POST"]),
        Route("/v1/completions", Completions(TextRequest, engine, models, log), methods=["POST"]),
        Route("/openapi.json", openapi),
        *training_routes(jobs),
        *art_routes(art_models, art_jobs, engine, options.token),
        *serverless_routes(art_models, art_jobs),
    ]
    app: ASGIApp = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    return Backend(TokenGate(app, options.token) if options.token else app, compute, engine, jobs)


async def run(options: BackendOptions, on_ready: Callable[[str], None]) -> None:
    """Serve until asked to stop by SIGTERM or SIGINT, or until `parent_pid` is gone; `on_ready` gets the address."""
    with _listening(options.host, options.port) as listener, _folder(options.output_dir) as output_dir:
        loaded = await asyncio.to_thread(load_model, options.model, options.device, options.dtype)
        backend = create_backend(loaded, options, output_dir)
        await backend.start()
        config = uvicorn.Config(
            backend.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=GRACE,
            timeout_keep_alive=75,
        )
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        server = _Server(config, lambda: on_ready(address))
        try:
            async with _stopping(server, options.parent_pid):
                await server.serve(sockets=[listener])
        finally:
            await backend.close()


class _Server(uvicorn.Server):
    """uvicorn's server that tells when it accepts connections, and leaves the signals to `_stopping`.

    Its own handlers would end the process by the signal; being asked to stop is no failure.
    """

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _stopping(server: uvicorn.Server, parent_pid: int | None) -> AsyncIterator[None]:
    """Ask `server` to stop on the first SIGTERM or SIGINT, or when the parent is gone; at once on the second."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop)
    watcher = asyncio.create_task(_watch_parent(parent_pid, stop)) if parent_pid else None
    try:
        yield
    finally:
        if watcher is not None:
            watcher.cancel()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)


async def _watch_parent(pid: int, stop: Callable[[], None]) -> None:
    """Looks at a process now and then; calls `stop` once it is gone."""
    lives = _is_parent if _is_parent(pid) else _lives
    while lives(pid):  # noqa: ASYNC110 - another process sets no event here
        await asyncio.sleep(PARENT_POLL)
    logger.info("process %d is gone; stopping", pid)
    stop()


def _is_parent(pid: int) -> bool:
    """Tells even of a parent that was killed and that nobody has waited for: its children get another at once."""
    return os.getppid() == pid


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _engine_options(loaded: LoadedModel, options: BackendOptions) -> EngineOptions:
    longest = min(options.max_length or loaded.max_length, loaded.max_length)
    on_gpu = loaded.device.type != "cpu"
    return EngineOptions(
        max_length=longest,
        max_batch=options.max_batch or (256 if on_gpu else 128),
        prefill_tokens=8192 if on_gpu else 512,
        prefix_bytes=2**31 if on_gpu else 2**28,
        threads=options.threads,
    )


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket; raises BackendError where the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise BackendError(f"cannot listen at {host}:{port}: {error.strerror}") from error
        yield listener


@contextlib.contextmanager
def _folder(output_dir: Path | None) -> Iterator[Path]:
    if output_dir is not None:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=output_dir):
                pass
        except OSError as error:
            raise BackendError(
                f"output_dir is {output_dir}, but nothing can be written there: {error.strerror}"
            ) from error
        yield output_dir
    else:
        with tempfile.TemporaryDirectory(prefix="insitu-backend-") as folder:
            yield Path(folder)
