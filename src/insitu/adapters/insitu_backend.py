"""Trainer adapter for `insitu backend`, which it starts as a child process or reaches at a URL."""

import asyncio
import gzip
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
import orjson
from pydantic import Field, SecretStr, model_validator

from insitu.advantages.estimator import training_rows
from insitu.builder import Builder
from insitu.errors import BackendError, BackendUnavailable, ConfigError, RequestRefused, TrajectoryError
from insitu.files import FolderLock
from insitu.http_format import error_message, event_data
from insitu.interfaces import TrainerAdapter
from insitu.registry import register_trainer_adapter
from insitu.schemas.finetuning import (
    FinetuneConfig,
    PolicyEndpoint,
    TrainerAdapterConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from insitu.schemas.training_jobs import JobState, TrainingOptions, TrainingSettings
from insitu.training.checkpoints import find_checkpoint
from insitu.training.store import BACKEND_FOLDER, OUTPUT_DIR, move_aside

logger = logging.getLogger(__name__)

BACKEND = "insitu"
_MAX_ATTEMPTS = 4
_READY_LINE = re.compile(r"insitu backend ready at (http://\S+)")
_FINAL_STATUSES = ("completed", "failed", "canceled")


class InsituAdapterConfig(TrainerAdapterConfig, name="insitu_trainer_adapter"):
    """Trains on an `insitu backend`. Set exactly one of `model` and `url`."""

    model: str | None = None
    """A local folder or Hugging Face repo id. The adapter starts an `insitu backend` with this model on a free port.
    A run directory stands for its best checkpoint, or the latest without validation; `RUN_DIR/latest` for its latest.
    """
    url: str | None = None
    """URL of a running backend, with http:// or https://."""
    api_key: SecretStr | None = None
    """Bearer token for the backend at `url`."""
    name: str = "policy"
    """The name the model is served under. With `url` it is optional; if set, it must match the name served there."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights. auto: float32 on CPU, the checkpoint's dtype elsewhere."""
    startup_timeout: float = Field(default=300.0, gt=0)
    """Seconds to wait for the backend to load its model."""
    training: TrainingOptions = Field(default_factory=TrainingOptions)
    """Options sent with each training job."""

    @property
    def served_name(self) -> str | None:
        """The name the model is served under; None if it is not configured (with `url`)."""
        return self.name if self.model is not None or "name" in self.model_fields_set else None

    def starting_from(self, checkpoint: str) -> Self | None:
        return self.model_copy(update={"model": checkpoint}) if self.model is not None else None

    @model_validator(mode="after")
    def _model_or_url(self) -> "InsituAdapterConfig":
        if (self.model is None) == (self.url is None):
            raise ValueError(
                "set exactly one of model (a local folder or a Hugging Face repo id) and url (of a running backend)"
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; it must begin with http:// or https://")
        ignored = ("api_key",) if self.url is None else ("device", "dtype", "startup_timeout")
        if unused := sorted(self.model_fields_set.intersection(ignored)):
            raise ValueError(f"{', '.join(unused)}: allowed with {'url' if self.url is None else 'model'} only")
        return self


class BackendProcess:
    """An `insitu backend` child process that logs to `log_path`.

    It exits when this process ends, even if this process is killed with SIGKILL.
    """

    def __init__(self, cli_arguments: Sequence[str], log_path: Path) -> None:
        self.token = secrets.token_urlsafe()
        """Required with every request, to keep other users of this machine out."""
        self._cli_arguments = cli_arguments
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, startup_timeout: float) -> str:
        """Returns the URL once the backend is ready. Raises BackendUnavailable with the end of its log otherwise."""
        await asyncio.to_thread(self._log_path.parent.mkdir, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "insitu", "backend", *self._cli_arguments, "--parent_pid", str(os.getpid())]
        with self._log_path.open("ab") as log:
            # a new session, so that Ctrl-C reaches only this process, which then stops the child
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "INSITU_BACKEND_TOKEN": self.token},
            )
        try:
            async with asyncio.timeout(startup_timeout):
                url = await self._ready_url(self._process)
        except TimeoutError:
            await self.stop()
            problem = f"insitu backend was not ready after {startup_timeout:g} s; {self._log_tail()}"
            raise BackendUnavailable(problem) from None
        except BaseException:  # the process must not outlive a failed start
            await self.stop()
            raise
        logger.info("backend process %d at %s", self._process.pid, url)
        return url

    async def _ready_url(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if match := _READY_LINE.search(line.decode(errors="replace")):
                return match.group(1)
        code = await process.wait()
        raise BackendUnavailable(f"insitu backend exited with code {code} before it was ready; {self._log_tail()}")

    def exit_report(self) -> str | None:
        """The exit code and the end of the log if the process has exited on its own."""
        if self._process is None or self._process.returncode is None:
            return None
        return f"the backend process exited with code {self._process.returncode}; {self._log_tail()}"

    def _log_tail(self) -> str:
        try:
            lines = self._log_path.read_text(errors="replace").strip().splitlines()[-8:]
        except OSError:
            lines = []
        return f"the end of its log ({self._log_path}):\n  " + "\n  ".join(lines or ["(empty)"])

    async def stop(self) -> None:
        """Terminates the process, and kills it after five seconds."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            try:
                process.send_signal(signal_number)
                await asyncio.wait_for(process.wait(), timeout=5.0)
            except ProcessLookupError:
                return
            except TimeoutError:
                continue
            return


class InsituTrainerAdapter(TrainerAdapter):
    """Submits training rows to an `insitu backend` and tracks its jobs."""

    def __init__(self, adapter_config: InsituAdapterConfig, builder: Builder) -> None:
        super().__init__(adapter_config)
        self.config = adapter_config
        self._full_config = builder.config
        self._process: BackendProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._submissions = 0
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
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._token()}"}
            self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(sock_connect=10))
        try:
            await self._request("GET", "/health")
        except RequestRefused as error:
            raise BackendUnavailable(f"{self._base_url} is not an insitu backend: {error}") from error
        served = (await self.policy_endpoint()).model
        if self.config.served_name not in (None, served):
            problem = f"name is {self.config.name!r}, but {self._base_url} serves {served!r}"
            raise ConfigError(f"trainer_adapters: {problem}; set name to {served!r} or omit it")

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
            if model.startswith((".", "/", "~")) or model.count("/") > 1:
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
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def policy_endpoint(self) -> PolicyEndpoint:
        health = await self._request("GET", "/health")
        models = await self._request("GET", "/v1/models")
        try:
            name, version = models["data"][0]["id"], health["policy_version"]
        except (LookupError, TypeError):
            raise BackendError(f"{self._base_url} is not an insitu backend: no model or policy_version") from None
        return PolicyEndpoint(f"{self._base_url}/v1", name, self._token(), version, vocab_size=health.get("vocab_size"))

    def training_settings(self) -> dict[str, Any]:
        return self.config.training.model_dump(mode="json", exclude_none=True)

    async def check_settings(self) -> None:
        try:
            await self._request("POST", "/v1/train/check", json=self._job_settings(1).model_dump(mode="json"))
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
            await self._request("GET", "/health")
        except BackendError as error:
            logger.warning("%s", error)
            return False
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submits the rows of all trajectories as one job, idempotent per run and epoch.

        An epoch whose job is pending, running or completed is not trained again. Groups without rows get the default
        advantages. Without an epoch, which plugins may leave unset, every call submits a new job.
        """
        rows = training_rows(trajectories)
        if not rows:
            raise TrajectoryError(
                f"run {trajectories.run_id}: none of {sum(map(len, trajectories.trajectories))} trajectories has rows "
                "or captured calls; insitu_traj_builder captures calls"
            )
        self._submissions += 1
        if trajectories.epoch is None:
            epoch, key = self._submissions, f"{trajectories.run_id}/submission {self._submissions}"
        else:
            epoch, key = max(trajectories.epoch, 1), f"{trajectories.run_id}/{trajectories.epoch}"
        header = {"settings": self._job_settings(epoch).model_dump(mode="json"), "num_rows": len(rows)}
        body = await asyncio.to_thread(_gzip_job, header, rows)
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/x-ndjson", "Idempotency-Key": key}
        job = await self._request("POST", "/v1/train/jobs", data=body, headers=headers, attempts=_MAX_ATTEMPTS)
        metadata = {"job_id": JobState.model_validate(job).id, "key": key, "epoch": epoch}
        return TrainingJobRef(run_id=trajectories.run_id, backend=BACKEND, metadata=metadata)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        state = await self._request("GET", self._job_path(ref), attempts=_MAX_ATTEMPTS)
        return _job_status(ref, JobState.model_validate(state))

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Follows the job's event stream.

        If the stream ends early, checks the status, waits `poll_interval` seconds and reconnects.
        """
        while True:
            try:
                async for state in self._events(ref):
                    if state.status in _FINAL_STATUSES:
                        return _job_status(ref, state)
            except (BackendUnavailable, aiohttp.ClientError) as error:
                logger.warning("lost the event stream of %s: %s", self._job_path(ref), error)
            current = await self.status(ref)
            if current.status.value in _FINAL_STATUSES:
                return current
            await asyncio.sleep(poll_interval)

    async def cancel(self, ref: TrainingJobRef) -> None:
        await self._request("POST", f"{self._job_path(ref)}/cancel")

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("job %s: %s", (ref.metadata or {}).get("job_id"), metrics)

    def _job_path(self, ref: TrainingJobRef) -> str:
        return f"/v1/train/jobs/{(ref.metadata or {})['job_id']}"

    async def _events(self, ref: TrainingJobRef) -> AsyncIterator[JobState]:
        async with self._open("GET", f"{self._job_path(ref)}/events") as response:
            if response.status != 200:
                raise await _error_from_response(response)
            async for line in response.content:
                if (data := event_data(line)) is not None:
                    yield JobState.model_validate_json(data)

    def _open(self, method: str, path: str, **options: Any) -> Any:
        if self._session is None:
            raise BackendError("the adapter is not initialized, or is closed")
        return self._session.request(method, self._base_url + path, **options)

    async def _request(self, method: str, path: str, *, attempts: int = 1, **options: Any) -> Any:
        """Returns the response's JSON. Retries lost connections: all requests here are idempotent."""
        for attempt in range(1, attempts + 1):
            try:
                async with self._open(method, path, **options) as response:
                    if response.status >= 400:
                        raise await _error_from_response(response)
                    return orjson.loads(await response.read())
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                exited = self._process.exit_report() if self._process else None
                if exited or attempt == attempts:
                    reason = exited or f"{type(error).__name__}: {error}"
                    raise BackendUnavailable(f"no answer from the backend at {self._base_url}: {reason}") from error
                await asyncio.sleep(0.2 * 2**attempt)
            except orjson.JSONDecodeError as error:
                raise BackendError(f"{self._base_url}{path} did not return JSON: is it an insitu backend?") from error
        raise AssertionError("unreachable")


def _gzip_job(header: dict[str, Any], rows: list[Any]) -> bytes:
    """The job as gzipped JSON lines. Compression level 1 pays off even on loopback."""
    # model_dump() is much slower than __dict__ and only needed for extra fields
    records = [header, *(row.__dict__ if not row.__pydantic_extra__ else row.model_dump() for row in rows)]
    return gzip.compress(b"\n".join(map(orjson.dumps, records)) + b"\n", compresslevel=1)


async def _error_from_response(response: aiohttp.ClientResponse) -> BackendError:
    text = await response.text()
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    fields = error if isinstance(error, dict) else {}
    message = error_message(body) or text[:500] or f"status {response.status}"
    message = f"{response.method} {response.url.path}: {message}"
    if 400 <= response.status < 500:
        return RequestRefused(message, status=response.status, param=fields.get("param"), code=fields.get("code"))
    return BackendUnavailable(f"{message} (status {response.status})")


def _job_status(ref: TrainingJobRef, state: JobState) -> TrainingJobStatus:
    return TrainingJobStatus(
        run_id=ref.run_id,
        backend=ref.backend,
        status=TrainingStatusEnum(state.status),
        progress=state.progress,
        message=state.message,
        metadata={"policy_version": state.policy_version, "checkpoint": state.checkpoint, **state.metrics},
    )


@register_trainer_adapter(config_type=InsituAdapterConfig)
async def insitu_trainer_adapter(config: InsituAdapterConfig, builder: Builder) -> AsyncIterator[InsituTrainerAdapter]:
    adapter = InsituTrainerAdapter(config, builder)
    try:
        yield adapter
    finally:
        await adapter.close()
