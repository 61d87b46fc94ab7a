"""Means with confidence intervals, against tables and against repeated sampling."""

import math
import random

import pytest
from marks import slow_after

from insitu.algorithms.statistics import mean_ci95, rows_ci95, student_t975


@pytest.mark.parametrize(
    ("freedom", "value"),  # from the tables of Student's distribution
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (30, 2.0423), (100, 1.9840)],
)
def test_student(freedom: int, value: float) -> None:
    assert student_t975(freedom) == pytest.approx(value, rel=0.01 if freedom > 2 else 1e-4)


def test_large_samples_are_normal() -> None:
    assert student_t975(10**6) == pytest.approx(1.959966, abs=1e-5)


def test_an_interval_by_hand() -> None:
    estimate = mean_ci95([1.0, 2.0, 3.0])
    half = 4.302653 * 1.0 / math.sqrt(3)
    assert estimate == pytest.approx((2.0, 2 - half, 2 + half, 3), rel=1e-6)


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    mean, low, high, n = mean_ci95([0.5])
    assert (mean, n) == (0.5, 1)
    assert math.isnan(low)
    assert math.isnan(high)
    with pytest.raises(ValueError, match="no values"):
        mean_ci95([])
    assert mean_ci95([2, 2, 2])[:3] == (2, 2, 2)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),  # R: binom::binom.wilson
    [(0, 10, 0.0, 0.2775328), (1, 3, 0.0614919, 0.7923404), (81, 263, 0.2552971, 0.3662113), (5, 5, 0.5655175, 1.0)],
)
def test_zeros_and_ones_have_wilsons_interval(successes: int, n: int, low: float, high: float) -> None:
    estimate = mean_ci95([1] * successes + [0] * (n - successes))
    assert estimate == pytest.approx((successes / n, low, high, n), abs=1e-4)


@pytest.mark.parametrize(
    "values", [[0.9, 1.0, 1.0], [0.0, 0.0, 0.1], [0.02, 0.98], [1.0, 1.0, 0.99, 0.3], [0.0, 1e-170], [1e-160, 2e-160]]
)
def test_values_between_0_and_1_have_no_interval_beyond(values: list[float]) -> None:
    mean, low, high, _ = mean_ci95(values)
    assert 0 <= low < mean < high <= 1


def test_shares_whose_mean_rounds_to_1() -> None:
    mean, low, high, _ = mean_ci95([1.0, 0.9999999999999999])
    assert (mean, high) == (1.0, 1.0)
    assert 0 < low < 1


def test_equal_shares_say_nothing_of_how_much_they_vary() -> None:
    """Rows that each score one of two repetitions: as sure as rows of which half score, but for Student's quantile."""
    mean, low, high, n = rows_ci95([[1.0, 0.0]] * 4)
    assert (mean, n) == (0.5, 4)
    assert 0 < low < mean_ci95([1, 0, 1, 0]).low < 0.5 < high < 1


def test_rows_of_zeros_and_ones_are_shares_only_if_their_scores_are() -> None:
    """Means of +1 and -1, by repetition, are no proportions: Student's interval of them reaches beyond Wilson's."""
    rows = [[1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [1.0, 1.0], [-1.0, 1.0]]
    half = student_t975(4) * 0.3**0.5 / 5**0.5
    assert rows_ci95(rows) == pytest.approx((0.6, 0.6 - half, 0.6 + half, 5))
    assert rows_ci95([[sum(row) / 2] for row in rows]) == mean_ci95([1, 0, 1, 1, 0])


def test_an_interval_of_other_values_is_not_cut_off() -> None:
    assert mean_ci95([-0.5, 0.0, 1.0]).low < -0.5
    assert mean_ci95([0.0, 0.1, 9.0]).low < 0


@pytest.mark.parametrize("size", slow_after(1, [4, 10, 40]))
def test_nineteen_of_twenty_intervals_of_shares_hold_the_mean(size: int) -> None:
    """The values are often 1 and otherwise anything, as scores are."""
    chance, held = random.Random(size), 0
    for _ in range(4000):
        estimate = mean_ci95([1.0 if chance.random() < 0.3 else chance.random() for _ in range(size)])
        held += estimate.low <= 0.65 <= estimate.high
    assert 0.935 <= held / 4000 <= 0.985


@pytest.mark.parametrize("size", slow_after(1, [3, 8, 40]))
def test_nineteen_of_twenty_intervals_hold_the_mean(size: int) -> None:
    chance = random.Random(size)
    held = 0
    for _ in range(4000):
        estimate = mean_ci95([chance.gauss(3, 2) for _ in range(size)])
        held += estimate.low <= 3 <= estimate.high
    assert held / 4000 == pytest.approx(0.95, abs=0.015)
