"""Reads the scored candidates of an episode from its steps, and finds the model call that sampled each of them."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from insitu.advantages.credit import is_targeted
from insitu.schemas.episodes import CandidateStep, DropReason, ModelCall
from insitu.schemas.finetuning import MAX_REWARD, message_text, text_content
from insitu.schemas.steps import IntermediateStep, IntermediateStepType


class Targets(NamedTuple):
    """What is trained: calls at these positions, made in these functions.

    `text` allows candidates that no recorded call has sampled; they are trained as text.
    """

    calls: Collection[int]
    functions: Collection[str]
    text: bool


_Reported = tuple[IntermediateStep, CandidateStep]
"""A step, and the candidate that it reports."""


def candidates_of(
    steps: Iterable[IntermediateStep], calls: Sequence[ModelCall], step_name: str, targets: Targets
) -> tuple[list[CandidateStep], Counter[str]]:
    """The candidates of the `TTC_END` steps of this name, and how many were dropped because they are not trained.

    A candidate was sampled by the call whose completion is its output, or else contains it. Its prompt is then that of
    the call, and its response stays the output.
    """
    reported = _reported_candidates(steps, step_name)
    sampled_by = _match(reported, calls)
    kept, dropped = [], Counter[str]()
    for index, (step, candidate) in enumerate(reported):
        call = sampled_by.get(index)
        if call is not None and call in targets.calls:
            kept.append(replace(candidate, call=call, prompt=calls[call].messages))
        elif call is None and targets.text and _is_in_function(step, targets.functions):
            kept.append(candidate)
        else:
            dropped[str(DropReason.UNTARGETED_CANDIDATE)] += 1
    return kept, dropped


def recorded_candidates(
    candidates: Iterable[CandidateStep], targets: Targets
) -> tuple[list[CandidateStep], Counter[str]]:
    """Candidates of a recorded episode that are trained, and how many are not."""
    every = list(candidates)
    kept = [c for c in every if (targets.text if c.call is None else c.call in targets.calls)]
    return kept, +Counter({str(DropReason.UNTARGETED_CANDIDATE): len(every) - len(kept)})


def _reported_candidates(steps: Iterable[IntermediateStep], step_name: str) -> list[_Reported]:
    reported = []
    of_turn: Counter[str] = Counter()
    for step in steps:
        if step.event_type is not IntermediateStepType.TTC_END or step.name != step_name:
            continue
        data = step.data
        prompt = _prompt(getattr(data, "input", None))
        turn_index = getattr(data, "turn_index", None)
        turn = getattr(data, "turn_id", None)
        if turn is None:
            turn = json.dumps(prompt) if turn_index is None else f"turn {turn_index}"
        index = getattr(data, "candidate_index", None)
        candidate = CandidateStep(
            turn_id=str(turn),
            candidate_index=of_turn[turn] if index is None else index,
            prompt=prompt,
            response=_text(getattr(data, "output", None)),
            score=_score(getattr(data, "score", None)),
            turn_index=turn_index,
        )
        of_turn[turn] += 1
        reported.append((step, candidate))
    return reported


def _match(reported: Sequence[_Reported], calls: Sequence[ModelCall]) -> dict[int, int]:
    """Index in `reported` -> position of its call. No call is given to two candidates.

    A part such as a number may be in several completions of a turn. From its last candidate back, each gets the latest
    call that fits, so that candidates in the order in which they were sampled get their own calls.
    """
    first: dict[str, int] = {}
    for index, (_, candidate) in enumerate(reported):
        first.setdefault(candidate.turn_id, index)
    place = [(first[c.turn_id], c.candidate_index, index) for index, (_, c) in enumerate(reported)]
    backwards = sorted(range(len(reported)), key=place.__getitem__, reverse=True)
    texts = {k: _text(call.message).strip() for k, call in enumerate(calls) if call.message is not None}
    found: dict[int, int] = {}
    for whole in (True, False):  # first those that repeat a completion, then those that are a part of one
        for index in backwards:
            step, candidate = reported[index]
            response = candidate.response.strip()
            if index in found or not (response or whole):
                continue
            fitting = [k for k, text in texts.items() if (response == text if whole else response in text)]
            if fitting:
                found[index] = max(fitting, key=lambda k: _likelihood(step, candidate, calls[k], k))
                del texts[found[index]]
    return found


def _likelihood(step: IntermediateStep, candidate: CandidateStep, call: ModelCall, position: int) -> tuple[Any, ...]:
    """Ranks the calls with a candidate's text: its prompt, its function, and the latest call before its step."""
    prompt = candidate.prompt
    if isinstance(prompt, str):
        shown = bool(prompt.strip()) and prompt.strip() in _text(call.messages[-1])
    else:
        shown = prompt == call.messages
    return shown, _is_in_function(step, call.functions), call.started <= step.event_timestamp, position


def _is_in_function(step: IntermediateStep, functions: Collection[str]) -> bool:
    node = step.function_ancestry
    return is_targeted([name for name in (node.function_name, node.parent_name) if name], functions)


def _prompt(value: Any) -> list[dict[str, Any]] | str:
    """Messages stay messages; anything else is text."""
    if isinstance(value, list) and value and all(_role(message) for message in value):
        return [
            message if isinstance(message, dict) else {"role": _role(message), "content": _text(message)}
            for message in value
        ]
    return _text(value)


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return None if role is None else str(role)


def _text(value: Any) -> str:
    """The text of a message, or of whatever else a step holds."""
    if isinstance(value, dict) and "content" in value:
        return message_text(value)
    if hasattr(value, "content"):
        return text_content(value.content)
    if value is None or isinstance(value, str):
        return value or ""
    return str(value) if not isinstance(value, dict | list) else json.dumps(value, default=str)


def _score(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_REWARD else None
