"""Parses what ART clients of any release send: models, trajectory groups and their choices.

Releases differ in the keys they send. Null means absent, keys of trajectories that training does not need are ignored,
and a value of the wrong type is refused with its path in the body.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from insitu.backend.protocols.openai.chat import Message, template_messages
from insitu.errors import RequestRefused
from insitu.wire.http_format import parse_token_ids
from insitu.wire.http_server import parse_json, validation_refusal

DEFAULT_ENTITY = "insitu"
FUNCTION_KEYS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True)
class ArtModel:
    """`config` is the `_internal_config`; `legacy` clients (up to 0.5.7, no base_path) have their own defaults."""

    name: str
    project: str
    entity: str = DEFAULT_ENTITY
    base_model: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    legacy: bool = False

    @property
    def key(self) -> str:
        """Not unique if names contain slashes."""
        return "/".join(self.identity)

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.entity, self.project, self.name


@dataclass(frozen=True)
class ArtMessage:
    """A message in the chat template's format; for a choice also its sampled token ids, their logprobs, its prompt."""

    message: dict[str, Any]
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(frozen=True)
class ArtHistory:
    messages: list[ArtMessage]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class ArtTrajectory:
    """The first history is the trajectory's own, the others are its additional histories."""

    reward: float
    histories: list[ArtHistory]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ArtGroup:
    """`exceptions` counts failed rollouts."""

    trajectories: list[ArtTrajectory]
    exceptions: int = 0


def parse_object(body: bytes, max_values: int) -> dict[str, Any]:
    return _typed(parse_json(body, max_values=max_values), dict, "request body")


def parse_model(data: Any, path: str = "model") -> ArtModel:
    keys = drop_nulls(_typed(data, dict, path))
    return ArtModel(
        name=_required(keys, "name", str, path),
        project=_required(keys, "project", str, path),
        entity=optional(keys, "entity", str, path) or DEFAULT_ENTITY,
        base_model=optional(keys, "base_model", str, path),
        config=drop_nulls(optional_dict(keys, "_internal_config", path)),
        legacy="base_path" not in keys,
    )


def parse_groups(data: Any) -> list[ArtGroup]:
    path = "trajectory_groups"
    return [_parse_group(each, f"{path}.{n}") for n, each in enumerate(_typed(data, list, path))]


def drop_nulls(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


def _parse_group(data: Any, path: str) -> ArtGroup:
    keys = drop_nulls(_typed(data, dict, path))
    trajectories = _required(keys, "trajectories", list, path)
    return ArtGroup(
        [_parse_trajectory(each, f"{path}.trajectories.{n}") for n, each in enumerate(trajectories)],
        len(optional(keys, "exceptions", list, path) or []),
    )


def _parse_trajectory(data: Any, path: str) -> ArtTrajectory:
    keys = drop_nulls(_typed(data, dict, path))
    additional = optional(keys, "additional_histories", list, path) or []
    histories = [_parse_history(each, f"{path}.additional_histories.{n}") for n, each in enumerate(additional)]
    metrics = optional_dict(keys, "metrics", path)
    return ArtTrajectory(
        float(optional(keys, "reward", (int, float), path) or 0.0),
        [_parse_history(keys, path), *histories],
        {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)},
    )


def _parse_history(data: Any, path: str) -> ArtHistory:
    keys = drop_nulls(_typed(data, dict, path))
    messages = optional(keys, "messages_and_choices", list, path) or []
    tools = optional(keys, "tools", list, path)
    return ArtHistory(
        [_parse_message(each, f"{path}.messages_and_choices.{n}") for n, each in enumerate(messages)],
        [_parse_tool(each, f"{path}.tools.{n}") for n, each in enumerate(tools)] if tools else None,
    )


def _parse_tool(data: Any, path: str) -> dict[str, Any]:
    """A tool in the format of chat requests.

    ART also keeps bare functions, and its clients change the order of the keys, which templates print.
    """
    tool = _typed(data, dict, path)
    if "function" not in tool:
        return tool if "type" in tool else {"type": "function", "function": _order_keys(tool, FUNCTION_KEYS)}
    function = _order_keys(_typed(tool["function"], dict, f"{path}.function"), FUNCTION_KEYS)
    return _order_keys(tool | {"function": function}, ("type", "function"))


def _order_keys(keys: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {key: keys[key] for key in (*first, *keys) if key in keys}


def _parse_message(data: Any, path: str) -> ArtMessage:
    """A message, or a choice that contains one."""
    keys = drop_nulls(_typed(data, dict, path))
    if "message" not in keys or "finish_reason" not in keys:
        return ArtMessage(_template_message(keys, path))
    message = _template_message(_typed(keys["message"], dict, f"{path}.message"), f"{path}.message")
    choice_logprobs = drop_nulls(optional_dict(keys, "logprobs", path))
    content, refusal = (optional(choice_logprobs, name, list, f"{path}.logprobs") for name in ("content", "refusal"))
    entries = content or refusal or []
    # Tokens written as text are not used: the same text may be tokenized in several ways.
    tokens = (each.get("token") if isinstance(each, dict) else None for each in entries)
    ids = optional(keys, "token_ids", list, path) or parse_token_ids(tokens)
    if not entries or not ids:
        return ArtMessage(message)
    logprobs = [_required(_typed(each, dict, path), "logprob", (int, float), path) for each in entries]
    if len(ids) != len(logprobs):
        raise _refused(f"{path} has {len(ids)} token_ids and {len(logprobs)} logprobs", path)
    call = optional_dict(choice_logprobs, "call", path)  # where insitu's parser keeps the prompt
    prompt = optional(keys, "prompt_token_ids", list, path)
    if prompt is None:
        prompt = optional(call, "prompt_token_ids", list, path)
    return ArtMessage(message, ids, logprobs, prompt)


def _template_message(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    try:
        return template_messages([Message.model_validate(drop_nulls(data))])[0]
    except ValidationError as error:
        raise _refused(f"{path} is not a message: {validation_refusal(error)}", path) from None
    except RequestRefused as error:
        raise _refused(f"{path} cannot be rendered: {error}", path) from None


def optional(keys: Mapping[str, Any], key: str, kind: Any, path: str = "") -> Any:
    """The value of `key`, None if absent or null. Raises RequestRefused if it is not a `kind`."""
    return _typed(keys[key], kind, f"{path}.{key}" if path else key) if keys.get(key) is not None else None


def optional_dict(keys: Mapping[str, Any], key: str, path: str = "") -> dict[str, Any]:
    return optional(keys, key, dict, path) or {}


def _required(keys: Mapping[str, Any], key: str, kind: Any, path: str) -> Any:
    if keys.get(key) is None:
        raise _refused(f"{path} has no {key}", f"{path}.{key}")
    return optional(keys, key, kind, path)


def _typed(value: Any, kind: Any, path: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        names = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise _refused(f"{path} is {str(value)[:80]!r}; expected {names}", path)
    return value


def _refused(message: str, path: str) -> RequestRefused:
    return RequestRefused(message, status=422, param=path, code="invalid_request")
