"""Reads the scored candidates of an episode from its steps, and finds the model call that sampled each of them."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from pydantic import BaseModel

from insitu.advantages.credit import is_targeted
from insitu.schemas.episodes import CandidateStep, DropReason, ModelCall
from insitu.schemas.finetuning import MAX_REWARD, message_text, text_content
from insitu.schemas.steps import IntermediateStep, IntermediateStepType


class Targets(NamedTuple):
    """What is trained: calls at these positions, made in these functions.

    `text` allows candidates that no recorded call has sampled; they are trained as text. If all are trained as text
    (`only_text`), candidates of every player are allowed, whichever model has sampled them, or none.
    """

    calls: Collection[int]
    functions: Collection[str]
    text: bool
    only_text: bool = False


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
    since = _turn_starts(reported, calls)
    sampled_by = _match(reported, calls, since)
    as_reported = _prompts_reported(reported, calls, since, sampled_by) if targets.only_text else ()
    kept, dropped = [], Counter[str]()
    for index, (step, candidate) in enumerate(reported):
        call = sampled_by.get(index)
        functions = _functions(step) if call is None else calls[call].functions
        if reason := _drop_reason(call, functions, targets):
            dropped[str(reason)] += 1
        elif call is None or candidate.turn_id in as_reported:
            kept.append(candidate)
        else:
            kept.append(replace(candidate, call=call, prompt=calls[call].messages))
    return kept, dropped


def recorded_candidates(
    candidates: Iterable[CandidateStep], targets: Targets
) -> tuple[list[CandidateStep], Counter[str]]:
    """Candidates of a recorded episode that are trained, and how many are not."""
    judged = [(candidate, _drop_reason(candidate.call, targets.functions, targets)) for candidate in candidates]
    kept = [candidate for candidate, reason in judged if reason is None]
    return kept, Counter(str(reason) for _, reason in judged if reason is not None)


def _drop_reason(call: int | None, functions: Collection[str], targets: Targets) -> DropReason | None:
    """Why a candidate that was sampled by `call`, inside `functions`, is not trained; None if it is."""
    if call in targets.calls:
        return None
    if not is_targeted(functions, targets.functions) or (call is not None and not targets.only_text):
        return DropReason.UNTARGETED_CANDIDATE
    return None if targets.text or targets.only_text else DropReason.UNSAMPLED_CANDIDATE


def _reported_candidates(steps: Iterable[IntermediateStep], step_name: str) -> list[_Reported]:
    reported = []
    of_turn: Counter[str] = Counter()
    for step in steps:
        if step.event_type is not IntermediateStepType.TTC_END or step.name != step_name:
            continue
        fields = {} if step.data is None else {**dict(step.data), **(step.data.model_extra or {})}
        prompt, turn_index, turn = _prompt(fields.get("input")), fields.get("turn_index"), fields.get("turn_id")
        if turn is None:
            turn = json.dumps(prompt) if turn_index is None else f"turn {turn_index}"
        index = fields.get("candidate_index")
        candidate = CandidateStep(
            turn_id=str(turn),
            candidate_index=of_turn[turn] if index is None else index,
            prompt=prompt,
            response=_text(fields.get("output")),
            score=_score(fields.get("score")),
            turn_index=turn_index,
            raw_metadata=_metadata(step),
        )
        of_turn[turn] += 1
        reported.append((step, candidate))
    return reported


def _turn_starts(reported: Sequence[_Reported], calls: Sequence[ModelCall]) -> list[float]:
    """For each candidate when its turn began: with the last report of another turn before it.

    It is unknown (infinite) for all of them if no call was made after the first report.
    """
    if not reported or all(call.started <= reported[0][0].event_timestamp for call in calls):
        return [math.inf] * len(reported)
    starts, start, latest, turn = [], -math.inf, -math.inf, None
    for step, candidate in reported:
        if candidate.turn_id != turn:
            start, turn = latest, candidate.turn_id
        starts.append(start)
        latest = step.event_timestamp
    return starts


def _prompts_reported(
    reported: Sequence[_Reported], calls: Sequence[ModelCall], since: Sequence[float], sampled_by: Mapping[int, int]
) -> set[str]:
    """Turns whose candidates keep the prompts that were reported, so that all have the same.

    Those are turns with a candidate that no call has sampled. A player without a model may also repeat what a model
    has answered to an earlier prompt.
    """
    turns = set()
    for index, (_, candidate) in enumerate(reported):
        call = calls[sampled_by[index]] if index in sampled_by else None
        is_its_own = call is not None and (call.started >= since[index] or _is_shown(candidate, call))
        if candidate.prompt and not is_its_own:
            turns.add(candidate.turn_id)
    return turns


def _match(reported: Sequence[_Reported], calls: Sequence[ModelCall], since: Sequence[float]) -> dict[int, int]:
    """Index in `reported` -> position of its call, first of those made in its turn. None is given to two candidates.

    A part such as a number may be in several completions of a turn; one that has it as a word goes before another. From
    its last candidate back, each gets the latest call that fits, so that candidates in the order in which they were
    sampled get their own calls.
    """
    first: dict[str, int] = {}
    for index, (_, candidate) in enumerate(reported):
        first.setdefault(candidate.turn_id, index)
    place = [(first[c.turn_id], c.candidate_index, index) for index, (_, c) in enumerate(reported)]
    backwards = sorted(range(len(reported)), key=place.__getitem__, reverse=True)
    texts = {k: _text(call.message).strip() for k, call in enumerate(calls) if call.message is not None}
    numbers: dict[int, int] = {}
    for own_turn, fits in product((True, False), (str.__eq__, _is_word_of, _is_part_of)):
        for index in backwards:
            step, candidate = reported[index]
            response = candidate.response.strip()
            if index in numbers:
                continue
            made = [k for k in texts if not own_turn or since[index] <= calls[k].started <= step.event_timestamp]
            fitting = [k for k in made if fits(response, texts[k])]
            if fitting:
                numbers[index] = max(fitting, key=lambda k: _likelihood(step, candidate, calls[k], k))
                del texts[numbers[index]]
    return numbers


def _is_word_of(response: str, text: str) -> bool:
    return _is_part_of(response, text) and re.search(rf"(?<!\w){re.escape(response)}(?!\w)", text) is not None


def _is_part_of(response: str, text: str) -> bool:
    return response != "" and response in text


def _likelihood(step: IntermediateStep, candidate: CandidateStep, call: ModelCall, position: int) -> tuple[Any, ...]:
    """Ranks the calls with a candidate's text: its prompt, its function, and the latest call before its step."""
    in_function = is_targeted(_functions(step), call.functions)
    return _is_shown(candidate, call), in_function, call.started <= step.event_timestamp, position


def _is_shown(candidate: CandidateStep, call: ModelCall) -> bool:
    """Whether the call's prompt is the candidate's, or ends in a message with it."""
    prompt = candidate.prompt
    if isinstance(prompt, str):
        return bool(prompt.strip()) and any(prompt.strip() in _text(message) for message in call.messages[-1:])
    return prompt == call.messages


def _functions(step: IntermediateStep) -> list[str]:
    node = step.function_ancestry
    return [name for name in (node.function_name, node.parent_name) if name]


def _metadata(step: IntermediateStep) -> dict[str, Any]:
    metadata = step.metadata
    return metadata.model_dump(exclude_none=True) if isinstance(metadata, BaseModel) else dict(metadata or {})


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
    """Also a number of another library, such as numpy."""
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except Exception:  # of a type of the workflow's own
        return None
    return number if abs(number) <= MAX_REWARD else None
