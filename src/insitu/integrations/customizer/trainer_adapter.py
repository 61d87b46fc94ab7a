"""The adapter for NeMo Customizer: records, dataset, job and deployment of one collection.

All names are derived from the run id and the epoch, so that an adapter that is asked again, in another process too,
finds the job that was submitted instead of submitting a second one.
"""

import asyncio
import hashlib
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from insitu.builder import Builder, builder_at_work
from insitu.disk.files import writable_folder, write_file
from insitu.disk.json_files import dump_lines
from insitu.errors import BackendError, ConfigError, JobFailed, RequestRefused
from insitu.integrations.customizer.config import NeMoCustomizerTrainerAdapterConfig
from insitu.integrations.customizer.records import Split, single_pairs, split_records
from insitu.integrations.customizer.services import NeMoServices, ServiceJob, Store
from insitu.schemas.episodes import Needs
from insitu.schemas.finetuning import (
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from insitu.training.jobs import UNFINISHED, JobAdapter, job_id, job_label, polled, succeeds
from insitu.wire.connection import Retry

logger = logging.getLogger(__name__)

_ENDED_BADLY = (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)
"""A job with such a status does not keep its run and epoch from being submitted again."""

BACKEND = "nemo-customizer"
_CANCEL_SECONDS = 15.0
"""How long an interrupted run waits for the service to take back its job."""


class _Submission(NamedTuple):
    """The names of what one run and epoch creates at the services."""

    key: str
    name: str
    """The name of the job and the trained model; of the dataset too if `dataset_name` is taken."""
    output_model: str


class NeMoCustomizerTrainerAdapter(JobAdapter):
    """Uploads preference pairs, submits a customization job and follows it; deploys the model if asked to.

    Needs the packages of the extra `customizer`. If the run is interrupted, the job is canceled at the service.
    """

    needs = Needs.TEXT

    def __init__(self, adapter_config: NeMoCustomizerTrainerAdapterConfig, builder: Builder | None = None) -> None:
        super().__init__(adapter_config)
        self.config = adapter_config
        self._seed = (builder or builder_at_work() or Builder()).config.general.seed
        self._services = NeMoServices(adapter_config)
        self.address = adapter_config.entity_host
        self._entities = Retry(f"the NeMo services at {self.address}", adapter_config.retry_timeout)
        self._files = Retry(f"the Data Store at {adapter_config.datastore_host}", adapter_config.retry_timeout)
        self.poll_interval = adapter_config.poll_interval_seconds
        self.max_status_failures = adapter_config.max_consecutive_status_failures

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Asks both services and creates the namespace. Raises BackendError if one of them cannot be used."""
        await super().initialize(run_config)
        namespace = self.config.namespace
        for store, retry in ((Store.ENTITIES, self._entities), (Store.FILES, self._files)):
            if await retry("find the namespace", partial(self._services.has_namespace, store, namespace)):
                continue
            if not self.config.create_namespace_if_missing:
                problem = f"namespace {namespace!r} does not exist in the {store}"
                raise ConfigError(f"trainer_adapters: {problem}; create it or set create_namespace_if_missing: true")
            await retry("create the namespace", partial(self._services.create_namespace, store, namespace))

    async def check_settings(self) -> None:
        """Raises ConfigError for settings that the services would refuse after the collection."""
        name, training = self.config.customization_config, self.config.hyperparameters
        what = f"trainer_adapters: customization_config {name!r}"
        try:
            options = await self._entities("find the configuration", partial(self._services.training_options, name))
        except RequestRefused as error:
            if error.status != 404:
                raise
            raise ConfigError(f"{what} does not exist at {self.address}: {error}") from error
        if options and (training.training_type, training.finetuning_type) not in options:
            problem = f"training_type {training.training_type} with finetuning_type {training.finetuning_type}"
            offers = ", ".join(f"{training_type} with {finetuning_type}" for training_type, finetuning_type in options)
            raise ConfigError(f"{what} does not offer {problem}; it offers {offers}")

    def training_settings(self) -> dict[str, Any]:
        services = ("entity_host", "datastore_host", "namespace", "customization_config")
        names = {*services, "dataset_name", "use_full_message_history", "validation_fraction"}
        return self.config.model_dump(mode="json", include=names) | self._hyperparameters()

    def _hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters that the `training_type` uses."""
        training = self.config.hyperparameters
        return training.model_dump(mode="json", exclude=set() if training.training_type == "dpo" else {"dpo"})

    async def close(self) -> None:
        await asyncio.to_thread(self._services.close)

    async def is_healthy(self) -> bool:
        """Whether both services answer and have the namespace, and Customizer has the configuration."""
        return await succeeds(self._check_services())

    async def _check_services(self) -> None:
        for store in Store:
            if not await self._services.has_namespace(store, self.config.namespace):
                raise BackendError(f"namespace {self.config.namespace!r} does not exist in the {store}")
        await self._services.training_options(self.config.customization_config)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Uploads the records and submits the job; returns the earlier job if this run and epoch have one."""
        submission = self._submission(trajectories.run_id, trajectories.epoch)
        training, config = self.config.hyperparameters, self.config
        how = training.training_type, config.use_full_message_history, config.validation_fraction
        split = split_records(single_pairs(trajectories), *how, self._seed)
        if split.shortened_prompts:
            unsent = "of which only the last is sent (use_full_message_history: false)"
            logger.warning("%d prompts have several messages, %s", split.shortened_prompts, unsent)
        job = await self._entities("find the job", lambda: self._find(submission))
        if job is not None and job.status not in _ENDED_BADLY:
            logger.info("found job %s, which an earlier process has submitted", job.id)
        else:
            if self.config.deploy_on_completion:
                await self._check_deployment_name(submission.output_model)
            job = await self._submitted(submission, await self._upload(submission, split))
        sizes = {"training_records": len(split.training), "validation_records": len(split.validation)}
        return self._ref(trajectories.run_id, submission, job, **sizes, turns=split.turns)

    async def find(self, run_id: str, epoch: int, version: int | None) -> TrainingJobRef | None:
        """The job that any process has submitted for this run and epoch; None if there is none, or it has failed."""
        submission = self._submission(run_id, epoch)
        job = await self._entities("find the job", lambda: self._find(submission))
        return None if job is None or job.status is TrainingStatusEnum.FAILED else self._ref(run_id, submission, job)

    def _submission(self, run_id: str, epoch: int | None) -> _Submission:
        key = f"{run_id}/{1 if epoch is None else epoch}"
        name = f"{self.config.dataset_name}-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}"
        return _Submission(key, name, f"{self.config.namespace}/{name}")

    def _ref(self, run_id: str, submission: _Submission, job: ServiceJob, **sizes: int) -> TrainingJobRef:
        metadata = {
            "job_id": job.id,
            "key": submission.key,
            "dataset": job.dataset or f"{self.config.namespace}/{submission.name}",
            "output_model": job.output_model or submission.output_model,
            **sizes,
        }
        return TrainingJobRef(run_id=run_id, backend=BACKEND, metadata=metadata)

    async def _upload(self, submission: _Submission, split: Split) -> str:
        """Registers and uploads the dataset; returns its name, `dataset_name` if that is free."""
        namespace, name = self.config.namespace, await self._registered(submission)
        files = {
            "training/training_file.jsonl": dump_lines(split.training),
            "validation/validation_file.jsonl": dump_lines(split.validation),
        }
        await asyncio.to_thread(self._write, name, files)
        await self._files("upload the records", lambda: self._services.upload(namespace, name, files, submission.key))
        return name

    async def _registered(self, submission: _Submission) -> str:
        """The name under which the dataset is registered now. Raises ConfigError if other runs have all its names."""
        namespace, names = self.config.namespace, (self.config.dataset_name, submission.name)
        for name in names:
            register = partial(self._services.register_dataset, namespace, name, submission.key)
            try:
                await self._entities("register the dataset", register)
                return name
            except RequestRefused as error:
                if error.status != 409:
                    raise
                refusal = error
        problem = f"the datasets {' and '.join(names)} of namespace {namespace} exist and belong to other runs"
        raise ConfigError(f"trainer_adapters: dataset_name: {problem}; choose another dataset_name") from refusal

    def _write(self, name: str, files: dict[str, bytes]) -> None:
        folder, key = self.config.dataset_output_dir, "trainer_adapters: dataset_output_dir"
        if folder is None:
            folder, key = Path(self.run_config.output_dir) / "dataset", "finetuning.output_dir"
        for path, content in files.items():
            target = folder / name / path
            write_file(writable_folder(target.parent, key) / target.name, content)

    async def _submitted(self, submission: _Submission, dataset: str) -> ServiceJob:
        """Submits the job. If that is interrupted, waits for the answer and cancels the job."""
        task = asyncio.create_task(self._entities("submit the job", lambda: self._find_or_create(submission, dataset)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task], timeout=_CANCEL_SECONDS / 2)
            if not task.done():
                task.cancel()
                logger.error("interrupted while submitting job %s: it may run at the service", submission.output_model)
            elif not task.cancelled() and task.exception() is None:
                await self.interrupted(self._ref(submission.key, submission, task.result()))
            raise

    async def _find_or_create(self, submission: _Submission, dataset: str) -> ServiceJob:
        """One attempt. An earlier one may have created the job although its answer was lost."""
        job, name = await self._find(submission), submission.name
        if job is not None and job.status not in _ENDED_BADLY:
            return job
        if job is not None:  # its name is taken
            name = f"{name}-{job.id}"
        try:
            options = self._job_options(submission, dataset)
            return await self._services.create_job(self.config.namespace, name, submission.key, options)
        except RequestRefused as error:
            if error.status == 409 and (job := await self._find(submission)) is not None:
                return job
            raise

    async def _find(self, submission: _Submission) -> ServiceJob | None:
        return await self._services.find_job(self.config.namespace, submission.key, submission.output_model)

    def _job_options(self, submission: _Submission, dataset: str) -> dict[str, Any]:
        return {
            "config": self.config.customization_config,
            "dataset": {"namespace": self.config.namespace, "name": dataset},
            "hyperparameters": {**self._hyperparameters(), "seed": self._seed},
            "output_model": submission.output_model,
            "description": f"insitu run {submission.key}",
        }

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """One request. Raises JobFailed if the service no longer has the job."""
        try:
            job = await self._services.job(job_id(ref))
        except RequestRefused as error:
            if error.status == 404:
                raise JobFailed(f"{job_label(ref)} no longer exists at {self.address}: {error}") from error
            raise
        progress = 100.0 if job.status is TrainingStatusEnum.COMPLETED else job.progress
        model = {"output_model": job.output_model} if job.output_model else {}
        fields = ref.model_dump() | {"metadata": {**(ref.metadata or {}), **job.metrics, **model}}
        return TrainingJobStatus(**fields, status=job.status, progress=progress, message=job.message)

    async def completed(self, status: TrainingJobStatus) -> TrainingJobStatus:
        if not self.config.deploy_on_completion:
            return status
        deployment = await self._deploy(status)
        return status.model_copy(update={"metadata": {**(status.metadata or {}), "deployment": deployment}})

    async def _check_deployment_name(self, model: str) -> None:
        """Raises ConfigError, before the training, if `deployment_name` is that of a deployment of another model."""
        name, namespace = self.config.deployment_config.deployment_name, self.config.namespace
        if name is None:
            return
        existing = await self._entities("find the deployment", partial(self._services.deployment, namespace, name))
        if existing is not None and (existing.model or "").split("@")[0] != model:
            problem = f"the deployment {namespace}/{name} exists and serves {existing.model}"
            key = "trainer_adapters: deployment_config.deployment_name"
            raise ConfigError(f"{key}: {problem}; delete it or choose another name")

    async def _deploy(self, job: TrainingJobStatus) -> dict[str, Any]:
        """Deploys the model of a completed job and waits until it is served. Raises BackendError if that fails."""
        nim, namespace = self.config.deployment_config, self.config.namespace
        seconds = self.config.deployment_timeout_seconds
        model, key = (job.metadata or {})["output_model"], (job.metadata or {})["key"]
        name = nim.deployment_name or model.split("/")[-1].split("@")[0]
        label = f"{job_label(job)} is completed (model {model}), but deployment {namespace}/{name}"
        await self._create_deployment(label, name, key, model)
        deadline = time.monotonic() + seconds
        find = partial(self._services.deployment, namespace, name)
        while True:
            state = await polled(label, find, self.poll_interval, self.max_status_failures, self.address)
            if state is None:
                raise BackendError(f"{label} no longer exists")
            if state.status is TrainingStatusEnum.COMPLETED:
                return {"name": f"{namespace}/{name}", "model": model, "status": "ready"}
            if state.status not in UNFINISHED:
                raise BackendError(f"{label} is {state.status.value}: {state.message or 'no reason given'}")
            if time.monotonic() >= deadline:
                raise BackendError(f"{label} is not ready after {seconds:g} s (deployment_timeout_seconds)")
            await asyncio.sleep(min(self.poll_interval, max(0.0, deadline - time.monotonic())))

    async def _create_deployment(self, label: str, name: str, key: str, model: str) -> None:
        """Starts a deployment, in place of an earlier one of this run that has failed or has other settings."""
        nim, namespace = self.config.deployment_config, self.config.namespace
        image = nim.model_dump(include={"image_name", "image_tag", "gpu"})
        options = {"description": nim.description, "config": {"model": model, "nim_deployment": image}}
        create = partial(self._services.create_deployment, namespace, name, key, options)
        find = partial(self._services.deployment, namespace, name)
        seconds, started, is_deleted = self.config.deployment_timeout_seconds, time.monotonic(), False
        while True:
            try:
                return await self._entities("create the deployment", create)
            except RequestRefused as error:
                if error.status != 409:
                    raise
                refusal = error
            existing = await self._entities("find the deployment", find)
            if existing is not None:
                is_right = existing.model == model and existing.image.items() <= image.items()
                if is_right and not is_deleted and existing.status not in _ENDED_BADLY:
                    return None
                if existing.model != model or existing.job != key:
                    problem = f"exists already, serves {existing.model}, and is {existing.status.value}"
                    advice = f"with {dict(existing.image)}; delete it or choose another name"
                    raise RequestRefused(f"{label} {problem}, {advice}", status=409) from refusal
                if not is_deleted:
                    delete = partial(self._services.delete_deployment, namespace, name)
                    await self._entities("delete the deployment", delete)
                    is_deleted = True
            if time.monotonic() >= started + seconds:
                raise BackendError(f"{label} is not deleted after {seconds:g} s (deployment_timeout_seconds)")
            await asyncio.sleep(self.poll_interval)

    async def cancel(self, ref: TrainingJobRef) -> None:
        await self._services.cancel_job(job_id(ref))

    async def interrupted(self, ref: TrainingJobRef) -> TrainingJobStatus | None:
        try:
            await asyncio.wait_for(self.cancel(ref), _CANCEL_SECONDS)
        except (BackendError, TimeoutError) as error:
            label, reason = job_label(ref), error or "no answer"
            logger.error("%s could not be canceled, and continues at %s: %s", label, self.address, reason)
            return None
        logger.warning("interrupted: %s is canceled", job_label(ref))
        return TrainingJobStatus(**ref.model_dump(), status=TrainingStatusEnum.CANCELED)
