"""Finds the model calls behind trajectories that a plugin's builder has made of messages.

The parser's `logprobs` carry the call that sampled a message (see `call_logprobs`). So a trajectory of messages alone,

    items = [EpisodeItem(role=m["role"], content=m["content"], logprobs=m.get("logprobs")) for m in messages]
    Trajectory(episode=items, reward=0.7)

is trained like one with `calls`: on the sampled tokens, after exactly the prompt they were sampled from.
"""

import logging
from typing import Any, NamedTuple

from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from insitu.wire.connection import sampled_tokens
from insitu.wire.http_format import parse_token_ids

logger = logging.getLogger(__name__)

_ROLES = {EpisodeItemRole.ENVIRONMENT: "user", EpisodeItemRole.OTHER: "user"}
"""Roles that chat templates do not have: the model reads an environment's messages as the user's."""
UNTRAINABLE = (
    "none of its calls is trained, or its assistant messages lack the sampled tokens and their prompt: pass the "
    "logprobs of parse_to_openai_messages on unchanged"
)
"""Why a trajectory cannot be trained."""


class ItemTokens(NamedTuple):
    """What an item's logprobs say: per token its text or `token_id:N`, its id if known, and its logprob."""

    tokens: list[str]
    token_ids: list[int] | None
    logprobs: list[float]
    call: dict[str, Any]


def item_tokens(item: EpisodeItem) -> ItemTokens | None:
    """The tokens of an assistant message; None for a message that is only context.

    Reads the `logprobs` of an OpenAI choice, their `content`, or numbers with the `token_ids` of the metadata.
    """
    if item.role is not EpisodeItemRole.ASSISTANT or not (entries := _plain(item.logprobs)):
        return None
    metadata = item.metadata or {}
    if isinstance(entries, list) and not isinstance(entries[0], dict):
        ids = metadata.get("token_ids")
        return ItemTokens([], ids if ids and len(ids) == len(entries) else None, entries, {})
    fields = entries if isinstance(entries, dict) else {"content": entries}
    tokens, logprobs = sampled_tokens(fields)
    if not logprobs:
        return None
    ids = parse_token_ids(tokens) or fields.get("token_ids")
    ids = ids if ids and len(ids) == len(logprobs) else None
    return ItemTokens([str(token) for token in tokens], ids, logprobs, fields.get("call") or {})


def _plain(logprobs: Any) -> Any:
    """OpenAI's models as dictionaries."""
    if isinstance(logprobs, list | tuple):
        return [_plain(entry) for entry in logprobs]
    return logprobs.model_dump() if hasattr(logprobs, "model_dump") else logprobs


def item_message(item: EpisodeItem) -> dict[str, Any]:
    """An item as a message of the OpenAI API."""
    metadata = item.metadata or {}
    names = ("tool_calls", "tool_call_id", "name")
    extra = {name: metadata[name] for name in names if metadata.get(name) is not None}
    return {"role": _ROLES.get(item.role, item.role.value), "content": item.content, **extra}


def recover_calls(trajectory: Trajectory) -> Trajectory:
    """A copy with the calls behind its messages; the trajectory itself if it has calls, or if one of them is unknown.

    Every call is trained: the builder has chosen the messages.
    """
    items = _dialogue(trajectory)
    if trajectory.calls or trajectory.rows or items is None:
        return trajectory
    calls: list[ModelCall] = []
    messages: list[dict[str, Any]] = []
    for item in items:
        sampled, message = item_tokens(item), item_message(item)
        if sampled is not None:
            if sampled.token_ids is None or not sampled.call.get("prompt_token_ids"):
                return trajectory
            calls.append(_recovered(len(calls), [*messages], sampled, message))
            message = calls[-1].message or message
        messages.append(message)
    return trajectory.model_copy(update={"calls": calls, "trained_calls": [*range(len(calls))]})


def _recovered(index: int, messages: list[dict[str, Any]], sampled: ItemTokens, message: dict[str, Any]) -> ModelCall:
    fields = {"model": "", "message": message, **sampled.call}
    fields["functions"] = tuple(fields.get("functions") or ())
    tokens, logprobs = sampled.token_ids, sampled.logprobs
    return ModelCall(index=index, messages=messages, token_ids=tokens, logprobs=logprobs, **fields)


def recover_collection(collection: TrajectoryCollection) -> TrajectoryCollection:
    """A copy with the calls behind all messages, for adapters that train on tokens.

    Raises TrajectoryError if no trajectory has rows or calls to make them of; warns if some have none.
    """
    groups = [[recover_calls(trajectory) for trajectory in group] for group in collection.trajectories]
    trajectories = [trajectory for group in groups for trajectory in group]
    untrainable = [t for t in trajectories if not t.rows and not t.trained_calls]
    if not trajectories:
        raise TrajectoryError(f"run {collection.run_id}: there are no trajectories to train on")
    if untrainable:
        first = untrainable[0]
        problem = (
            f"run {collection.run_id}: {len(untrainable)} of {len(trajectories)} trajectories cannot be trained; "
            f"the first one{f' ({first.id})' if first.id else ''}: {UNTRAINABLE}"
        )
        if len(untrainable) == len(trajectories):
            raise TrajectoryError(problem)
        logger.warning("%s", problem)
    return collection.model_copy(update={"trajectories": groups})


def with_recovered_calls(collection: TrajectoryCollection, run_id: str, epoch: int) -> TrajectoryCollection:
    """The collection of an epoch with the calls of its trajectories, and with an id for each."""
    groups = [[recover_calls(t) for t in group] for group in collection.trajectories]
    for number, group in enumerate(groups):
        for k, trajectory in enumerate(group):
            if trajectory.id is None:  # a plugin's builder may leave ids unset
                group[k] = trajectory.model_copy(update={"id": f"{run_id}/{epoch}/group {number}/{k}"})
    return collection.model_copy(update={"epoch": epoch, "trajectories": groups})


def _dialogue(trajectory: Trajectory) -> list[EpisodeItem] | None:
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    return items if len(items) == len(trajectory.episode) else None
