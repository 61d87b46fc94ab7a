"""Waits for jobs and deployments, and deploys a trained model."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from insitu.errors import BackendError, BackendUnavailable, ConfigError, RequestRefused
from insitu.integrations.customizer.config import NeMoCustomizerTrainerAdapterConfig
from insitu.integrations.customizer.services import NeMoServices
from insitu.schemas.finetuning import TrainingStatusEnum
from insitu.wire.connection import Retry

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNFINISHED = (TrainingStatusEnum.PENDING, TrainingStatusEnum.RUNNING)


class FinishedJob(NamedTuple):
    """A completed job: its id, the run and epoch it belongs to, and the model it has trained."""

    id: str
    key: str
    model: str


async def polled(
    what: str, request: Callable[[], Awaitable[T]], interval: float, config: NeMoCustomizerTrainerAdapterConfig
) -> T:
    """The result of a status request, repeated every `interval` seconds after transient errors.

    Raises BackendUnavailable after `max_consecutive_status_failures` of them.
    """
    failures, most = 0, config.max_consecutive_status_failures
    while True:
        try:
            return await request()
        except BackendUnavailable as error:
            failures += 1
            if failures >= most:
                raise BackendUnavailable(
                    f"{what}: {failures} status requests in a row failed (max_consecutive_status_failures: {most}); "
                    f"it continues at {config.entity_host}; the last error: {error}"
                ) from error
            logger.warning("%s; asking again", error)
            await asyncio.sleep(max(interval, error.retry_after))


async def check_name_is_free(
    services: NeMoServices, retry: Retry, config: NeMoCustomizerTrainerAdapterConfig, model: str
) -> None:
    """Raises ConfigError, before the training, if `deployment_name` is that of a deployment of another model."""
    name, namespace = config.deployment_config.deployment_name, config.namespace
    if name is None:
        return
    existing = await retry("find the deployment", lambda: services.deployment(namespace, name))
    if existing is not None and (existing.model or "").split("@")[0] != model:
        raise ConfigError(
            f"trainer_adapters: deployment_config.deployment_name: the deployment {namespace}/{name} exists and "
            f"serves {existing.model}; delete it or choose another name"
        )


async def deploy(
    services: NeMoServices, retry: Retry, config: NeMoCustomizerTrainerAdapterConfig, job: FinishedJob, interval: float
) -> dict[str, Any]:
    """Deploys the trained model and waits until it is served. Raises BackendError if that fails."""
    asked, namespace = config.deployment_config, config.namespace
    name = asked.deployment_name or job.model.split("/")[-1].split("@")[0]
    label = f"job {job.id} is completed (model {job.model}), but deployment {namespace}/{name}"
    image = {"image_name": asked.image_name, "image_tag": asked.image_tag, "gpu": asked.gpu}

    async def create() -> None:
        try:
            await services.create_deployment(namespace, name, job.key, job.model, image, asked.description)
        except RequestRefused as error:
            if error.status != 409:
                raise
            existing = await services.deployment(namespace, name)
            if existing is not None and existing.model != job.model:
                problem = f"{label} exists already and serves {existing.model}; delete it or choose another name"
                raise RequestRefused(problem, status=409) from error

    await retry("create the deployment", create)
    deadline = time.monotonic() + config.deployment_timeout_seconds
    while True:
        found = await polled(label, lambda: services.deployment(namespace, name), interval, config)
        if found is None:
            raise BackendError(f"{label} no longer exists")
        if found.status is TrainingStatusEnum.COMPLETED:
            return {"name": f"{namespace}/{name}", "model": job.model, "status": "ready"}
        if found.status not in UNFINISHED:
            raise BackendError(f"{label} is {found.status.value}: {found.message or 'no reason given'}")
        if time.monotonic() >= deadline:
            seconds = config.deployment_timeout_seconds
            raise BackendError(f"{label} is not ready after {seconds:g} s (deployment_timeout_seconds)")
        await asyncio.sleep(min(interval, max(0.0, deadline - time.monotonic())))
