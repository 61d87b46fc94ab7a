"""A paired randomization test: whether one version of a model scores higher than another on the same rows."""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import getitem
from random import Random
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

EXACT_ROWS = 16
"""Up to so many rows all assignments of signs are enumerated; from then on they are sampled."""
_SAMPLES = 9_999


class PairedComparison(NamedTuple):
    """Means of both versions over `rows`, their difference with its confidence interval, and a two-sided p-value.

    Interval and p-value are adjusted for the number of candidates that were compared.
    """

    baseline: float
    candidate: float
    difference: float
    low: float
    high: float
    p_value: float
    rows: int


def fewest_rows(confidence: float, candidates: int = 1) -> int:
    """The number of rows below which no difference, however large, is significant."""
    return 1 + math.ceil(math.log2(candidates / (1 - confidence)))


def rows_to_show(differences: Sequence[float], confidence: float, candidates: int = 1) -> int:
    """About how many rows would make the same mean difference, with the same spread, significant.

    Assumes that the mean is normally distributed, and counts the rows that do differ. More than there are: these were
    not enough.
    """
    rows, differing = len(differences), sum(each != 0 for each in differences)
    quantile = NormalDist().inv_cdf(1 - (1 - confidence) / candidates / 2)
    by_spread = (quantile * stdev(differences) / fmean(differences)) ** 2
    return max(rows + 1, math.ceil(by_spread), math.ceil(fewest_rows(confidence, candidates) * rows / differing))


def compare_paired(
    baseline: Sequence[float], candidate: Sequence[float], confidence: float, candidates: int = 1, seed: int = 0
) -> PairedComparison:
    """Tests the hypothesis that the differences by row are symmetric about 0, so that their signs are random.

    The p-value is the share of random assignments of signs to the differences whose sum is at least as far from 0:
    Fisher's randomization test (The Design of Experiments, 1935, section 21), which is McNemar's exact test for scores
    of 0 and 1, sampled for more than `EXACT_ROWS` rows, with the observed assignment as one of the samples (Phipson
    and Smyth 2010, doi:10.2202/1544-6115.1585). The interval holds the differences that the same test does not reject,
    so it excludes 0 if and only if the p-value is at most 1 - confidence. If the candidate was selected as the best of
    several `candidates`, both are adjusted by Bonferroni's inequality (Dunn 1961, doi:10.1080/01621459.1961.10482090).
    """
    differences = [float(b) - float(a) for a, b in zip(baseline, candidate, strict=True)]
    rows, level = len(differences), (1 - confidence) / candidates
    if rows < fewest_rows(confidence, candidates):
        raise ValueError(f"{rows} rows are fewer than {fewest_rows(confidence, candidates)}")
    exact, samples = rows <= EXACT_ROWS, max(_SAMPLES, math.ceil(20 / level))
    random = Random(seed)
    assignments = range(2**rows) if exact else (random.getrandbits(rows) for _ in range(samples))
    randomized = _randomized(differences, assignments)
    total, number = sum(differences), sum(map(len, randomized.values()))
    tolerance = 1e-9 * (sum(map(abs, differences)) + 1)

    def p_value(shift: float) -> float:
        """The p-value of the hypothesis that the differences are symmetric about `shift`."""
        limit = abs(total - shift * rows) - tolerance
        if limit <= 0:
            return 1.0
        extreme = sum(
            len(sums) - bisect_left(sums, shift * signs + limit) + bisect_right(sums, shift * signs - limit)
            for signs, sums in randomized.items()
        )
        return extreme / number if exact else (extreme + 1) / (number + 1)

    mean = fmean(differences)
    ends = []
    least, most = min(differences), max(differences)
    for end, sign in ((least, -1), (most, 1)):
        inside, outside = mean, end + sign * 1e-6
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if p_value(middle) > level else (inside, middle)
        ends.append(min(max(inside, least), most))
    p = min(1.0, candidates * p_value(0.0))
    return PairedComparison(fmean(baseline), fmean(candidate), mean, ends[0], ends[1], p, rows)


def _randomized(differences: Sequence[float], assignments: Iterable[int]) -> dict[int, list[float]]:
    """Sorted sums of the signed differences, by the sum of the signs.

    A bit of an assignment says that the difference of that row is negated. Eight rows at a time are looked up.
    """
    rows = len(differences)
    tables = []
    for start in range(0, rows, 8):
        table = [0.0]
        for each in differences[start : start + 8]:
            table = [sum_ + each for sum_ in table] + [sum_ - each for sum_ in table]
        tables.append(table)
    sums = defaultdict(list)
    for bits in assignments:
        chunks = bits.to_bytes(len(tables), "little")
        sums[rows - 2 * bits.bit_count()].append(sum(map(getitem, tables, chunks)))
    return {signs: sorted(each) for signs, each in sums.items()}
