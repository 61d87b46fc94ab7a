"""Hand-written llms that mean the model under training, by its own name or by that of the model it started from.

    llms:
      player: {_type: openai, model_name: Qwen/Qwen2.5-3B-Instruct, base_url: "http://localhost:8000/v1"}
    trainer_adapters:
      art: {_type: openpipe_art_trainer_adapter, backend: {base_model: Qwen/Qwen2.5-3B-Instruct, name: my_run, ...}}

`player` is trained. If its calls went to the base model, training would have no effect: they go to `my_run`.
"""

import logging
from typing import Any
from urllib.parse import urlsplit

from insitu.builder import Builder
from insitu.errors import ConfigError
from insitu.registry import LLM
from insitu.schemas.finetuning import PolicyEndpoint

logger = logging.getLogger(__name__)

_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "::")


def check_model_names(builder: Builder, endpoint: str | None) -> None:
    """Raises ConfigError if a trained llm names a model that is not the one being trained.

    `endpoint` is the workflow service in which the llms are, if any.
    """
    for name in sorted(builder.config.trained_llms()):
        block = builder.config.block(LLM, name)
        policy = policy_named_by(name, block, builder)
        if policy is None:
            continue
        where = f"llms.{name}.model_name is {block.model_name!r}"  # type: ignore[attr-defined]
        if endpoint is not None:
            raise ConfigError(
                f"{where}, the model that training starts from: in a file for --endpoint, name {policy.model!r}, or "
                "use _type: policy"
            )
        if block.model_name != policy.model:  # type: ignore[attr-defined]
            logger.warning("%s: its requests go to %r at %s, which is trained", where, policy.model, policy.base_url)


def policy_named_by(name: str, block: Any, builder: Builder) -> PolicyEndpoint | None:
    """The model under training if `block`, a trained llm, must be sent there rather than where it says.

    Raises ConfigError if it names another model on the server of the model under training.
    """
    policy, config = builder.trained_policy, builder.config
    model = getattr(block, "model_name", None)
    if policy is None or model is None or name not in config.trained_llms():
        return None
    names = {policy.model, policy.model.rpartition("@")[0] if policy.current_model is not None else policy.model}
    beside = is_same_server(getattr(block, "base_url", None), policy.base_url)
    if model in names:
        return policy if beside and policy.current_model is not None else None
    problem = f"llms.{name}.model_name is {model!r}, but {policy.model!r} at {policy.base_url} is trained"
    if model != policy.base_model:
        if beside:
            raise ConfigError(f"{problem}: name that model, or use _type: policy")
        return None
    others = [other for other in config.trained_llms() - {name} if _model_of(config.block(LLM, other)) in names]
    if others:
        raise ConfigError(f"{problem}: set finetuning.target_model to {others[0]!r} if {name} is not to be trained")
    return policy


def _model_of(block: Any) -> str | None:
    return getattr(block, "model_name", None)


def is_same_server(url: str | None, other: str) -> bool:
    """Whether two URLs have the same host and port."""
    return url is not None and _address(url) == _address(other)


def _address(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return "localhost" if host in _LOCAL else host, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
