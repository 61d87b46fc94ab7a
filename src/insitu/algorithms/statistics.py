"""Means with confidence intervals."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean and the ends of its 95 % confidence interval; `low` and `high` are NaN for fewer than two values."""

    mean: float
    low: float
    high: float
    n: int


def mean_ci95(values: Sequence[float]) -> Estimate:
    """Student's t interval for the mean of independent values; ValueError for none at all."""
    n = len(values)
    if n == 0:
        raise ValueError("no values to take a mean of")
    mean = fmean(values)
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    half = student_t975(n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


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
