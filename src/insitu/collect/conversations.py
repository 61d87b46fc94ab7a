"""The conversations of an episode: chains of prompts that extend one another, each answer with its call."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import EpisodeItem, EpisodeItemRole, text_content
from insitu.wire.http_format import format_token_id

_ROLES = {role.value: role for role in EpisodeItemRole} | {"developer": EpisodeItemRole.SYSTEM}


class Turn(NamedTuple):
    """A message of a conversation, and the call that sampled it if it was not changed afterwards."""

    message: dict[str, Any]
    call: ModelCall | None = None


def main_conversation(calls: Sequence[ModelCall]) -> list[EpisodeItem]:
    """The readable form of the conversation that extends the first call."""
    return [_item(turn) for turn in next(_conversations(calls), [])]


def _item(turn: Turn) -> EpisodeItem:
    message, call = turn
    role = _ROLES.get(str(message.get("role")), EpisodeItemRole.OTHER)
    metadata = {key: value for key, value in message.items() if key not in ("role", "content")}
    if call is not None:
        metadata |= {"call": call.index, "finish_reason": call.finish_reason}
    logprobs = call_logprobs(call) if role is EpisodeItemRole.ASSISTANT else None
    return EpisodeItem(
        role=role, content=text_content(message.get("content")), logprobs=logprobs, metadata=metadata or None
    )


_CALL_FIELDS = ("message", "model", "llm", "functions", "tools", "finish_reason", "policy_version", "prompt_token_ids")
"""Fields of a call that `call_logprobs` keeps beside its tokens."""


def call_logprobs(call: ModelCall | None, tokens: Iterable[str] | None = None) -> dict[str, Any]:
    """A message's `logprobs` as OpenAI's API returns them, with the call that sampled it; empty if they are unknown.

    `tokens` are the texts of the sampled tokens, used if their ids are unknown.

        {"content": [{"token": "token_id:7", "logprob": -0.1, "bytes": None, "top_logprobs": []}], "refusal": None,
         "call": {"model": "policy", "prompt_token_ids": [1, 5, 9], "policy_version": 3, ...}}

    Components that build trajectories from messages pass the logprobs on, and with them the call
    (see `insitu.collect.recovery`).
    """
    if call is None or not call.logprobs:
        return {}
    texts = [""] * len(call.logprobs) if tokens is None else [*tokens]
    if call.token_ids is not None:
        texts = [*map(format_token_id, call.token_ids)]
    if len(texts) != len(call.logprobs):
        return {}
    known = {name: value for name in _CALL_FIELDS if (value := getattr(call, name)) is not None}
    return {**chat_logprobs(texts, call.logprobs), "call": known}


def chat_logprobs(tokens: Iterable[str], logprobs: Iterable[float]) -> dict[str, Any]:
    """`logprobs` of a choice of a chat, as OpenAI's API returns them."""
    entries = zip(tokens, logprobs, strict=True)
    content: list[dict[str, Any]] = [
        {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []} for token, logprob in entries
    ]
    return {"content": content, "refusal": None}


def conversations(calls: Sequence[ModelCall]) -> list[list[Turn]]:
    """All conversations of an episode; the first is that of the last call that extends the first call.

    A conversation is the prompt and the completion of one call. An assistant message in the prompt was sampled by the
    call whose whole prompt precedes it and whose completion it repeats; any other is context. Every completion has its
    call in exactly one conversation: one that was edited before it was sent again (stripped thinking, a trimmed
    history), or never sent again, ends its own conversation. Calls without a completion are in none.
    """
    return [*_conversations(calls)]


def _conversations(calls: Sequence[ModelCall]) -> Iterator[list[Turn]]:
    completed = [call for call in calls if call.message is not None]
    if not completed:
        return
    paths = _prefix_ids(completed)
    by_prompt: dict[int, list[int]] = {}
    for index, path in enumerate(paths):
        by_prompt.setdefault(path[-1], []).append(index)
    claimed: set[int] = set()

    def ending_with(end: int) -> list[Turn]:
        claimed.add(end)
        turns = []
        for message, before in zip(completed[end].messages, paths[end], strict=False):
            sampler = None
            if message.get("role") == "assistant":
                free = (k for k in by_prompt.get(before, ()) if k not in claimed)
                sampler = next((k for k in free if same_message(completed[k].message, message)), None)
            if sampler is None:
                turns.append(Turn(message))
            else:
                claimed.add(sampler)
                turns.append(_completion(completed[sampler]))
        return [*turns, _completion(completed[end])]

    yield ending_with(_end_of_main(paths))
    others = {}
    for end in sorted(range(len(completed)), key=lambda k: -len(paths[k])):  # what repeats a completion is longer
        if end not in claimed:
            others[end] = ending_with(end)
    for end in sorted(others):
        yield others[end]


def _prefix_ids(calls: Sequence[ModelCall]) -> list[list[int]]:
    """For each prompt an id per prefix, the empty one first: ids are equal if and only if the prefixes are."""
    ids: dict[tuple[int, str], int] = {}
    paths = []
    for call in calls:
        path = [0]
        for message in call.messages:
            longer = (path[-1], json.dumps(message, sort_keys=True))
            path.append(ids.setdefault(longer, len(ids) + 1))
        paths.append(path)
    return paths


def _end_of_main(paths: Sequence[list[int]]) -> int:
    end = 0
    for index, path in enumerate(paths):
        n = len(paths[end])
        if len(path) > n and path[n - 1] == paths[end][-1]:
            end = index
    return end


def _completion(call: ModelCall) -> Turn:
    """Drops the fields that a server sends as null."""
    message = call.message or {}
    return Turn({key: value for key, value in message.items() if value is not None or key == "content"}, call)


def same_message(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether two messages differ at most in how frameworks rewrite a completion for the next prompt."""
    return _normalized(one) == _normalized(other)


def _normalized(message: dict[str, Any] | None) -> tuple[Any, ...]:
    """A message in a form that does not depend on how frameworks rewrite it between completion and next prompt."""
    message = message or {}
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(p.get("text")) for p in content)
    tool_calls = [_normalized_tool_call(call) for call in message.get("tool_calls") or ()]
    others = (message.get(key) for key in ("function_call", "refusal", "audio"))
    return (content or "", tool_calls, message.get("reasoning_content") or message.get("reasoning"), *others)


def _normalized_tool_call(call: dict[str, Any]) -> tuple[Any, ...]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    with suppress(json.JSONDecodeError):  # a model may write anything
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return call.get("id"), function.get("name"), arguments
