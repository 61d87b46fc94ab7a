"""Checks of the components of a run, before anything is started."""

import os
from typing import Any

import aiohttp
import orjson

from insitu.advantages.estimator import NEUTRAL_SAMPLING, truncation
from insitu.config import Config
from insitu.errors import ConfigError, PluginError
from insitu.schemas.components import WORKFLOW, FunctionBaseConfig
from insitu.schemas.episodes import Needs
from insitu.schemas.kinds import FUNCTION
from insitu.training.interfaces import GroupTrainer, RewardAdapter, Trainer, TrainerAdapter, TrajectoryBuilder
from insitu.wire.addresses import is_same_server
from insitu.wire.connection import read_at_most
from insitu.workflow.llms import OpenAIConfig

_PROBE_SECONDS = 3.0
_MOST_BYTES = 2**20


def check_components(trainer: Trainer, method: str, *, computes_advantages: bool = False) -> None:
    """Raises ConfigError or PluginError unless the trainer's builder and adapter give it what it needs.

    `method` is the `training.method` of adapters that have several. Some backends ignore the advantages that a trainer
    computes.
    """
    builder, adapter = trainer.trajectory_builder, trainer.trainer_adapter
    for component, interface in ((builder, TrajectoryBuilder), (adapter, TrainerAdapter)):
        if not isinstance(component, interface):
            raise PluginError(f"{type(component).__name__} must be a subclass of {interface.__name__}")
    builder.check_trainer(trainer)
    name = trainer.trainer_config.type
    configured = adapter.training_settings().get("method", method)
    if configured != method:
        raise ConfigError(
            f"trainer_adapters: training.method is {configured}, but the trainer {name} trains with {method}"
        )
    if computes_advantages and isinstance(adapter, RewardAdapter):
        service = adapter.adapter_config.type
        raise ConfigError(
            f"trainers: {name} computes advantages, but the backend of {service} computes its own; use the trainer "
            f"made for {service}"
        )


def check_sampling(trainer: Trainer, config: Config) -> None:
    """Raises ConfigError if an llm that is trained on what it samples is greedy or truncates its distribution."""
    if not isinstance(trainer, GroupTrainer) or trainer.trajectory_builder.stored is not None:
        return
    for name in sorted(config.trained_llms()):
        values = config.llm(name).request_settings()
        values["logprobs_processed"] = trainer.trainer_adapter.adapter_config.trains_shaped_logits
        if (problem := truncation(values)) is not None:
            key = "temperature" if problem == "greedy" else problem
            allowed = "above 0" if problem == "greedy" else str(NEUTRAL_SAMPLING[key][0])
            shown = f"{values[key]:g}" if isinstance(values[key], float) else str(values[key])
            raise ConfigError(
                f"llms.{name}.{key} is {shown:.80}, but {name} is trained on what it samples, which must be "
                f"from the softmax of all logits; allowed: {allowed} (a validation with its own config_file may differ)"
            )


def check_model(config: Config) -> None:
    """Raises ConfigError if the workflow can call no model."""
    workflow = config.blocks.get((FUNCTION.section, WORKFLOW))
    if isinstance(workflow, FunctionBaseConfig) and (change := workflow.lacks_model()) is not None:
        raise ConfigError(f"workflow: it is given no model, so nothing that it does can be trained: {change}")


def check_token_bridge(trainer: Trainer, config: Config) -> None:
    """Raises ConfigError if an llm has a token bridge that the backend does not know."""
    adapter = trainer.trainer_adapter.adapter_config
    for name in sorted(config.trained_llms()):
        if config.llm(name).request_settings().get("token_bridge") and not adapter.bridges_tokens:
            raise ConfigError(
                f"llms.{name}.token_bridge is true, but the backend of {adapter.type} does not continue from tokens; "
                "allowed: false, or an adapter of _type: insitu_trainer_adapter"
            )


async def check_servers(trainer: Trainer, config: Config) -> None:
    """Raises ConfigError if an llm that is trained names a server whose completions cannot be trained.

    One that does not answer may be started later, and is not asked again.
    """
    builder, adapter = trainer.trajectory_builder, trainer.trainer_adapter
    if builder.stored is not None or adapter.needs < Needs.LOGPROBS:
        return
    for name in sorted(config.trained_llms()):
        llm, block = config.llm(name), adapter.adapter_config
        if not isinstance(llm, OpenAIConfig) or block.starts_from == llm.model_name:  # then it is sent to the backend
            continue
        if adapter.backend_url is not None and is_same_server(llm.base_url, adapter.backend_url):
            continue
        if adapter.starts_backend:
            raise ConfigError(
                f"llms.{name} is trained, but its _type is {llm.type}, so its requests go to another server than the "
                f"backend that trainer_adapters.{config.finetuning.trainer_adapter} starts; allowed: _type: policy, or "
                f"model_name: {block.starts_from}"
            )
        try:
            returned = await _logprobs(llm)
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
            continue
        if returned is None:
            raise ConfigError(f"llms.{name}.base_url: {llm.base_url} returns no logprobs, which training needs")


async def _logprobs(llm: OpenAIConfig) -> Any:
    """What a server returns as the logprobs of a token."""
    url = llm.base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
    key = llm.api_key.get_secret_value() if llm.api_key is not None else os.environ.get("OPENAI_API_KEY", "none")
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": llm.model_name, "messages": messages, "max_tokens": 1, "logprobs": True}
    headers, timeout = {"Authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=_PROBE_SECONDS)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout, raise_for_status=True) as session,
        session.post(f"{url.rstrip('/')}/chat/completions", json=body, allow_redirects=False) as response,
    ):
        return orjson.loads(await read_at_most(response, _MOST_BYTES) or b"")["choices"][0].get("logprobs")
