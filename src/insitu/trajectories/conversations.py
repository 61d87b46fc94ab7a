"""The conversations of an episode: prompts that continue one another, with each answer where it was given."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from insitu.schemas.episodes import ModelCall


class Turn(NamedTuple):
    """A message of a dialogue, and the call that sampled it, if it is unchanged since."""

    message: dict[str, Any]
    call: ModelCall | None = None


def conversations(calls: Sequence[ModelCall]) -> list[list[Turn]]:
    """All conversations of an episode. The first is that of the last call that continues the first call.

    A dialogue is the prompt and the answer of one call. An assistant's message in the prompt was sampled by the call
    whose whole prompt is what stands before it and whose answer it repeats; any other is context. Each answer has its
    call in exactly one dialogue: one that was changed before it was sent again (stripped thinking, a trimmed history)
    or that was never sent again ends a dialogue of its own. Calls without an answer are in none.
    """
    answered = [call for call in calls if call.message is not None]
    paths = _paths(answered)
    by_prompt: dict[int, list[int]] = {}
    for place, path in enumerate(paths):
        by_prompt.setdefault(path[-1], []).append(place)
    claimed: set[int] = set()

    def ending_with(end: int) -> list[Turn]:
        claimed.add(end)
        turns = []
        for message, before in zip(answered[end].messages, paths[end], strict=False):
            candidates = by_prompt.get(before, ()) if message.get("role") == "assistant" else ()
            free = (k for k in candidates if k not in claimed and _said(answered[k].message) == _said(message))
            sampler = next(free, None)
            if sampler is None:
                turns.append(Turn(message))
            else:
                claimed.add(sampler)
                turns.append(_answer(answered[sampler]))
        return [*turns, _answer(answered[end])]

    if not answered:
        return []
    main = _end_of_main(paths)
    found = {-1: ending_with(main)}
    for end in sorted(range(len(answered)), key=lambda k: -len(paths[k])):  # what repeats an answer is longer
        if end not in claimed:
            found[end] = ending_with(end)
    return [found[end] for end in sorted(found)]


def _paths(calls: Sequence[ModelCall]) -> list[list[int]]:
    """For each prompt a number for each of its beginnings, the empty one first: equal if and only if they are."""
    numbers: dict[tuple[int, str], int] = {}
    paths = []
    for call in calls:
        path = [0]
        for message in call.messages:
            longer = (path[-1], json.dumps(message, sort_keys=True))
            path.append(numbers.setdefault(longer, len(numbers) + 1))
        paths.append(path)
    return paths


def _end_of_main(paths: Sequence[list[int]]) -> int:
    end = 0
    for place, path in enumerate(paths):
        n = len(paths[end])
        if len(path) > n and path[n - 1] == paths[end][-1]:
            end = place
    return end


def _answer(call: ModelCall) -> Turn:
    """Without the fields that a server names only to say that there is nothing in them."""
    message = call.message or {}
    return Turn({key: value for key, value in message.items() if value is not None or key == "content"}, call)


def _said(message: dict[str, Any] | None) -> tuple[Any, ...]:
    """What a message says, however the frameworks between answer and next prompt have spelt it."""
    message = message or {}
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(p.get("text")) for p in content)
    called = [_called(call) for call in message.get("tool_calls") or ()]
    others = (message.get(key) for key in ("function_call", "refusal", "audio"))
    return (content or "", called, message.get("reasoning_content") or message.get("reasoning"), *others)


def _called(call: dict[str, Any]) -> tuple[Any, ...]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    with suppress(json.JSONDecodeError):  # a model may write anything
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return call.get("id"), function.get("name"), arguments
