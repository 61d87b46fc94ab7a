"""Preference pairs: which candidates of a turn are compared, and why others are not."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from insitu.schemas.episodes import CandidateStep, DropReason, PreferencePair

ALIKE = frozenset({DropReason.EQUAL_SCORES, DropReason.IDENTICAL_RESPONSES, DropReason.SMALL_DIFFERENCE})
"""Reasons for which candidates are no pair although they could be compared: nothing has failed."""


class PairOptions(NamedTuple):
    """Which pairs of a turn are kept.

    `exhaustive`: all of them, or only the one with the largest difference in score. Pairs whose scores differ by less
    than `min_score_diff` are dropped, then all but the `max_pairs` with the largest differences.
    """

    exhaustive: bool = True
    min_score_diff: float = 0.0
    max_pairs: int | None = None
    single_candidates_dropped: bool = True
    """Whether a turn with a single candidate counts as dropped."""


def preference_pairs(
    candidates: Iterable[CandidateStep], options: PairOptions
) -> tuple[list[PreferencePair], Counter[str]]:
    """The pairs of each turn, the largest difference first, and how many candidates, turns and pairs were dropped.

    Equal scores and identical responses never make a pair. Equal differences keep the order of the candidates.
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
        pairs += _pairs_of_turn(scored, options, dropped)
    return pairs, Counter({str(reason): count for reason, count in dropped.items() if count})


def _pairs_of_turn(
    candidates: Sequence[CandidateStep], options: PairOptions, dropped: Counter[str]
) -> list[PreferencePair]:
    pairs, reasons = [], Counter[str]()
    ordered = sorted(candidates, key=lambda candidate: candidate.candidate_index)
    for one, other in combinations(ordered, 2):
        pair = PreferencePair(one, other)
        if pair.score_diff < 0:
            pair = PreferencePair(other, one)
        reason = _drop_reason(pair, options)
        if reason is None:
            pairs.append(pair)
        else:
            reasons[reason] += 1
    pairs.sort(key=lambda pair: -pair.score_diff)
    if not options.exhaustive:
        dropped.update(reasons if not pairs else ())
        return pairs[:1]
    dropped.update(reasons)
    kept = pairs[: options.max_pairs]
    dropped[DropReason.MAX_PAIRS] += len(pairs) - len(kept)
    return kept


def _drop_reason(pair: PreferencePair, options: PairOptions) -> DropReason | None:
    if pair.score_diff == 0:
        return DropReason.EQUAL_SCORES
    if pair.chosen.response == pair.rejected.response:
        return DropReason.IDENTICAL_RESPONSES
    if pair.chosen.prompt != pair.rejected.prompt:
        return DropReason.DIFFERENT_PROMPTS
    if pair.score_diff < options.min_score_diff:
        return DropReason.SMALL_DIFFERENCE
    return None
