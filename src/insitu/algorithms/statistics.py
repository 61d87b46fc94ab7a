"""Means with confidence intervals."""

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean and the ends of its 95 % confidence interval; `low` and `high` are NaN for fewer than two values."""

    mean: float
    low: float
    high: float
    n: int

    def negated(self) -> "Estimate":
        """The estimate of the mean of the negated values."""
        return Estimate(0.0 - self.mean, 0.0 - self.high, 0.0 - self.low, self.n)


def rows_ci95(rows: Iterable[Sequence[float]]) -> Estimate:
    """The mean of independent rows, each the mean of its scores, as `mean_ci95` for the range of the scores."""
    scores = [*rows]
    is_share = all(0 <= score <= 1 for of_row in scores for score in of_row)
    return mean_ci95([sum(of_row) / len(of_row) for of_row in scores], is_share=is_share)


def mean_ci95(values: Sequence[float], *, is_share: bool | None = None) -> Estimate:
    """The mean of independent values; ValueError for none at all.

    Student's t interval, or Wilson's, which does not reach beyond 0 and 1, for a share: something from 0 to 1, as the
    values are unless `is_share` is given.
    """
    n = len(values)
    if n == 0:
        raise ValueError("no values to take a mean of")
    mean = fmean(values)
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    is_share = 0 <= min(values) <= max(values) <= 1 if is_share is None else is_share
    if is_share and {*values} <= {0, 1}:
        return Estimate(mean, *wilson(mean, n, NormalDist().inv_cdf(0.975)), n)
    deviation, quantile = stdev(values), student_t975(n - 1)
    if is_share:
        # values between 0 and 1 vary less than zeros and ones of the same mean, as if there were more of them; how
        # much less, equal ones do not say
        effective_n = n * (mean / deviation) * ((1 - mean) / deviation) if deviation > 0 and mean < 1 else n
        return Estimate(mean, *wilson(mean, effective_n, quantile), n)
    half = quantile * deviation / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def wilson(share: float, n: float, z: float) -> tuple[float, float]:
    """Wilson's score interval of a share of `n`, not necessarily an integer, at the quantile `z`.

    Source: Wilson (1927); for an effective sample size with Student's quantile, Franco et al. (2019),
    doi:10.1093/jssam/smy019.
    """
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.hypot(math.sqrt(share * (1 - share)) / math.sqrt(n), z / (2 * n))
    # at a share of 0 or 1 one end is exact, but for rounding
    return (0.0 if share == 0 else centre - half), (1.0 if share == 1 else centre + half)


def student_t975(freedom: int) -> float:
    """The 97.5 % point of Student's t; exact for 1 and 2 degrees of freedom, else good to 1 %.

    Source: the Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5.
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = NormalDist().inv_cdf(0.975)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / freedom + g2 / freedom**2 + g3 / freedom**3
