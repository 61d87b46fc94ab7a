"""Trajectories as ART has them: histories of messages, in which a sampled turn is a choice with its token ids.

{"messages_and_choices": [user, CHOICE, tool, CHOICE], "tools": [...], "reward": 0.7,
 "additional_histories": [{"messages_and_choices": [...], "tools": None}]}

CHOICE = {"index": 0, "finish_reason": "tool_calls", "message": {...},
          "logprobs": {"content": [{"token": "token_id:7", "logprob": -0.1, "bytes": None, "top_logprobs": []}]},
          "prompt_token_ids": [1, 5, 9]}

The prompt's ids are more than ART asks for: servers that read them (`insitu backend`) train what was sampled behind
the very tokens it was sampled behind; others make the prompt anew from the messages.
"""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import EpisodeItem, EpisodeItemRole, Trajectory
from insitu.trajectories.conversations import Turn, conversations

_FINISHED = ("stop", "length", "tool_calls", "content_filter", "function_call")
_ROLES = {EpisodeItemRole.ENVIRONMENT: "user", EpisodeItemRole.OTHER: "user"}
"""Roles that chat templates do not know: what an environment says is said to the model."""


def check_order(items: Sequence[Any], episode: str | None = None) -> None:
    """ValueError unless it begins with user or system, ends with the assistant, who never speaks twice in a row."""
    roles = [getattr(item, "role", None) for item in items]
    name = named(episode)
    if not roles or None in roles:
        raise ValueError(f"{name} is no dialogue: it has {len(roles)} messages; ART trains conversations")
    if roles[0] not in (EpisodeItemRole.USER, EpisodeItemRole.SYSTEM):
        raise ValueError(f"{name} begins with a message of role {roles[0]}; allowed: user, system")
    if roles[-1] is not EpisodeItemRole.ASSISTANT:
        raise ValueError(f"{name} ends with a message of role {roles[-1]}; allowed: assistant")
    for place, pair in enumerate(pairwise(roles), 1):
        if pair == (EpisodeItemRole.ASSISTANT, EpisodeItemRole.ASSISTANT):
            raise ValueError(f"{name}: messages {place - 1} and {place} are both the assistant's")


def named(episode: str | None) -> str:
    return f"episode {episode}" if episode else "the episode"


def art_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """What ART's `Trajectory` is made of; TrajectoryError where there is nothing to train on.

    From the calls as they crossed the wire where there are any: each dialogue is a history, the longest first. A
    trajectory built by hand is converted item by item.
    """
    if not math.isfinite(trajectory.reward):
        raise TrajectoryError(f"{named(trajectory.id)}: its reward is {trajectory.reward}; allowed: a finite number")
    histories = _of_calls(trajectory) if trajectory.trained_calls else [_of_items(trajectory.episode)]
    if not any("message" in turn for history in histories for turn in history["messages_and_choices"]):
        raise TrajectoryError(f"{named(trajectory.id)}: no assistant message has logprobs; there is nothing to train")
    histories.sort(key=lambda history: -len(history["messages_and_choices"]))
    known = {k: v for k, v in (trajectory.metadata or {}).items() if isinstance(v, str | int | float | bool | None)}
    first, *further = histories
    return {
        **first,
        "additional_histories": further,
        "reward": trajectory.reward,
        "metadata": known | ({"episode": trajectory.id} if trajectory.id else {}),
    }


def _of_calls(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Each trained call is a choice in exactly one history; all others are messages."""
    trained = {trajectory.calls[place].index for place in trajectory.trained_calls}
    return [
        history
        for dialogue in conversations(trajectory.calls)
        for history in _histories([turn if _is_trained(turn, trained) else Turn(turn.message) for turn in dialogue])
    ]


def _is_trained(turn: Turn, trained: set[int]) -> bool:
    return turn.call is not None and turn.call.index in trained


def _histories(turns: list[Turn]) -> list[dict[str, Any]]:
    """A dialogue as one history for each set of tools its answers were given with, up to the last answer of each."""
    by_tools: dict[str, list[int]] = {}
    for place, turn in enumerate(turns):
        if turn.call is not None:
            by_tools.setdefault(json.dumps(turn.call.tools or None), []).append(place)
    return [
        {
            "messages_and_choices": [
                _choice(turn.call) if turn.call is not None and place in places else turn.message
                for place, turn in enumerate(turns[: places[-1] + 1])
            ],
            "tools": json.loads(tools),
        }
        for tools, places in by_tools.items()
    ]


def _choice(call: ModelCall) -> dict[str, Any]:
    ids, logprobs = call.token_ids or [], call.logprobs or []
    if len(ids) != len(logprobs):
        raise TrajectoryError(f"call {call.index} has {len(ids)} sampled tokens and {len(logprobs)} logprobs")
    spelt: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    message = {"role": "assistant", "content": None, **(call.message or {})}
    choice = _spelt_choice(message, {"content": spelt, "refusal": None}, call.finish_reason)
    return choice if call.prompt_token_ids is None else {**choice, "prompt_token_ids": call.prompt_token_ids}


def _spelt_choice(message: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    """`stop` where nobody knows why it ended, for ART knows no such thing."""
    return {
        "index": 0,
        "finish_reason": finish_reason if finish_reason in _FINISHED else "stop",
        "logprobs": logprobs,
        "message": message,
    }


def _of_items(items: Sequence[Any]) -> dict[str, Any]:
    """The documented conversion, for trajectories whose builder knows of no calls."""
    return {"messages_and_choices": [_turn(item) for item in items], "tools": None}


def _turn(item: EpisodeItem) -> dict[str, Any]:
    further = dict(item.metadata or {})
    finish_reason = further.pop("finish_reason", None)
    carried = {name: further[name] for name in ("tool_calls", "tool_call_id", "name") if further.get(name) is not None}
    message = {"role": _ROLES.get(item.role, item.role.value), "content": item.content, **carried}
    if item.role is not EpisodeItemRole.ASSISTANT or not (logprobs := _as_logprobs(item.logprobs)):
        return message
    return _spelt_choice(message, logprobs, finish_reason)


def _as_logprobs(given: Any) -> Any:
    """ChoiceLogprobs as they are, or their `content`; a bare list of numbers does not say which tokens they are of."""
    if hasattr(given, "model_dump"):
        given = given.model_dump()
    content = given.get("content") if isinstance(given, dict) else given
    if isinstance(content, list) and content and all(isinstance(e, dict) or hasattr(e, "model_dump") for e in content):
        entries = (e if isinstance(e, dict) else e.model_dump() for e in content)
        return {"content": [{"bytes": None, "top_logprobs": [], **e} for e in entries], "refusal": None}
    return None
