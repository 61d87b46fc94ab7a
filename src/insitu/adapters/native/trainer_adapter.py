"""The trainer adapter for `insitu backend`."""

import asyncio
import gzip
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson
from pydantic import BaseModel, Field

from insitu.adapters.native.backend_process import BackendProcess
from insitu.adapters.native.config import InsituAdapterConfig
from insitu.advantages.estimator import training_rows
from insitu.builder import Builder, builder_at_work
from insitu.connection import Connection, is_transient, retry_after
from insitu.errors import BackendError, BackendUnavailable, ConfigError, JobFailed, RequestRefused
from insitu.files import FolderLock
from insitu.http_format import error_message, event_data
from insitu.interfaces import TrainerAdapter
from insitu.registry import register_trainer_adapter
from insitu.schemas.episodes import TrainingRow
from insitu.schemas.finetuning import (
    FinetuneConfig,
    PolicyEndpoint,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from insitu.schemas.training_jobs import JobState, LossSettings, Retention, TrainingSettings
from insitu.training.checkpoints import NAMES, find_checkpoint
from insitu.training.store import BACKEND_FOLDER, OUTPUT_DIR, move_aside
from insitu.trajectories.recovery import recover_collection

logger = logging.getLogger(__name__)

T = TypeVar("T")

BACKEND = "insitu"
_WATCH_SECONDS = 5.0
"""Interval of the health checks while the backend is in use."""
_RECONNECT_DELAY = 0.25
_FINAL_STATUSES = ("completed", "failed", "canceled")


class _Health(BaseModel):
    policy_version: int
    vocab_size: int | None = None


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model] = Field(min_length=1)


class InsituTrainerAdapter(TrainerAdapter):
    """Submits training rows to an `insitu backend` and tracks its jobs."""

    def __init__(self, adapter_config: InsituAdapterConfig, builder: Builder | None = None) -> None:
        super().__init__(adapter_config)
        self.config = adapter_config
        self._full_config = (builder or builder_at_work() or Builder()).config
        self._process: BackendProcess | None = None
        self._connection: Connection | None = None
        self._submissions = 0
        self._first_version = 0  # that of a backend at a url when the run began; earlier ones belong to earlier runs
        self._version = 0  # the latest policy version that the backend is known to have had
        self._vocab_size: int | None = None
        self._base_url = adapter_config.url.rstrip("/") if adapter_config.url else ""
        if adapter_config.model is not None:
            self._resolve_model(adapter_config.model)  # raises now if it does not exist

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        if self.config.model is not None and self._process is None:
            folder = Path(run_config.output_dir) / BACKEND_FOLDER
            await asyncio.to_thread(self._set_aside, folder)
            options = {key: str(getattr(self.config, key)) for key in ("name", "device", "dtype")}
            options |= {"model": self._resolve_model(self.config.model), "port": "0", "output_dir": str(folder)}
            arguments = [text for key, value in options.items() for text in (f"--{key}", value)]
            self._process = BackendProcess(arguments, folder / "backend.log")
            self._base_url = await self._process.start(self.config.startup_timeout)
        if self._connection is None:
            self._connection = Connection(
                f"the backend at {self._base_url}",
                {"Authorization": f"Bearer {self._token()}"},
                self.config.read_timeout,
                self.config.retry_timeout,
                self._process.exit_report if self._process is not None else lambda: None,
            )
        try:
            await self._served_version()
        except RequestRefused as error:
            raise BackendUnavailable(f"{self._base_url} is not an insitu backend: {error}") from error
        served = (await self.policy_endpoint()).model
        if self.config.served_name not in (None, served):
            problem = f"name is {self.config.name!r}, but {self._base_url} serves {served!r}"
            raise ConfigError(f"trainer_adapters: {problem}; set name to {served!r} or omit it")
        self._connection.verified = True
        self._first_version = 0 if self._process is not None else self._version

    def _token(self) -> str:
        if self._process is not None:
            return self._process.token
        return self.config.api_key.get_secret_value() if self.config.api_key else "none"  # the header needs a value

    def _resolve_model(self, model: str) -> str:
        """The path of a local folder, or `model` unchanged if it could be a Hub repo id."""
        key = "the trainer adapter's model"
        try:
            folder = find_checkpoint(self._full_config, model, key).folder
        except ConfigError as error:
            if model in NAMES or model.startswith((".", "/", "~")) or model.count("/") > 1:
                raise
            logger.info("%s; assuming a Hugging Face repo id", error)
            return model
        if folder is None:
            raise ConfigError(f"{key}: the best weights of {model} are those it started from; name that model")
        return str(folder)

    def _set_aside(self, folder: Path) -> None:
        """Moves the checkpoints of an earlier run aside; the built-in trainers have moved the whole run already."""
        if (folder / "checkpoints").exists():
            FolderLock(folder, OUTPUT_DIR).release()
            self._full_config.moved[folder.resolve()] = moved = move_aside(folder.resolve(), OUTPUT_DIR)
            logger.warning("%s held the checkpoints of an earlier run, which are now in %s", folder, moved)

    async def close(self) -> None:
        """Stops the child process, if any, and closes the connections."""
        if self._process is not None:
            await self._process.stop()
            self._process = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self._version = 0

    async def policy_endpoint(self) -> PolicyEndpoint:
        version = await self._served_version()
        models = await self._request("GET", "/v1/models", _Models.model_validate_json)
        return PolicyEndpoint(
            f"{self._base_url}/v1",
            models.data[0].id,
            self._token(),
            version,
            base_model=self.config.model,
            vocab_size=self._vocab_size,
        )

    async def _served_version(self) -> int:
        """Raises BackendError if the backend has gone back to earlier weights."""
        health = await self._request("GET", "/health", _Health.model_validate_json)
        version, self._vocab_size = health.policy_version, health.vocab_size
        if version < self._version:
            raise BackendError(
                f"the backend at {self._base_url} serves policy version {version}, but was at version {self._version}: "
                "it was restarted without the weights of this run"
            )
        self._version = version
        return version

    async def watch(self) -> None:
        interval = min(_WATCH_SECONDS, self.config.read_timeout)
        while True:
            if self._process is None:
                await asyncio.sleep(interval)
            elif await self._process.exits_within(interval):
                raise BackendUnavailable(str(self._process.exit_report()))
            await self._served_version()

    def training_settings(self) -> dict[str, Any]:
        return self.config.training.effective()

    async def check_settings(self) -> None:
        try:
            settings = orjson.dumps(self._job_settings(1).effective())
            headers = {"Content-Type": "application/json"}
            await self._request("POST", "/v1/train/check", orjson.loads, settings, headers)
        except RequestRefused as error:
            if error.status not in (404, 405):  # earlier releases refuse only the job itself
                raise ConfigError(f"the trainer adapter's settings are refused by the backend: {error}") from error

    def _job_settings(self, epoch: int) -> TrainingSettings:
        epochs = max(self.run_config.num_epochs, epoch)
        return TrainingSettings(
            **self.config.training.model_dump(),
            seed=self._full_config.general.seed,
            schedule_range=((epoch - 1) / epochs, epoch / epochs),
        )

    async def is_healthy(self) -> bool:
        try:
            await self._request("GET", "/health", _Health.model_validate_json, retried=False)
        except BackendError as error:
            logger.warning("%s", error)
            return False
        return True

    async def wait_until_reachable(self) -> bool:
        try:
            await self._request("GET", "/health", _Health.model_validate_json, retried=False)
        except BackendUnavailable:
            await self._served_version()  # retried for up to `retry_timeout`
            return True
        return False

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submits the rows of all trajectories as one job, idempotent per run and epoch.

        An epoch whose job is pending, running or completed is not trained again. Groups without rows get the default
        advantages. Without an epoch, which plugins may leave unset, every call submits a new job.
        """
        trajectories = recover_collection(trajectories)
        rows = training_rows(trajectories)
        self._submissions += 1
        if trajectories.epoch is None:
            epoch, key = self._submissions, f"{trajectories.run_id}/submission {self._submissions}"
        else:
            epoch, key = max(trajectories.epoch, 1), f"{trajectories.run_id}/{trajectories.epoch}"
        return await self._submit(rows, self._job_settings(epoch), trajectories.run_id, key, epoch)

    async def submit_rows(
        self, rows: Sequence[TrainingRow], run_id: str, name: str, overrides: dict[str, Any]
    ) -> TrainingJobRef:
        options = {key: value for key, value in self.config.training if key not in LossSettings.model_fields}
        given = {key: value for key, value in options.items() if key not in ("dpo", "kto")} | overrides
        settings = TrainingSettings(**given, seed=self._full_config.general.seed)
        return await self._submit(rows, settings, run_id, f"{run_id}/{name}", None)

    async def _submit(
        self, rows: Sequence[TrainingRow], settings: TrainingSettings, run_id: str, key: str, epoch: int | None
    ) -> TrainingJobRef:
        header = {"settings": settings.effective(), "num_rows": len(rows), "keep": self._keep().model_dump()}
        body = await asyncio.to_thread(_gzip_job, header, rows)
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/x-ndjson", "Idempotency-Key": key}
        job = await self._request("POST", "/v1/train/jobs", JobState.model_validate_json, body, headers)
        metadata = {"job_id": job.id, "key": key, "epoch": epoch}
        return TrainingJobRef(run_id=run_id, backend=BACKEND, metadata=metadata)

    def _keep(self) -> Retention:
        """The policy for the next version; a resumed run needs the two before it."""
        keep, best = self.config.keep, self.best_version
        versions = [self._version, self._version - 1, *([best] if keep.best and best is not None else [])]
        return Retention(last=keep.last, every=keep.every, versions=versions, after=self._first_version)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        try:
            state = await self._request("GET", self._job_path(ref), JobState.model_validate_json)
        except RequestRefused as error:
            if error.code == "job_not_found":
                raise JobFailed(f"the backend at {self._base_url} was restarted and lost the job: {error}") from error
            raise
        return self._job_status(ref, state)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Follows the job's event stream. If the stream breaks, asks for the job's state and opens another one."""
        delay = _RECONNECT_DELAY
        while True:
            try:
                async with aclosing(self._events(ref)) as states:
                    async for state in states:
                        if state.status in _FINAL_STATUSES:
                            return self._job_status(ref, state)
            except BackendUnavailable as error:
                logger.info("lost the event stream of %s: %s", self._job_path(ref), error)
            current = await self.status(ref)
            if current.status.value in _FINAL_STATUSES:
                return current
            await asyncio.sleep(min(delay, poll_interval))
            delay *= 2

    async def cancel(self, ref: TrainingJobRef) -> None:
        await self._request("POST", f"{self._job_path(ref)}/cancel", JobState.model_validate_json)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("job %s: %s", (ref.metadata or {}).get("job_id"), metrics)

    def _job_path(self, ref: TrainingJobRef) -> str:
        return f"/v1/train/jobs/{(ref.metadata or {})['job_id']}"

    async def _events(self, ref: TrainingJobRef) -> AsyncGenerator[JobState, None]:
        path, connection = f"{self._job_path(ref)}/events", self._connected()
        async with connection.open("GET", self._base_url + path) as response:
            if response.status != 200:
                raise _error_from_response(response, await response.read())
            async for line in connection.lines(response):
                if (data := event_data(line)) is not None:
                    yield connection.parsed(f"GET {path}", data, JobState.model_validate_json)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise BackendError("the adapter is not initialized, or is closed")
        return self._connection

    async def _request(
        self,
        method: str,
        path: str,
        parse: Callable[[bytes], T],
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        retried: bool = True,
    ) -> T:
        """Returns the parsed response. All requests here are idempotent, so each can be retried."""
        connection, where = self._connected(), f"{method} {path}"

        async def attempt() -> T:
            async with connection.open(method, self._base_url + path, data, headers) as response:
                body = await response.read()
                if response.status >= 400:
                    raise _error_from_response(response, body)
            return connection.parsed(where, body, parse)

        return await (connection.retry(where, attempt) if retried else attempt())

    def _job_status(self, ref: TrainingJobRef, state: JobState) -> TrainingJobStatus:
        self._version = max(self._version, state.policy_version or 0)
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend=ref.backend,
            status=TrainingStatusEnum(state.status),
            progress=state.progress,
            message=state.message,
            metadata={"policy_version": state.policy_version, "checkpoint": state.checkpoint, **state.metrics},
        )


def _gzip_job(header: dict[str, Any], rows: Sequence[TrainingRow]) -> bytes:
    """The job as gzipped JSON lines. Compression level 1 pays off even on loopback."""
    # model_dump() is much slower, and only needed for extra fields
    records = [header, *(_set_fields(row) if not row.__pydantic_extra__ else row.model_dump() for row in rows)]
    return gzip.compress(b"\n".join(map(orjson.dumps, records)) + b"\n", compresslevel=1)


def _set_fields(row: BaseModel) -> dict[str, Any]:
    return {key: value for key, value in row.__dict__.items() if key in row.model_fields_set}


def _error_from_response(response: aiohttp.ClientResponse, content: bytes) -> BackendError:
    text = content.decode(errors="replace")
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    fields = error if isinstance(error, dict) else {}
    message = error_message(body) or text[:500] or "no reason given"
    message = f"{response.method} {response.url.path}: {message}"
    if is_transient(response.status):
        return BackendUnavailable(f"{message} (status {response.status})", retry_after=retry_after(response.headers))
    return RequestRefused(message, status=response.status, param=fields.get("param"), code=fields.get("code"))


@register_trainer_adapter(config_type=InsituAdapterConfig)
async def insitu_trainer_adapter(config: InsituAdapterConfig, builder: Builder) -> AsyncIterator[InsituTrainerAdapter]:
    adapter = InsituTrainerAdapter(config, builder)
    try:
        yield adapter
    finally:
        await adapter.close()
