"""Reads what ART clients send: models, trajectory groups and their choices, whatever release wrote them.

Releases differ in the keys they send. Null is absent, and keys of trajectories that training does not need are passed
over; a value of the wrong kind is refused by its place in the body.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import ValidationError

from insitu.backend.inference.chat import Message, template_messages
from insitu.backend.inference.requests import refusal
from insitu.errors import RequestRefused

TOKEN_ID = "token_id:"
DEFAULT_ENTITY = "insitu"
FUNCTION_KEYS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True)
class ArtModel:
    """`config` is its `_internal_config`; `generation` A for clients up to 0.5.7, which send no base_path."""

    name: str
    project: str
    entity: str = DEFAULT_ENTITY
    base_model: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: str = "B"

    @property
    def key(self) -> str:
        return f"{self.entity}/{self.project}/{self.name}"


@dataclass(frozen=True)
class Turn:
    """A message as the chat template takes it, and where the client kept them what was sampled as it.

    `logprobs` belong to `token_ids`; `prompt_token_ids` are what it was sampled from, if the choice says so.
    """

    message: dict[str, Any]
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(frozen=True)
class History:
    turns: list[Turn]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Trajectory:
    """The first history is that of the trajectory itself."""

    reward: float
    histories: list[History]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """`exceptions` counts rollouts that failed."""

    trajectories: list[Trajectory]
    exceptions: int = 0


def read_object(body: bytes) -> dict[str, Any]:
    """The object that is a body."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="malformed_json") from error
    return _typed(data, dict, "the body")


def read_model(data: Any, where: str = "model") -> ArtModel:
    given = present(_typed(data, dict, where))
    return ArtModel(
        name=_required(given, "name", str, where),
        project=_required(given, "project", str, where),
        entity=optional(given, "entity", str, where) or DEFAULT_ENTITY,
        base_model=optional(given, "base_model", str, where),
        config=present(optional(given, "_internal_config", dict, where) or {}),
        generation="B" if "base_path" in given else "A",
    )


def read_groups(data: Any) -> list[Group]:
    return [_group(each, f"trajectory_groups.{n}") for n, each in enumerate(_typed(data, list, "trajectory_groups"))]


def present(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null."""
    return {key: value for key, value in given.items() if value is not None}


def _group(data: Any, where: str) -> Group:
    given = present(_typed(data, dict, where))
    trajectories = _required(given, "trajectories", list, where)
    return Group(
        [_trajectory(each, f"{where}.trajectories.{n}") for n, each in enumerate(trajectories)],
        len(optional(given, "exceptions", list, where) or []),
    )


def _trajectory(data: Any, where: str) -> Trajectory:
    given = present(_typed(data, dict, where))
    further = optional(given, "additional_histories", list, where) or []
    own = {key: given[key] for key in ("messages_and_choices", "tools") if key in given}
    metrics = optional(given, "metrics", dict, where) or {}
    return Trajectory(
        float(optional(given, "reward", (int, float), where) or 0.0),
        [
            _history(own, where),
            *(_history(each, f"{where}.additional_histories.{n}") for n, each in enumerate(further)),
        ],
        {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)},
    )


def _history(data: Any, where: str) -> History:
    given = present(_typed(data, dict, where))
    turns = optional(given, "messages_and_choices", list, where) or []
    tools = optional(given, "tools", list, where)
    return History(
        [_turn(each, f"{where}.messages_and_choices.{n}") for n, each in enumerate(turns)],
        [_tool(each, f"{where}.tools.{n}") for n, each in enumerate(tools)] if tools else None,
    )


def _tool(data: Any, where: str) -> dict[str, Any]:
    """A tool as chat requests have it: ART also keeps bare functions, and its clients mix up the order of the keys,
    which templates print."""
    tool = _typed(data, dict, where)
    if "function" not in tool:
        return tool if "type" in tool else {"type": "function", "function": _in_order(tool, FUNCTION_KEYS)}
    function = _in_order(_typed(tool["function"], dict, f"{where}.function"), FUNCTION_KEYS)
    return _in_order(tool | {"function": function}, ("type", "function"))


def _in_order(given: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {key: given[key] for key in (*first, *given) if key in given}


def _turn(data: Any, where: str) -> Turn:
    given = present(_typed(data, dict, where))
    if "message" not in given or "finish_reason" not in given:
        return Turn(_message(given, where))
    message = _message(_typed(given["message"], dict, f"{where}.message"), f"{where}.message")
    content = _sampled(given, where)
    ids = optional(given, "token_ids", list, where) or _spelt_ids(content)
    if not content or not ids:
        return Turn(message)
    logprobs = [_required(_typed(each, dict, where), "logprob", (int, float), where) for each in content]
    if len(ids) != len(logprobs):
        raise _refused(f"{where} has {len(ids)} token_ids and {len(logprobs)} logprobs", where)
    return Turn(message, ids, logprobs, optional(given, "prompt_token_ids", list, where))


def _sampled(choice: Mapping[str, Any], where: str) -> list[Any]:
    logprobs = present(optional(choice, "logprobs", dict, where) or {})
    return logprobs.get("content") or logprobs.get("refusal") or []


def _spelt_ids(content: list[Any]) -> list[int] | None:
    """The ids in `token_id:N`; none where the tokens are text, which may stand for several ids."""
    spelt = [each.get("token") if isinstance(each, dict) else None for each in content]
    ids = [token.removeprefix(TOKEN_ID) if isinstance(token, str) and TOKEN_ID in token else "" for token in spelt]
    return [int(id) for id in ids] if all(id.isdecimal() for id in ids) else None


def _message(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        return template_messages([Message.model_validate(present(data))])[0]
    except ValidationError as error:
        raise _refused(f"{where} is no message: {refusal(error)}", where) from None
    except RequestRefused as error:
        raise _refused(f"{where} cannot be rendered: {error}", where) from None


def optional(given: Mapping[str, Any], key: str, kind: Any, where: str = "") -> Any:
    """The value of a key, none where it is absent or null. Raises RequestRefused where it is no `kind`."""
    place = f"{where}.{key}" if where else key
    return _typed(given[key], kind, place) if given.get(key) is not None else None


def _required(given: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    if given.get(key) is None:
        raise _refused(f"{where} has no {key}", f"{where}.{key}")
    return optional(given, key, kind, where)


def _typed(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        names = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise _refused(f"{where} is {str(value)[:80]!r}; expected {names}", where)
    return value


def _refused(message: str, where: str) -> RequestRefused:
    return RequestRefused(message, status=422, param=where, code="invalid_request")
