"""Preference pairs: which candidates of a turn are compared, and why others are not."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from operator import attrgetter
from typing import Any, NamedTuple

from insitu.schemas.episodes import CandidateStep, DropReason, PreferencePair

ALIKE = frozenset({DropReason.EQUAL_SCORES, DropReason.IDENTICAL_RESPONSES, DropReason.SMALL_DIFFERENCE})
"""Reasons for which candidates are no pair although they could be compared: nothing has failed."""
_ROUNDING = 1e-9


class PairOptions(NamedTuple):
    """Which pairs of a turn are kept.

    `exhaustive`: all of them, or only the one with the largest difference in score. Pairs whose scores differ by less
    than `min_score_diff` are dropped, then all but the `max_pairs` with the largest differences, repetitions first.
    """

    exhaustive: bool = True
    min_score_diff: float = 0.0
    max_pairs: int | None = None
    single_candidates_dropped: bool = True
    """Whether a turn with a single candidate counts as dropped."""


class Duplicates:
    """Recognises pairs with the content of an earlier one."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def repeats(self, content: Any) -> bool:
        digest = hashlib.blake2b(json.dumps(content, default=str).encode(), digest_size=16).digest()
        is_duplicate = digest in self._seen
        self._seen.add(digest)
        return is_duplicate


def are_equal(score: float, other: float) -> bool:
    """Whether scores differ by no more than rounding."""
    return abs(score - other) <= _ROUNDING * max(abs(score), abs(other), 1.0)


def preference_pairs(
    candidates: Iterable[CandidateStep],
    options: PairOptions,
    said: Callable[[CandidateStep], Any] = attrgetter("response"),
) -> tuple[list[PreferencePair], Counter[str]]:
    """The pairs of each turn, the largest difference first, and how many candidates, turns and pairs were dropped.

    Equal scores never make a pair, nor do candidates that have `said` the same. Equal differences keep the order of the
    candidates.
    """
    pairs: list[PreferencePair] = []
    dropped: Counter[str] = Counter()
    turns: dict[str, list[CandidateStep]] = {}
    for candidate in candidates:
        turns.setdefault(candidate.turn_id, []).append(candidate)
    for turn in turns.values():
        scored = [candidate for candidate in turn if candidate.score is not None]
        dropped[DropReason.UNSCORED_CANDIDATE] += len(turn) - len(scored)
        if len(scored) == 1 and options.single_candidates_dropped:
            dropped[DropReason.SINGLE_CANDIDATE] += 1
        pairs += _pairs_of_turn(scored, options, said, dropped)
    return pairs, Counter({str(reason): count for reason, count in dropped.items() if count})


def _pairs_of_turn(
    candidates: Sequence[CandidateStep],
    options: PairOptions,
    said: Callable[[CandidateStep], Any],
    dropped: Counter[str],
) -> list[PreferencePair]:
    pairs, reasons = [], Counter[str]()
    ordered = sorted(candidates, key=lambda candidate: candidate.candidate_index)
    for one, other in combinations(ordered, 2):
        pair = PreferencePair(one, other)
        if pair.score_diff < 0:
            pair = PreferencePair(other, one)
        reason = _drop_reason(pair, options, said)
        if reason is None:
            pairs.append(pair)
        else:
            reasons[reason] += 1
    pairs.sort(key=lambda pair: -pair.score_diff)
    if not options.exhaustive:
        dropped.update(reasons if not pairs else ())
        return pairs[:1]
    dropped.update(reasons)
    kept = pairs
    if options.max_pairs is not None:
        seen = Duplicates()
        repeats = {id(p) for p in pairs if seen.repeats([p.chosen.prompt, said(p.chosen), said(p.rejected)])}
        first = {id(p) for p in sorted(pairs, key=lambda pair: id(pair) in repeats)[: options.max_pairs]}
        kept = [pair for pair in pairs if id(pair) in first]
    dropped[DropReason.MAX_PAIRS] += len(pairs) - len(kept)
    return kept


def _drop_reason(pair: PreferencePair, options: PairOptions, said: Callable[[CandidateStep], Any]) -> DropReason | None:
    if are_equal(pair.score_diff, 0.0):
        return DropReason.EQUAL_SCORES
    if said(pair.chosen) == said(pair.rejected):
        return DropReason.IDENTICAL_RESPONSES
    if pair.chosen.prompt != pair.rejected.prompt:
        return DropReason.DIFFERENT_PROMPTS
    if pair.score_diff < options.min_score_diff and not are_equal(pair.score_diff, options.min_score_diff):
        return DropReason.SMALL_DIFFERENCE
    return None
