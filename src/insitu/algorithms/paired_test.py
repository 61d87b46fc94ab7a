"""A paired randomization test: whether one version of a model scores higher than another on the same rows."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import numpy as np

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

    The p-value is the share of random assignments of signs to the differences whose sum is at least as far from 0: for
    scores of 0 and 1 the exact McNemar test, otherwise Fisher's randomization test (The Design of Experiments, 1935,
    section 21), sampled for more than `EXACT_ROWS` rows, with the observed assignment as one of the samples (Phipson
    and Smyth 2010, doi:10.2202/1544-6115.1585). The interval holds the differences that the same test does not reject,
    so it excludes 0 if and only if the p-value is at most 1 - confidence. If the candidate was selected as the best of
    several `candidates`, both are adjusted by Bonferroni's inequality (Dunn 1961, doi:10.1080/01621459.1961.10482090).
    """
    differences = np.asarray(candidate, dtype=float) - np.asarray(baseline, dtype=float)
    rows, level = len(differences), (1 - confidence) / candidates
    if rows < fewest_rows(confidence, candidates):
        raise ValueError(f"{rows} rows are fewer than {fewest_rows(confidence, candidates)}")
    sums_K, signs_K = _randomized(differences, max(_SAMPLES, math.ceil(20 / level)), seed)
    tolerance = 1e-9 * float(np.abs(differences).sum() + 1)

    def p_value(shift: float) -> float:
        """The p-value of the hypothesis that the differences are symmetric about `shift`."""
        observed = abs(float(differences.sum()) - shift * rows)
        extreme = int(np.count_nonzero(np.abs(sums_K - shift * signs_K) >= observed - tolerance))
        return extreme / len(sums_K) if rows <= EXACT_ROWS else (extreme + 1) / (len(sums_K) + 1)

    mean = float(differences.mean())
    ends = []
    least, most = float(differences.min()), float(differences.max())
    for end, sign in ((least, -1), (most, 1)):
        inside, outside = mean, end + sign * 1e-6
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if p_value(middle) > level else (inside, middle)
        ends.append(min(max(inside, least), most))
    means = float(np.mean(baseline)), float(np.mean(candidate))
    return PairedComparison(*means, mean, ends[0], ends[1], min(1.0, candidates * p_value(0.0)), rows)


def _randomized(differences: np.ndarray, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of K assignments of signs the sum of the signed differences, and the sum of the signs."""
    rows = len(differences)
    if rows <= EXACT_ROWS:
        signs = 1 - 2 * ((np.arange(2**rows)[:, None] >> np.arange(rows)) & 1)
        return signs @ differences, signs.sum(axis=1)
    random, parts = np.random.default_rng(seed), []
    for start in range(0, samples, 1000):  # bounds the memory
        signs = 1 - 2 * random.integers(0, 2, (min(1000, samples - start), rows), dtype=np.int8)
        parts.append((signs @ differences, signs.sum(axis=1)))
    return np.concatenate([sums for sums, _ in parts]), np.concatenate([counts for _, counts in parts])
