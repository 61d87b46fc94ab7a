"""One process, one port: inference and training over HTTP, on the weights that the compute thread owns."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

import insitu
from insitu.algorithms.memory_budget import Workload, memory_budget, model_shape
from insitu.backend import BackendOptions
from insitu.backend.active_waiting import active_waiting
from insitu.backend.attention import text_config
from insitu.backend.compute import ComputeThread, call_in_loop, set_outcome
from insitu.backend.http import ApiRoute, openapi_document
from insitu.backend.inference.engine import Engine
from insitu.backend.inference.sampler import Sampler, WeightVersion
from insitu.backend.inference.scheduler import EngineOptions
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.batches import TrainsJobs
from insitu.backend.learner.code import CodeFolder
from insitu.backend.learner.jobs import TrainingQueue
from insitu.backend.learner.learner import Learner, Learners
from insitu.backend.model import LoadedModel, load_model
from insitu.backend.protocols import ServedModels, Services, protocol_routes
from insitu.disk.files import available_memory, is_alive, readable_bytes, writable_folder
from insitu.disk.folder_lock import FolderLock
from insitu.errors import BackendError, InsituError, PluginError
from insitu.formats.parser import format_problem, unknown_format
from insitu.schemas.backend_processes import LearnerOptions, SamplerOptions
from insitu.schemas.lora import LoRASettings
from insitu.schemas.parts import load_named
from insitu.wire.addresses import http_url
from insitu.wire.endings import stop_signals
from insitu.wire.http_server import guard, json_response, listening

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=BaseModel)

PARENT_POLL_SECONDS = 0.5
"""Interval of the checks whether the parent process is alive."""
GRACE_SECONDS = 2
"""Time for open requests to finish when the server is stopped."""


@dataclass(frozen=True)
class Backend:
    """A backend served by `app`, which must run on the event loop that awaits `start`."""

    app: web.Application
    compute: ComputeThread
    sampler: Sampler
    jobs: TrainingQueue
    learner: Learner

    async def start(self) -> None:
        """Starts serving the model. Raises BackendError if it is not supported."""
        self.compute.start()
        try:
            await self.sampler.start()
            if self.learner.version:
                if not self.learner.served_here:  # what samples reads the weights from the disk
                    await self.jobs.write_version(self.learner.version)
                await self.sampler.publish(WeightVersion(self.learner.version))
        except BaseException:  # the thread and other processes must not outlive a failed start; re-raised
            await self.sampler.close()
            self.compute.close()
            raise

    async def close(self, *, writes: bool = True) -> None:
        """Cancels all jobs and stops the compute thread, each within `GRACE_SECONDS`.

        `writes` the latest version before, unless it is on disk.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.jobs.close(), GRACE_SECONDS)
        latest = self.learner.version
        if writes and latest and not self.learner.saved.is_snapshot(latest):
            with contextlib.suppress(InsituError):  # which is logged, as the job is
                await self.jobs.write_version(latest, complete=True)
        await self.sampler.close()
        self.compute.close(timeout=GRACE_SECONDS)
        await asyncio.to_thread(self.learner.saved.wait)  # another process may use the folder after this one
        if (group := self.learner.group) is not None:
            await asyncio.to_thread(group.close)


def create_backend(loaded: LoadedModel, options: BackendOptions, output_dir: Path) -> Backend:
    """Creates sampler, learners and the routes of every protocol, not yet started.

    Continues the training in `output_dir`, if it is of this model. Raises RequestRefused if it is of another.
    """
    compute = ComputeThread()
    lora = LoRASettings(rank=options.lora_rank, alpha=2 * options.lora_rank) if options.lora_rank else None
    group = _rank_group(loaded, options, output_dir)
    served_here, code = options.sampler == "embedded", CodeFolder(options.allow_code)
    learner = Learner(loaded, output_dir, default_lora=lora, group=group, served_here=served_here, code=code)
    learners = Learners(learner)
    sampler = _sampler(loaded, options, compute, learners, output_dir)
    _set_formats(sampler.tokenizer, options)
    jobs = TrainingQueue(learner, compute, sampler, output_dir)
    models = ServedModels(options.name, learner, sampler)
    services = Services(options, loaded, compute, sampler, learners, jobs, models, output_dir)

    async def openapi(request: web.Request) -> web.Response:
        return json_response(openapi_document(routes, insitu.__version__))

    routes = [ApiRoute("GET", "/openapi.json", openapi, "This document"), *protocol_routes(services)]
    public = {route.path for route in routes if route.public}
    app = web.Application(middlewares=[guard(options.access(), public.__contains__)])
    for route in routes:
        route.add_to(app)
    return Backend(app, compute, sampler, jobs, learner)


def _set_formats(tokenizer: ChatTokenizer, options: BackendOptions) -> None:
    """Raises BackendError for a format that does not exist."""
    if (found := format_problem(options.tool_format, options.reasoning_format)) is not None:
        raise BackendError(found[1])
    tokenizer.formats = tokenizer.formats.replaced(options.tool_format, options.reasoning_format)
    if tokenizer.formats.tools is None:
        logger.warning("requests with tools are refused: %s", unknown_format(options.model))


def _sampler(
    loaded: LoadedModel, options: BackendOptions, compute: ComputeThread, learners: Learners, output_dir: Path
) -> Sampler:
    """Raises BackendError if the options do not fit."""
    max_length = min(options.max_length or loaded.max_length, loaded.max_length)
    chosen = _chosen(SamplerOptions, "sampler", options, _type=options.sampler)
    if chosen.kind != "embedded":
        if options.quantization is not None:
            raise BackendError(
                "quantization: vLLM would sample from other weights than are trained; allowed: sampler embedded"
            )
        rank = learners.default.lora.rank if learners.default.lora is not None else None
        parts = chosen, loaded, compute, learners.folder, learners.load_version
        return _installed("sampler", chosen.kind)(*parts, max_length, rank, output_dir, threads=options.threads)
    on_gpu = loaded.device.type != "cpu"
    limits = EngineOptions(
        max_length=max_length,
        max_batch=options.max_batch or (256 if on_gpu else 128),
        prefill_tokens=8192 if on_gpu else 512,
        kv_bytes=options.kv_memory,
        prefix_bytes=2**31 if on_gpu else 2**28,
        threads=options.threads,
    )
    return Engine(loaded, compute, learners.load_version, limits)


def _rank_group(loaded: LoadedModel, options: BackendOptions, output_dir: Path) -> TrainsJobs | None:
    """None if this process trains. Raises BackendError if the options do not fit."""
    if options.learner_processes == options.learner_nodes == 1:
        return None
    chosen = _chosen(LearnerOptions, "learner", options)
    return _installed("learner", "torchrun")(chosen, loaded, output_dir, options.allow_code)


def _installed(key: str, name: str) -> Callable[..., Any]:
    """Raises BackendError if this installation lacks it."""
    try:
        return load_named(f"backend.{key}s", name)
    except PluginError as error:
        raise BackendError(f"{key}: this installation of insitu cannot run {name} ({error})") from None


def _chosen(kind: type[M], name: str, options: BackendOptions, **more: Any) -> M:
    """The options that begin with `name` and are set. Raises BackendError if they do not fit."""
    values = {
        field.name.removeprefix(f"{name}_"): getattr(options, field.name)
        for field in fields(options)
        if field.name.startswith(f"{name}_") and getattr(options, field.name) != field.default
    }
    try:
        return kind.model_validate(values | more)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BackendError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from None


async def run(options: BackendOptions, on_ready: Callable[[str], None]) -> None:
    """Serves until a signal or the end of `parent_pid`; calls `on_ready` with the address once it listens."""
    parent = options.parent_pid
    if parent is not None and os.getppid() != parent and not is_alive(parent):  # a run may have begun in its folder
        raise BackendError(f"process {parent}, which has started this one, has ended")
    with (
        _bound_socket(options.host, options.port) as listener,
        _output_folder(options.output_dir) as output_dir,
        active_waiting(),
    ):
        backend = await asyncio.to_thread(load_backend, options, output_dir)
        await backend.start()
        is_orphan = False
        try:
            async with _stop_event(options.parent_pid) as stopped:
                async with listening(backend.app, listener, grace=GRACE_SECONDS) as address:
                    gc.collect()
                    gc.freeze()  # the model and all modules, which stay
                    gc.enable()
                    try:
                        on_ready(http_url(*address))
                    except OSError as error:
                        raise BackendError(f"cannot print the address: {error.strerror}") from error
                    is_orphan = await stopped
        finally:
            await backend.close(writes=not is_orphan)  # the process that continues the run waits for this one's end


def load_backend(options: BackendOptions, output_dir: Path) -> Backend:
    """Loads the model, and creates a backend as `create_backend`: in a thread that ends, see `ComputeThread`."""

    def load() -> Backend:
        how = options.device, options.dtype, options.quantization, options.chat_template
        loaded = load_model(options.model, *how, frozen=options.lora_rank is not None)
        if options.parent_pid is None and loaded.device.type == "cpu":  # else the run has computed it
            _warn_of_training(loaded, options)
        return create_backend(loaded, options, output_dir)

    with ThreadPoolExecutor(1, "insitu-loading") as thread:
        return thread.submit(load).result()


def _warn_of_training(loaded: LoadedModel, options: BackendOptions) -> None:
    """Logs a warning if jobs do not fit into the memory that is free beside the loaded weights."""
    parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    shape, free = model_shape(text_config(loaded.module).to_dict(), parameters), available_memory()
    if shape is None or free is None:
        return
    rank = options.lora_rank or (16 if options.quantization is not None else None)
    budget = memory_budget(shape, Workload(str(loaded.dtype).removeprefix("torch."), lora_rank=rank))
    if (needed := budget.fixed - budget.process - budget.weights) > free:
        kind = "all weights" if rank is None else f"LoRA adapters of rank {rank}"
        advice = "train LoRA adapters (--lora_rank 16), or with a smaller micro_batch_tokens"
        logger.warning(
            "jobs that train %s need about %s more, but %s of memory are free: %s",
            *(kind, readable_bytes(needed), readable_bytes(free), advice),
        )


@contextlib.asynccontextmanager
async def _stop_event(parent_pid: int | None) -> "AsyncIterator[asyncio.Future[bool]]":
    """Done once a signal that ends a command has come, or the parent has ended: then it is true."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[bool] = loop.create_future()
    names = stop_signals()
    for name in names:
        loop.add_signal_handler(name, set_outcome, stopped, False)
    if parent_pid is not None:
        threading.Thread(target=_watch_parent, args=(parent_pid, loop, stopped), daemon=True).start()
    try:
        yield stopped
    finally:
        for name in names:
            loop.remove_signal_handler(name)


def _watch_parent(pid: int, loop: asyncio.AbstractEventLoop, stopped: "asyncio.Future[bool]") -> None:
    """Polls a process and sets `stopped` once it has ended, or cannot be watched."""
    is_parent = os.getppid() == pid  # children of a killed parent are reassigned immediately, before it is reaped
    try:
        while os.getppid() == pid if is_parent else is_alive(pid):
            time.sleep(PARENT_POLL_SECONDS)
        logger.info("process %d has ended; stopping", pid)
    except Exception:  # a thread that ended here would leave an orphan
        logger.exception("process %d cannot be watched; stopping", pid)
    call_in_loop(loop, set_outcome, stopped, True)


@contextlib.contextmanager
def _bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket. Raises BackendError if the address is in use or not local."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise BackendError(f"--port: cannot listen at {host}:{port}: {error.strerror}") from error
        yield listener


@contextlib.contextmanager
def _output_folder(output_dir: Path | None) -> Iterator[Path]:
    if output_dir is not None:
        folder = writable_folder(output_dir, "--output_dir")
        with FolderLock(folder, "--output_dir"):
            yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="insitu-backend-") as temporary:
            yield Path(temporary)
