"""The trainer adapter for `insitu backend`."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import orjson

from insitu.advantages.estimator import rows_by_part, training_rows
from insitu.builder import Builder, builder_at_work
from insitu.collect.recovery import recover_collection
from insitu.disk.files import writable_folder, write_file
from insitu.disk.folder_lock import FolderLock
from insitu.disk.json_files import gzip_lines, read_object
from insitu.errors import BackendError, BackendUnavailable, ConfigError, JobLost, RequestRefused
from insitu.registry import register_trainer_adapter
from insitu.runs.files import BACKEND_FOLDER, STARTED_FILE, holds_run
from insitu.runs.store import ORPHAN_SECONDS, OUTPUT_DIR, move_aside
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
from insitu.training.interfaces import RowAdapter, StreamingAdapter
from insitu.training.jobs import JobAdapter, job_id, succeeds
from insitu.training.memory_plan import MemoryPlan
from insitu.training.native.backend_api import HEADERS, JOBS, Checkpoints, Health, Models, OpenJob, steps_obstacle
from insitu.training.native.backend_process import BackendProcess
from insitu.training.native.config import InsituAdapterConfig, resolve_model
from insitu.training.native.memory import plan_memory
from insitu.wire.connection import Connection, event_data, response_error
from insitu.wire.endings import end_tasks
from insitu.workflow.llms import import_client

logger = logging.getLogger(__name__)
T = TypeVar("T")

BACKEND = "insitu"
_WATCH_SECONDS = 5.0
"""Interval of the health checks while the backend is in use."""


@register_trainer_adapter(config_type=InsituAdapterConfig)
class InsituTrainerAdapter(RowAdapter, StreamingAdapter, JobAdapter):
    """Submits training rows to an `insitu backend` and tracks its jobs."""

    def __init__(self, adapter_config: InsituAdapterConfig, builder: Builder | None = None) -> None:
        super().__init__(adapter_config)
        self.config = adapter_config
        self._builder = builder or builder_at_work() or Builder()
        self._full_config = self._builder.config
        self._training = adapter_config.training.model_copy(deep=True)
        """With the digests of its Python code, once the backend has checked it."""
        self._process: BackendProcess | None = None
        self._connection: Connection | None = None
        self._submissions = 0
        self._job: tuple[str, Callable[[], bytes]] | None = None
        """Key and body of the latest job."""
        self._open_job: OpenJob | None = None
        self._first_version = 0  # that of a backend at a url when the run began; earlier ones belong to earlier runs
        self._best_version: int | None = None
        self._checkpoints = Checkpoints(self._request)
        self._version = 0  # the latest policy version that the backend is known to have had
        self._health = Health(policy_version=0)
        self._needed_versions = 0
        self._loaded_versions: int | None = None
        self._base_url, token = adapter_config.address_and_token
        self._token = token or "none"  # the header needs a value
        self.starts_backend, self.backend_url = adapter_config.model is not None, adapter_config.url

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        self._checkpoints.start()
        started, folder = None, self._full_config.working_dir / run_config.output_dir / BACKEND_FOLDER
        if self.config.model is not None and self._process is None:
            started = await asyncio.to_thread(self._starting_point, folder, self.config.model)
            plan = await asyncio.to_thread(self.memory_plan)  # it may read the dataset
            kv_memory = plan.kv_limit if plan is not None else None
            more = {**started, "kv_memory": kv_memory, "output_dir": folder}
            arguments = self.config.backend_arguments(self._full_config, **more)
            restarts, secrets = self.config.max_restarts, self.config.backend_secrets
            self._process = BackendProcess(arguments, folder / "backend.log", restarts, secrets)
            imported = asyncio.create_task(import_client())
            self._base_url, self._token = await self._process.start(self.config.startup_timeout), self._process.token
            await imported
        if self._connection is None:
            headers = {"Authorization": f"Bearer {self._token}"}
            report = self._process.final_report if self._process is not None else lambda: None
            limits = self.config.read_timeout, self.config.retry_timeout
            self._connection = Connection(f"the backend at {self._base_url}", headers, *limits, report)
        try:
            await self._served_version()
        except RequestRefused as error:
            raise BackendUnavailable(f"{self._base_url} is not an insitu backend: {error}") from error
        served = (await self.policy_endpoint()).model
        if self.config.served_name not in (None, served):
            problem = f"name is {self.config.name!r}, but {self._base_url} serves {served!r}"
            raise ConfigError(f"trainer_adapters: {problem}; set name to {served!r} or omit it")
        if started is not None:
            write_file(folder / STARTED_FILE, orjson.dumps(started | {"dtype": self._health.dtype}) + b"\n")
        self._connection.verified = True
        self._first_version = 0 if self._process is not None else self._version

    def _starting_point(self, folder: Path, model: str) -> dict[str, str]:
        """The model that training starts from; that of an earlier process if the run continues, with its dtype.

        A new run moves the checkpoints of an earlier one aside; the built-in trainers have moved the whole run already.
        """
        request, record = self._builder.request, folder / STARTED_FILE
        if folder.exists():
            FolderLock(folder, OUTPUT_DIR, wait=ORPHAN_SECONDS).release()
        continues = request is not None and request.resume and holds_run(folder.parent)  # else it has never begun
        if continues and record.is_file():
            ignored = () if self.config.dtype == "auto" else ("dtype",)
            return {key: value for key, value in read_object(record).items() if key not in ignored}
        if (folder / "checkpoints").exists():
            self._builder.moved[folder.resolve()] = moved = move_aside(folder.resolve(), OUTPUT_DIR)
            logger.warning("%s held the checkpoints of an earlier run, which are now in %s", folder, moved)
        started = {"model": resolve_model(model, self._builder)}
        write_file(writable_folder(folder, OUTPUT_DIR) / STARTED_FILE, orjson.dumps(started) + b"\n")
        return started

    async def close(self) -> None:
        """Stops the child process, if any, and closes the connections; the last version is on disk then."""
        await self._checkpoints.finish(self._version if self._job is not None else None)
        if self._process is not None:
            await self._process.stop()
        if self._connection is not None:
            await self._connection.close()
        self._process, self._connection, self._version = None, None, 0

    @property
    def backend_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def policy_endpoint(self) -> PolicyEndpoint:
        version = await self._served_version()
        models = await self._request("GET", "/v1/models", Models.model_validate_json)
        names, model, url = [model.id for model in models.data], self.config.model, f"{self._base_url}/v1"
        keeps_versions = self._health.sampler == "embedded" or self.config.training.lora is not None
        pins = keeps_versions and f"{names[0]}@{version}" in names
        more = self._health.model_dump(include={"vocab_size", "max_length", "weights", "logprob_tolerance"})
        return PolicyEndpoint(url, names[0], self._token, version, base_model=model, names_versions=pins, **more)

    async def _served_version(self) -> int:
        """Raises BackendError if the backend has gone back to earlier weights."""
        known = self._version  # `watch` asks too, and may be answered earlier although it has asked later
        health = await self._request("GET", "/health", Health.model_validate_json)
        if (version := health.policy_version) < known:
            lost = f"serves policy version {version}, but was at version {known}: it was restarted without the weights"
            raise BackendError(f"the backend at {self._base_url} {lost} of this run")
        if version >= self._version:
            self._health, self._version = health, version
        return self._version

    async def watch(self) -> None:
        async def check() -> None:
            while True:
                await asyncio.sleep(min(_WATCH_SECONDS, self.config.read_timeout))
                if process is not None:
                    await process.ready.wait()
                await self._served_version()
                if self._open_job is not None:
                    await self._open_job.keep_alive()

        process = self._process
        watching = [process.keep_running()] if process is not None else []
        tasks = [asyncio.create_task(each) for each in (*watching, check())]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)

    def memory_plan(self) -> MemoryPlan | None:
        return self._memory_plan

    @cached_property
    def _memory_plan(self) -> MemoryPlan | None:
        """Computed once, before the backend starts: the header and the backend get the same figures."""
        return plan_memory(self.config, self._builder) if self.config.model is not None else None

    def training_settings(self) -> dict[str, Any]:
        return self._training.effective()

    def serving_settings(self) -> dict[str, Any]:
        return self._health.model_dump(include={"dtype", "tool_format", "reasoning_format"}, exclude_none=True)

    async def check_settings(self) -> None:
        try:
            checked = await self._check_settings("/v1/train/check")
            for key, part in self._training.code.items():
                part.sha256 = checked.code[key].sha256
        except RequestRefused as error:
            if error.status not in (404, 405):  # a server without the check refuses only the job itself
                raise ConfigError(f"the trainer adapter's settings are refused by the backend: {error}") from error

    async def _check_settings(self, path: str) -> Any:
        settings = orjson.dumps(self._job_settings(1, self._training.effective()))
        parse = TrainingSettings.model_validate_json if self._training.code else orjson.loads
        return await self._request("POST", path, parse, settings, {"Content-Type": "application/json"})

    def correct_staleness(self) -> None:
        self._training = self._training.corrected()

    async def prepare_staleness(self, staleness: int, *, pinned: bool) -> None:
        self._needed_versions = staleness + 2
        if pinned:
            self._loaded_versions = staleness + 1
            try:
                await self._check_settings(f"/v1/train/check?versions={self._needed_versions}")
            except RequestRefused as error:
                raise ConfigError(str(error)) from error

    def _job_settings(self, epoch: int, options: dict[str, Any]) -> dict[str, Any]:
        epochs, seed = max(self.run_config.num_epochs, epoch), self._full_config.general.seed
        return options | {"seed": seed, "schedule_range": ((epoch - 1) / epochs, epoch / epochs)}

    @cached_property
    def _options(self) -> dict[str, Any]:
        """The settings of the jobs of all epochs; complete once the backend has checked them."""
        return self._training.effective()

    async def is_healthy(self) -> bool:
        return await succeeds(self._request("GET", "/health", Health.model_validate_json, retried=False))

    async def wait_until_reachable(self, since: float) -> bool:
        check = partial(self._request, "GET", "/health", Health.model_validate_json, retried=False)
        was_away = await self._connected().retry.was_away(since, check, self._served_version)
        return was_away or (self._process is not None and self._process.restarted_at > since)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submits the rows of all trajectories as one job, idempotent per run and epoch.

        An epoch whose job is pending, running or completed is not trained again. Groups without rows get the default
        advantages. Without an epoch, which plugins may leave unset, every call submits a new job.
        """
        has_tokens = [bool(t.rows or t.trained_calls) for group in trajectories.trajectories for t in group]
        if not has_tokens or not all(has_tokens):  # a plugin's: their calls are those behind their messages
            trajectories = recover_collection(trajectories)
        parts, self._submissions = await asyncio.to_thread(rows_by_part, trajectories), self._submissions + 1
        if trajectories.epoch is None:
            epoch, key = self._submissions, f"{trajectories.run_id}/submission {self._submissions}"
        else:
            epoch, key = max(trajectories.epoch, 1), f"{trajectories.run_id}/{trajectories.epoch}"
        settings, planned = self._job_settings(epoch, self._options), trajectories.streamed
        ahead = planned is not None and not self._training.may_be_one_step(planned)
        return await self._submit(parts, settings, trajectories.run_id, key, epoch, logprobs_ahead=ahead)

    def streaming_obstacle(self, episodes: int) -> str | None:
        if self.config.learner.total > 1:
            return "several learner processes take whole jobs"
        return steps_obstacle(self._training, episodes)

    async def open_job(self, run_id: str, epoch: int, num_parts: int, episodes: int) -> None:
        self._open_job = OpenJob(f"{run_id}/{epoch}", num_parts, self._request)
        ahead = not self._training.may_be_one_step(episodes)
        await self._open_job.open(self._job_settings(epoch, self._options), logprobs_ahead=ahead)

    async def add_part(self, number: int, trajectories: TrajectoryCollection) -> None:
        assert self._open_job is not None
        await self._open_job.add(number, await asyncio.to_thread(training_rows, trajectories))

    async def abandon_job(self) -> None:
        job, self._open_job = self._open_job, None
        if job is not None:
            await job.cancel()

    async def submit_rows(
        self, rows: Sequence[TrainingRow], run_id: str, name: str, overrides: dict[str, Any]
    ) -> TrainingJobRef:
        options = {key: value for key, value in self._training if key not in LossSettings.model_fields}
        values = {key: value for key, value in options.items() if key not in ("dpo", "kto")} | overrides
        settings = TrainingSettings(**values, seed=self._full_config.general.seed)
        return await self._submit([rows], settings.effective(), run_id, f"{run_id}/{name}", None)

    def note_best(self, version: int | None) -> None:
        self._best_version = version
        self._checkpoints.begin(version if self.config.keep.best else None)

    async def find(self, run_id: str, epoch: int, version: int | None) -> TrainingJobRef | None:
        """Always None: the backend answers a second submission with the job that it has for the key."""
        return None

    async def _submit(
        self,
        parts: Sequence[Sequence[TrainingRow]],
        settings: dict[str, Any],
        run_id: str,
        key: str,
        epoch: int | None,
        **header: bool,
    ) -> TrainingJobRef:
        rows, sizes, keep = [*chain(*parts)], [*map(len, parts)], self._keep()
        first = {"settings": settings, "num_rows": len(rows), "keep": keep.model_dump(exclude_none=True)}
        first |= {"parts": sizes, **header} if len(parts) > 1 else {}
        opened, self._open_job = self._open_job, None
        job = await opened.close(key, sizes, keep) if opened is not None else None
        if job is None:
            body = await asyncio.to_thread(gzip_lines, first, rows)
            self._job = key, lambda: body
            job = await self._post_job(*self._job)
        else:  # sent again only if the backend loses the job
            self._job = key, partial(gzip_lines, first, rows)
        return TrainingJobRef(run_id=run_id, backend=BACKEND, metadata={"job_id": job.id, "key": key, "epoch": epoch})

    async def _post_job(self, key: str, body: Callable[[], bytes]) -> JobState:
        headers, sent = HEADERS | {"Idempotency-Key": key}, await asyncio.to_thread(body)
        job = await self._request("POST", JOBS, JobState.model_validate_json, sent, headers)
        if job.body_differs:
            problem = f"the backend at {self._base_url} has a job with the key {key!r} and other rows or settings"
            raise BackendError(f"{problem} ({job.id}): continue the run with the settings that it had")
        return job

    async def submit_again(self, ref: TrainingJobRef, error: JobLost) -> TrainingJobRef:
        """The backend still has the weights from before the job, or after it."""
        metadata = ref.metadata or {}
        if self._job is None or self._job[0] != metadata["key"]:
            raise error
        await self._served_version()
        job = await self._post_job(*self._job)
        return ref.model_copy(update={"metadata": metadata | {"job_id": job.id}})

    def _keep(self) -> Retention:
        """The policy for the next version; a resumed run needs the two before it."""
        keep, best = self.config.keep, self._best_version
        versions = [self._version, self._version - 1, *([best] if keep.best and best is not None else [])]
        limits = keep.model_dump(include={"every", "optimizer", "snapshots"})
        limits["last"] = max(keep.last, self._needed_versions)
        return Retention(**limits, versions=versions, after=self._first_version, loaded=self._loaded_versions)

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        try:
            state = await self._request("GET", self._job_path(ref), JobState.model_validate_json)
        except RequestRefused as error:
            if error.code == "job_not_found":
                raise JobLost(f"the backend at {self._base_url} was restarted and lost the job: {error}") from error
            raise
        return self._job_status(ref, state)

    async def events(self, ref: TrainingJobRef, interval: float) -> AsyncGenerator[TrainingJobStatus, None]:
        """The states of the job's event stream, and then, as the stream may break, the job's state."""
        path, connection = f"{self._job_path(ref)}/events", self._connected()
        try:
            async with connection.open("GET", self._base_url + path) as response:
                if response.status != 200:
                    raise response_error(response, await response.read())
                async for line in connection.lines(response):
                    if (data := event_data(line)) is not None:
                        state = connection.parsed(f"GET {path}", data, JobState.model_validate_json)
                        yield self._job_status(ref, state)
        except BackendUnavailable as error:
            logger.info("lost the event stream of %s: %s", path, error)
        except RequestRefused as error:
            if error.code != "job_not_found":
                raise
        yield await self.status(ref)

    async def cancel(self, ref: TrainingJobRef) -> None:
        await self._request("POST", f"{self._job_path(ref)}/cancel", JobState.model_validate_json)

    def _job_path(self, ref: TrainingJobRef) -> str:
        return f"{JOBS}/{job_id(ref)}"

    def _connected(self) -> Connection:
        if self._connection is None:
            raise BackendError("the adapter is not initialized, or is closed")
        return self._connection

    async def _request(self, method: str, path: str, parse: Callable[[bytes], T], *args: Any, **options: Any) -> T:
        """Requests to the backend are idempotent, so each can be retried."""
        return await self._connected().request(method, self._base_url + path, parse, *args, **options)

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
