"""Deploys a trained model, and waits until it is served."""

import asyncio
import time
from typing import Any

from insitu.errors import BackendError, ConfigError, RequestRefused
from insitu.integrations.customizer.config import NeMoCustomizerTrainerAdapterConfig
from insitu.integrations.customizer.services import NeMoServices
from insitu.schemas.finetuning import TrainingJobStatus, TrainingStatusEnum
from insitu.training.jobs import UNFINISHED, job_label, polled
from insitu.wire.connection import Retry


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
    services: NeMoServices, retry: Retry, config: NeMoCustomizerTrainerAdapterConfig, job: TrainingJobStatus
) -> dict[str, Any]:
    """Deploys the model of a completed job and waits until it is served. Raises BackendError if that fails."""
    asked, namespace, interval = config.deployment_config, config.namespace, config.poll_interval_seconds
    metadata = job.metadata or {}
    model, key, most = metadata["output_model"], metadata["key"], config.max_consecutive_status_failures
    name = asked.deployment_name or model.split("/")[-1].split("@")[0]
    label = f"{job_label(job)} is completed (model {model}), but deployment {namespace}/{name}"
    image = {"image_name": asked.image_name, "image_tag": asked.image_tag, "gpu": asked.gpu}

    async def create() -> None:
        try:
            await services.create_deployment(namespace, name, key, model, image, asked.description)
        except RequestRefused as error:
            if error.status != 409:
                raise
            existing = await services.deployment(namespace, name)
            if existing is not None and existing.model != model:
                problem = f"{label} exists already and serves {existing.model}; delete it or choose another name"
                raise RequestRefused(problem, status=409) from error

    await retry("create the deployment", create)
    deadline = time.monotonic() + config.deployment_timeout_seconds
    while True:
        found = await polled(label, lambda: services.deployment(namespace, name), interval, most, config.entity_host)
        if found is None:
            raise BackendError(f"{label} no longer exists")
        if found.status is TrainingStatusEnum.COMPLETED:
            return {"name": f"{namespace}/{name}", "model": model, "status": "ready"}
        if found.status not in UNFINISHED:
            raise BackendError(f"{label} is {found.status.value}: {found.message or 'no reason given'}")
        if time.monotonic() >= deadline:
            seconds = config.deployment_timeout_seconds
            raise BackendError(f"{label} is not ready after {seconds:g} s (deployment_timeout_seconds)")
        await asyncio.sleep(min(interval, max(0.0, deadline - time.monotonic())))
