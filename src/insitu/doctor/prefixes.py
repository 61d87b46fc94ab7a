"""Conversations that need more than one training row, because a prompt does not repeat the tokens before it."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from insitu.advantages.estimator import rows_of
from insitu.collect.conversations import same_message
from insitu.doctor.findings import Evidence, Finding, Severity, severity_of
from insitu.doctor.plan import Plan
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import Trajectory
from insitu.training.metrics import share_of

Decoder = Callable[[Sequence[int]], str]
_SHOWN = 5
"""Tokens that are shown from the first one that differs."""


class BrokenPrefix(NamedTuple):
    """A call whose prompt continues the conversation of an `earlier` one, but not its tokens.

    `position` is the first token that differs; the completion of the earlier call begins at `completion`. `rewritten`:
    the agent has changed the answer that it sends back.
    """

    call: int
    earlier: int
    position: int
    completion: int
    expected: Sequence[int]
    sent: Sequence[int]
    rewritten: bool


def broken_prefixes(calls: Sequence[ModelCall]) -> list[BrokenPrefix]:
    """The calls of an episode that begin a new training row although they continue a conversation."""
    known = [call for call in calls if call.prompt_token_ids is not None and call.token_ids and call.message]
    with_logprobs = {index: 1.0 for index, call in enumerate(known) if call.logprobs is not None}
    begins = {row.calls[0] for row in rows_of(known, with_logprobs)}
    found = (_broken(call, known[:index]) for index, call in enumerate(known) if index and call.index in begins)
    return [each for each in found if each is not None]


def _broken(call: ModelCall, before: Sequence[ModelCall]) -> BrokenPrefix | None:
    """None if it continues no earlier call, or the tokens of one."""
    continued = [each for each in before if _continues(call, each)]
    longest = max((len(each.messages) for each in continued), default=0)
    candidates = [each for each in continued if len(each.messages) == longest]  # several of one prompt, maybe
    if not candidates or any(_starts_with(call, each) for each in candidates):
        return None
    answer = call.messages[longest]
    earlier = next((each for each in candidates if same_message(answer, each.message)), candidates[-1])
    expected, sent = _tokens_after(earlier), call.prompt_token_ids or []
    pairs = zip(expected, sent, strict=False)
    position = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(sent)))
    rewritten = not same_message(answer, earlier.message)
    completion = len(earlier.prompt_token_ids or ())
    return BrokenPrefix(call.index, earlier.index, position, completion, expected, sent, rewritten)


def _continues(call: ModelCall, earlier: ModelCall) -> bool:
    """Whether its messages are those of an earlier call, an answer, and others."""
    length = len(earlier.messages)
    answer = call.messages[length : length + 1]
    return call.messages[:length] == earlier.messages and bool(answer) and answer[0].get("role") == "assistant"


def _starts_with(call: ModelCall, earlier: ModelCall) -> bool:
    before = _tokens_after(earlier)
    return (call.prompt_token_ids or [])[: len(before)] == before


def _tokens_after(call: ModelCall) -> list[int]:
    return [*(call.prompt_token_ids or ()), *(call.token_ids or ())]


def rows_per_episode(groups: Sequence[Sequence[Trajectory]]) -> float | None:
    """The mean number of training rows that an episode would need; None if it is unknown."""
    counts = []
    for trajectory in (t for group in groups for t in group):
        calls = [trajectory.calls[position] for position in trajectory.trained_calls]
        if any(call.prompt_token_ids is None or not call.logprobs for call in calls):
            return None
        counts.append(len(rows_of(trajectory.calls, dict.fromkeys(trajectory.trained_calls, 1.0))))
    return fmean(counts) if counts else None


def about_prefixes(plan: Plan, evidence: Evidence, decode: Decoder | None = None) -> Iterator[Finding]:
    """Rows per episode beyond those of its conversations, and at which turn and token the first one begins."""
    episodes = [episode for episode in evidence.episodes if episode.calls]
    broken = [(episode, found[0]) for episode in episodes if (found := broken_prefixes(episode.calls))]
    for rewritten in (False, True):
        affected = [(episode, first) for episode, first in broken if first.rewritten is rewritten]
        if not affected:
            continue
        episode, first = affected[0]
        severity = min(severity_of(len(affected), len(episodes)), Severity.HARMS, key=[*Severity][::-1].index)
        share = share_of(len(affected), len(episodes), "episodes")
        what = (
            f"{share} need more than one training row, as {_difference(first, decode)} (episode {episode.key.text()})"
        )
        if rewritten:
            change = "append the model's message as it was returned; rewriting it costs time and context"
            yield Finding("answers_rewritten", severity, what, "workflow", change)
        else:
            change = "use a chat template that keeps earlier answers as they were sampled, thinking included"
            yield Finding("prefix_broken", severity, what, f"{plan.adapter}.model (chat template)", change)


def _difference(broken: BrokenPrefix, decode: Decoder | None) -> str:
    part = "the answer" if broken.position >= broken.completion else "the prompt"
    expected, sent = (ids[broken.position : broken.position + _SHOWN] for ids in (broken.expected, broken.sent))
    texts = [repr(decode(ids)) if decode is not None else str([*ids]) for ids in (expected, sent)]
    changed = f"the agent changed the answer of call {broken.earlier}" if broken.rewritten else "its tokens differ"
    return (
        f"call {broken.call} continues call {broken.earlier}, but {changed}: from token {broken.position}, in {part}, "
        f"{texts[1]} instead of {texts[0]}"
    )
