"""The NeMo services as the adapter uses them, over `nemo-microservices` 1.4 and 1.5 and `huggingface-hub`.

The only module that knows these libraries: one for another SDK has a class with the methods of `NeMoServices`. Each
method makes one attempt, in a thread because the libraries block. Raises BackendUnavailable for a transient error and
RequestRefused for the others; no message contains the token.
"""

import asyncio
import importlib
import io
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from insitu.errors import BackendError, BackendUnavailable, ConfigError, RequestRefused, exception_chain, needing
from insitu.integrations.customizer.config import NeMoCustomizerTrainerAdapterConfig
from insitu.plugin_api import suppress_logs
from insitu.schemas.finetuning import TrainingStatusEnum
from insitu.wire.connection import is_transient, retry_after
from insitu.wire.http_format import error_message, load_json

logger = logging.getLogger(__name__)

T = TypeVar("T")

JOB_FIELD = "insitu_job"
"""The custom field of datasets, jobs and deployments that names the run and the epoch they belong to."""
_MOST_JOBS = 10_000
"""Jobs of a namespace that are searched for one of ours, the newest first."""
_STATUSES = {
    **dict.fromkeys(("created", "pending"), TrainingStatusEnum.PENDING),
    "running": TrainingStatusEnum.RUNNING,
    **dict.fromkeys(("cancelling", "cancelled"), TrainingStatusEnum.CANCELED),
    **dict.fromkeys(("completed", "ready"), TrainingStatusEnum.COMPLETED),
    "failed": TrainingStatusEnum.FAILED,
}
_IMAGE = ("image_name", "image_tag", "gpu")
_METRICS = ("train_loss", "val_loss", "best_epoch", "epochs_completed", "steps_completed", "elapsed_time")


class Store(StrEnum):
    """The two stores; the first is at the address of Customizer and Deployment Management."""

    ENTITIES = "Entity Store"
    FILES = "Data Store"


_NAMESPACES = {Store.ENTITIES: "/v1/namespaces", Store.FILES: "/v1/datastore/namespaces"}


class ServiceJob(NamedTuple):
    """A customization job; `progress` in percent, None if the service does not say."""

    id: str
    status: TrainingStatusEnum
    progress: float | None = None
    message: str | None = None
    metrics: Mapping[str, Any] = {}
    output_model: str | None = None
    dataset: str | None = None


class _Content(io.BytesIO):
    """A file to upload. A buffer, because huggingface-hub 2 sends files and bytes in a protocol that the Data Store
    does not have."""

    read_at = 0.0
    """When it was last read, by `time.monotonic()`."""

    def read(self, size: int | None = -1, /) -> bytes:
        self.read_at = time.monotonic()
        return super().read(size)


class Deployment(NamedTuple):
    """A deployment: COMPLETED when the model is served."""

    status: TrainingStatusEnum
    message: str | None
    model: str | None
    image: Mapping[str, Any]
    """Image, tag and number of GPUs, as far as the service says them."""
    job: str | None


def load_sdk() -> tuple[Any, Any]:
    """The modules `nemo_microservices` and `huggingface_hub`. Raises ConfigError if one is missing."""
    with needing("customizer", "the NeMo Customizer plugin"):
        return importlib.import_module("nemo_microservices"), importlib.import_module("huggingface_hub")


class NeMoServices:
    """Entity Store, Customizer and Deployment Management at one address, the Data Store at another."""

    def __init__(self, config: NeMoCustomizerTrainerAdapterConfig) -> None:
        nemo, self._hub = load_sdk()
        token = self._token = config.hf_token
        self._hosts = {Store.ENTITIES: config.entity_host, Store.FILES: config.datastore_host}
        self._timeout = config.request_timeout
        self._odd_statuses: set[tuple[str, str | None]] = set()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        make, options = nemo.NeMoMicroservices, {"max_retries": 0, "timeout": config.request_timeout}
        self._entities = make(base_url=config.entity_host, **options)
        datastore = make(base_url=config.datastore_host, **options, default_headers=headers)
        self._jobs = self._entities.customization.jobs
        self._deployments = self._entities.deployment.model_deployments
        self._clients = {Store.ENTITIES: self._entities, Store.FILES: datastore}
        # huggingface-hub would send the token of the user's login: without False, and even so for files in LFS
        access = {"token": token} if token else {"token": False, "headers": {"authorization": ""}}
        self._files = self._hub.HfApi(endpoint=f"{config.datastore_host}/v1/hf", **access)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    async def has_namespace(self, store: Store, namespace: str) -> bool:
        client, path = self._clients[store], f"{_NAMESPACES[store]}/{namespace}"
        return await self._found(f"namespace {namespace}", lambda: client.get(path, cast_to=object), store) is not None

    async def create_namespace(self, store: Store, namespace: str) -> None:
        """Creates a namespace; it may exist already."""
        client, body = self._clients[store], {"id" if store is Store.ENTITIES else "namespace": namespace}
        create = partial(client.post, _NAMESPACES[store], body=body, cast_to=object)
        try:
            await self._request(f"namespace {namespace}", create, store)
        except RequestRefused as error:
            if error.status not in (409, 422) or not await self.has_namespace(store, namespace):
                raise

    async def training_options(self, config: str) -> list[tuple[str, str]]:
        """Training type and finetuning type of each option of a customization configuration."""
        namespace, _, name = config.rpartition("/")
        retrieve = partial(self._entities.customization.configs.retrieve, name, namespace=namespace or "default")
        options = await self._request(f"customization configuration {config}", retrieve)
        return [(option.training_type, option.finetuning_type) for option in options.training_options or []]

    async def register_dataset(self, namespace: str, name: str, job: str) -> None:
        """Registers a dataset of the Data Store. Raises RequestRefused (409) if the name is another job's."""
        what = f"dataset {namespace}/{name}"
        fields = {"name": name, "namespace": namespace, "files_url": f"hf://datasets/{namespace}/{name}"}
        try:
            await self._request(what, lambda: self._entities.datasets.create(**fields, custom_fields={JOB_FIELD: job}))
        except RequestRefused as error:
            if error.status != 409:
                raise
            dataset = await self._request(what, lambda: self._entities.datasets.retrieve(name, namespace=namespace))
            if (dataset.custom_fields or {}).get(JOB_FIELD) != job:
                raise

    async def upload(self, namespace: str, name: str, files: Mapping[str, bytes], job: str) -> None:
        """Uploads files, by their path in the repository, in one commit; the repository may exist already.

        huggingface-hub has no timeout: a thread that waits for an answer is left behind.
        """
        contents = {path: _Content(content) for path, content in files.items()}

        def send() -> None:
            repository = {"repo_id": f"{namespace}/{name}", "repo_type": "dataset"}
            try:
                self._files.create_repo(**repository)
            except self._hub.errors.HfHubHTTPError as error:  # its `exist_ok` needs an answer like that of the Hub
                if error.response.status_code != 409:
                    raise
            add = self._hub.CommitOperationAdd
            operations = [add(path_in_repo=path, path_or_fileobj=content) for path, content in contents.items()]
            self._files.create_commit(**repository, operations=operations, commit_message=f"records of {job}")

        async with suppress_logs("huggingface_hub"):  # it warns about buffers
            where = f"dataset {namespace}/{name} at {self._hosts[Store.FILES]}"
            await self._in_time(where, send, lambda: max(content.read_at for content in contents.values()))

    async def find_job(self, namespace: str, job: str, output_model: str) -> ServiceJob | None:
        """The newest job that was submitted for `job`; None if there is none."""

        def search() -> Any:
            jobs = self._jobs.list(filter={"namespace": namespace}, sort="-created_at", page_size=100)
            for candidate in islice(jobs, _MOST_JOBS):
                named = (candidate.custom_fields or {}).get(JOB_FIELD)
                if named == job or (named is None and (candidate.output_model or "").split("@")[0] == output_model):
                    return candidate
            return None

        matches = await self._request("customization jobs", search)
        return self._job(matches.id, matches) if matches is not None else None

    async def create_job(self, namespace: str, name: str, job: str, options: Mapping[str, Any]) -> ServiceJob:
        """Submits a job. A second one of the same name is refused (409)."""
        fields = {"name": name, "namespace": namespace, "custom_fields": {JOB_FIELD: job}, **options}
        created = await self._request(f"customization job {namespace}/{name}", lambda: self._jobs.create(**fields))
        if not created.id:
            problem = "returned a job without id; is it the right server?"
            raise BackendError(f"Customizer at {self._hosts[Store.ENTITIES]} {problem}")
        for warning in created.warnings or []:
            logger.warning("job %s: %s", created.id, warning.message or warning.explanation)
        return self._job(created.id, created)

    async def job(self, job_id: str) -> ServiceJob:
        job = await self._request(f"customization job {job_id}", lambda: self._jobs.retrieve(job_id))
        return self._job(job_id, job)

    async def cancel_job(self, job_id: str) -> None:
        await self._request(f"customization job {job_id}", lambda: self._jobs.cancel(job_id))

    async def create_deployment(self, namespace: str, name: str, job: str, options: Mapping[str, Any]) -> None:
        """Starts to serve a model. A name that is taken is refused (409)."""
        fields = {"name": name, "namespace": namespace, "custom_fields": {JOB_FIELD: job}, **options}
        await self._request(f"deployment {namespace}/{name}", lambda: self._deployments.create(**fields))

    async def delete_deployment(self, namespace: str, name: str) -> None:
        """Ends a deployment, which can take minutes; it may be gone already."""
        await self._found(f"deployment {namespace}/{name}", lambda: self._deployments.delete(name, namespace=namespace))

    async def deployment(self, namespace: str, name: str) -> Deployment | None:
        """The state of a deployment; None if there is none of that name."""
        what = f"deployment {namespace}/{name}"
        answer = await self._found(what, lambda: self._deployments.retrieve(name, namespace=namespace))
        if answer is None:
            return None
        model = getattr(answer.config, "model", None)  # a config may be a name
        details, nim = answer.status_details, getattr(answer.config, "nim_deployment", None)
        return Deployment(
            self._status(what, details.status),
            details.description,
            model if isinstance(model, str) else None,
            {field: value for field in _IMAGE if (value := getattr(nim, field, None)) is not None},
            (answer.custom_fields or {}).get(JOB_FIELD),
        )

    async def _found(self, what: str, retrieve: Callable[[], T], store: Store = Store.ENTITIES) -> T | None:
        """What a request returns; None if the service has no such thing (404)."""
        try:
            return await self._request(what, retrieve, store)
        except RequestRefused as error:
            if error.status != 404:
                raise
            return None

    async def _request(self, what: str, request: Callable[[], T], store: Store = Store.ENTITIES) -> T:
        return await asyncio.to_thread(self._attempt, f"{what} at {self._hosts[store]}", request)

    async def _in_time(self, where: str, work: Callable[[], Any], active_at: Callable[[], float]) -> None:
        """Runs blocking work, which ends after `request_timeout` seconds without activity."""
        future: Future[Any] = Future()

        def run() -> None:
            future.set_running_or_notify_cancel()
            try:
                future.set_result(self._attempt(where, work))
            except BaseException as error:  # raised by the caller
                future.set_exception(error)

        started, done = time.monotonic(), asyncio.wrap_future(future)
        threading.Thread(target=run, name="upload to the Data Store", daemon=True).start()
        try:
            while not done.done():
                left = max(started, active_at()) + self._timeout - time.monotonic()
                if left <= 0:
                    raise BackendUnavailable(f"{where}: no answer for {self._timeout:g} s (request_timeout)")
                await asyncio.wait({done}, timeout=left)
            done.result()
        finally:
            done.cancel()

    def _status(self, what: str, status: Any) -> TrainingStatusEnum:
        """The status of a job or a deployment; one that is null or unknown is a warning, and means that it runs."""
        documented = _STATUSES.get(str(status))
        if documented is None and (what, status) not in self._odd_statuses:
            self._odd_statuses.add((what, status))
            logger.warning("%s has the status %r, which is unknown: it is taken to be running", what, status)
        return documented or TrainingStatusEnum.RUNNING

    def _job(self, job_id: str, job: Any) -> ServiceJob:
        """From the SDK's models, whose values are not validated."""
        details = job.status_details
        logs = [log for log in getattr(details, "status_logs", None) or [] if log.message or log.detail]
        return ServiceJob(
            job_id,
            self._status(f"job {job_id}", job.status or getattr(details, "status", None)),
            _percent(getattr(details, "percentage_done", None)),
            ": ".join(filter(None, (logs[-1].message, logs[-1].detail))) if logs else None,
            {name: value for name in _METRICS if (value := getattr(details, name, None)) is not None},
            job.output_model,
            _dataset_name(job.dataset),
        )

    def _attempt(self, where: str, request: Callable[[], T]) -> T:
        try:
            result = request()
        except self._hub.errors.OfflineModeIsEnabled as error:
            problem = "HF_HUB_OFFLINE is set, but huggingface-hub uploads to the Data Store"
            raise ConfigError(f"{problem}: unset it") from error
        except Exception as error:  # what the libraries' transports raise differs between releases
            raise self._translated(where, error) from error
        if isinstance(result, str):  # the SDK returns the text of a page that is not JSON
            raise BackendError(f"{where}: the answer is not JSON: {result!r:.80}; is it the right server?")
        return result

    def _translated(self, where: str, error: Exception) -> BackendError:
        chain = exception_chain(error)
        responses = [r for e in chain if (r := getattr(e, "response", None)) is not None]
        if not responses:
            message = self._redacted(f"{where}: {type(chain[-1]).__name__}: {chain[-1]}")
            if any(map(_is_lost_connection, chain)):
                return BackendUnavailable(message)
            return BackendError(f"{message}; is it the right server?")
        status = int(responses[0].status_code)
        message = self._redacted(f"{where}: {_reason(responses[0], error)} (status {status})")
        if is_transient(status):
            return BackendUnavailable(message, retry_after=retry_after(responses[0].headers))
        if status in (401, 403) and where.endswith(self._hosts[Store.FILES]):
            message += "; check hf_token"
        return RequestRefused(message, status=status)

    def _redacted(self, text: str) -> str:
        return text.replace(self._token, "***") if self._token else text


def _dataset_name(dataset: Any) -> str | None:
    """The namespace and the name of a job's dataset; the SDK gives a model or text."""
    names = [getattr(dataset, field, None) for field in ("namespace", "name")]
    return "/".join(map(str, names)) if all(names) else None


def _percent(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return min(max(number, 0.0), 100.0) if math.isfinite(number) else None


def _is_lost_connection(error: BaseException) -> bool:
    """Whether the connection failed. By the name of the class, as httpx and its successor each have their own."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OSError) or not names.isdisjoint(("TransportError", "APIConnectionError"))


def _reason(response: Any, error: Exception) -> str:
    """What a service says about an error: `error.message`, `message`, FastAPI's `detail`, or the text itself."""
    try:
        body = load_json(response.content)
    except (ValueError, RuntimeError):  # not JSON, or not read
        body = None
    message = body.get("message") or body.get("detail") if isinstance(body, dict) else None
    text = error_message(body) or message or getattr(error, "server_message", None) or error
    return " ".join(str(text).split())[:500]
