"""Conversion of trajectories to ART's format: histories of messages, with sampled ones as choices with token ids.

{"messages_and_choices": [user, CHOICE, tool, CHOICE], "tools": [...], "reward": 0.7,
 "additional_histories": [{"messages_and_choices": [...], "tools": None}]}

CHOICE = {"index": 0, "finish_reason": "tool_calls", "message": {...},
          "logprobs": {"content": [{"token": "token_id:7", "logprob": -0.1, "bytes": None, "top_logprobs": []}]},
          "prompt_token_ids": [1, 5, 9]}

`prompt_token_ids` is an extension: servers that read it (`insitu backend`) train on exactly the sampled prompt, others
render the prompt again from the messages.
"""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from insitu.collect.conversations import Turn, conversations
from insitu.collect.recovery import UNTRAINABLE, item_message, item_tokens, recover_calls
from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import EpisodeItemRole, Trajectory, TrajectoryCollection
from insitu.wire.connection import chat_entries
from insitu.wire.http_format import format_token_id

_FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")


def check_order(items: Sequence[Any], episode: str | None = None) -> None:
    """Raises ValueError unless the roles start with user or system, end with assistant, and never repeat assistant."""
    roles = [getattr(item, "role", None) for item in items]
    label = episode_label(episode)
    if not roles or None in roles:
        raise ValueError(f"{label} is not a conversation: it has {len(roles)} messages with roles")
    if roles[0] not in (EpisodeItemRole.USER, EpisodeItemRole.SYSTEM):
        raise ValueError(f"{label} begins with a message of role {roles[0]}; allowed: user, system")
    if roles[-1] is not EpisodeItemRole.ASSISTANT:
        raise ValueError(f"{label} ends with a message of role {roles[-1]}; allowed: assistant")
    for index, pair in enumerate(pairwise(roles)):
        if pair == (EpisodeItemRole.ASSISTANT, EpisodeItemRole.ASSISTANT):
            raise ValueError(f"{label}: messages {index} and {index + 1} are both the assistant's")


def episode_label(episode: str | None) -> str:
    return f"episode {episode}" if episode else "the episode"


def art_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of ART's `Trajectory`. Raises TrajectoryError if there is nothing to train on.

    With captured calls, each conversation is a history, the longest first. A trajectory whose calls are unknown is
    converted item by item.
    """
    label = episode_label(trajectory.id)
    trajectory = recover_calls(trajectory)
    if not math.isfinite(trajectory.reward):
        raise TrajectoryError(f"{label}: its reward is {trajectory.reward}; allowed: a finite number")
    if trajectory.trained_calls:
        trained = {trajectory.calls[index].index for index in trajectory.trained_calls}
        histories = [each for turns in conversations(trajectory.calls) for each in _split_by_tools(turns, trained)]
    else:
        histories = [{"messages_and_choices": [*map(_item_turn, trajectory.episode)], "tools": None}]
    if not any("message" in turn for history in histories for turn in history["messages_and_choices"]):
        raise TrajectoryError(f"{label} cannot be trained: {UNTRAINABLE}")
    histories.sort(key=lambda history: -len(history["messages_and_choices"]))
    scalars = {k: v for k, v in (trajectory.metadata or {}).items() if isinstance(v, str | int | float | bool | None)}
    longest, *additional = histories
    return {
        **longest,
        "additional_histories": additional,
        "reward": trajectory.reward,
        "metadata": scalars | ({"episode": trajectory.id} if trajectory.id else {}),
    }


def art_object(art: Any, trajectory: Trajectory) -> Any:
    """The trajectory as an `art.Trajectory`; `art` is the imported module of the installed release."""
    from openai.types.chat.chat_completion import Choice

    fields = art_trajectory(trajectory)
    histories = (fields, *fields["additional_histories"])
    try:
        for history in histories:
            turns = history["messages_and_choices"]
            # ART accepts any mapping as a message, so choices must be objects
            history["messages_and_choices"] = [Choice.model_validate(t) if "message" in t else t for t in turns]
        converted = art.Trajectory.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))} is {first['input']!r}: {first['msg']}"
        raise TrajectoryError(f"{episode_label(trajectory.id)}: {problem}") from None
    for target, history in zip((converted, *converted.additional_histories), histories, strict=True):
        vars(target)["tools"] = history["tools"]  # ART reorders their keys, and chat templates print keys in order
    return converted


def sampled_tokens(collection: TrajectoryCollection) -> int:
    trajectories = (t for group in collection.trajectories for t in group)
    return sum(len(t.calls[index].token_ids or ()) for t in trajectories for index in t.trained_calls)


def mean_reward(collection: TrajectoryCollection) -> float:
    """The mean reward of all collected episodes if known: groups without variance may be the best ones."""
    rewards = [t.reward for group in collection.trajectories for t in group]
    return sum(rewards) / len(rewards) if collection.mean_reward is None else collection.mean_reward


def _split_by_tools(turns: list[Turn], trained: set[int]) -> list[dict[str, Any]]:
    """One history per set of tools in a conversation, each up to the last trained call with these tools.

    Each trained call is a choice in exactly one of them; all other calls are plain messages.
    """
    by_tools: dict[str, list[int]] = {}
    for index, turn in enumerate(turns):
        if turn.call is not None and turn.call.index in trained:
            by_tools.setdefault(json.dumps(turn.call.tools or None), []).append(index)
    return [
        {
            "messages_and_choices": [
                _call_choice(turn.call) if turn.call is not None and index in indices else turn.message
                for index, turn in enumerate(turns[: indices[-1] + 1])
            ],
            "tools": json.loads(tools),
        }
        for tools, indices in by_tools.items()
    ]


def _call_choice(call: ModelCall) -> dict[str, Any]:
    ids, logprobs = call.token_ids or [], call.logprobs or []
    if len(ids) != len(logprobs):
        raise TrajectoryError(f"call {call.index} has {len(ids)} sampled tokens and {len(logprobs)} logprobs")
    message = {"role": "assistant", "content": None, **(call.message or {})}
    choice = _choice(message, map(format_token_id, ids), logprobs, call.finish_reason)
    names = ("prompt_token_ids", "logprobs_temperature")
    return choice | {name: value for name in names if (value := getattr(call, name)) is not None}


def _choice(
    message: dict[str, Any], tokens: Iterable[str], logprobs: Iterable[float], finish_reason: str | None
) -> dict[str, Any]:
    return {
        "index": 0,
        "finish_reason": finish_reason if finish_reason in _FINISH_REASONS else "stop",  # ART requires one
        "logprobs": {"content": chat_entries(tokens, logprobs), "refusal": None},
        "message": message,
    }


def _item_turn(item: Any) -> dict[str, Any]:
    """The documented conversion, for trajectories without calls."""
    message, sampled = item_message(item), item_tokens(item)
    if sampled is None or (sampled.token_ids is None and not sampled.tokens):
        return message
    texts = sampled.tokens if sampled.token_ids is None else map(format_token_id, sampled.token_ids)
    reason = (item.metadata or {}).get("finish_reason") or sampled.call.get("finish_reason")
    return _choice(message, texts, sampled.logprobs, reason)
