"""The paired randomization test: published results, exact distributions, and what its interval promises."""

import math

import numpy as np
import pytest

from insitu.algorithms.paired_test import EXACT_ROWS, compare_paired, fewest_rows, rows_to_show

DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Differences in height of 15 pairs of cross- and self-fertilised maize, in eighths of an inch (Darwin 1876)."""


def compare(differences, confidence=0.95, candidates=1):
    return compare_paired(np.zeros(len(differences)), differences, confidence, candidates)


def test_fishers_result_for_darwins_maize():
    """The Design of Experiments, section 21: 863 of 32,768 sums are at least 314 (835 larger, 28 equal)."""
    result = compare(DARWIN)
    assert result.p_value == 2 * 863 / 32768
    assert result.difference == pytest.approx(314 / 15)
    # the interval of Student's t, which Fisher compares, is 0.03 to 41.8
    assert -1.5 < result.low < 0 < 41 < result.high < 42.5


@pytest.mark.parametrize(("better", "worse", "same"), [(5, 0, 5), (9, 1, 6), (12, 3, 1), (30, 12, 60)])
def test_scores_of_zero_and_one_give_mcnemars_exact_test(better, worse, same):
    """The binomial probability of so uneven a split, two-sided."""
    result = compare([1.0] * better + [-1.0] * worse + [0.0] * same)
    n = better + worse
    exact = min(1, 2 * sum(math.comb(n, k) for k in range(better, n + 1)) / 2**n)
    assert result.p_value == pytest.approx(exact, abs=0 if n + same <= EXACT_ROWS else 0.005)


@pytest.mark.parametrize("rows", [8, 60])
def test_the_interval_excludes_zero_if_and_only_if_the_test_rejects(rows):
    rejected = 0
    for seed in range(40):
        differences = np.random.default_rng(seed).normal(0.5, 1.0, rows)
        result = compare(differences)
        assert (result.low > 0 or result.high < 0) == (result.p_value <= 0.05)
        assert differences.min() <= result.low <= result.difference <= result.high <= differences.max()
        rejected += result.p_value <= 0.05
    assert 5 < rejected <= 40


def test_few_false_promotions():
    """About 5 % of 200 pairs of equally good versions differ significantly, half of them for the better."""
    random = np.random.default_rng(0)
    results = [compare(random.integers(0, 2, 12) - random.integers(0, 2, 12)) for _ in range(200)]
    assert sum(result.p_value <= 0.05 for result in results) <= 14


def test_a_choice_among_several_is_accounted_for():
    one, four = compare(DARWIN), compare(DARWIN, candidates=4)
    assert four.p_value == 4 * one.p_value
    assert four.low < one.low
    assert four.high > one.high
    assert compare([0.25] * 12) == (0, 0.25, 0.25, 0.25, 0.25, 2 / 4096, 12)
    assert compare([0.0] * 12).p_value == 1


def test_too_few_rows_cannot_show_anything():
    assert [fewest_rows(0.95), fewest_rows(0.99), fewest_rows(0.95, 10)] == [6, 8, 9]
    assert compare([1.0] * 6).p_value <= 0.05
    with pytest.raises(ValueError, match="5 rows are fewer than 6"):
        compare([1.0] * 5)


def test_the_same_scores_give_the_same_result():
    differences = np.random.default_rng(1).normal(0.1, 1.0, 300)
    assert compare(differences) == compare(differences)


@pytest.mark.parametrize("confidence", [0.9, 0.99])
@pytest.mark.parametrize("differences", [[1] * 5 + [0] * 11, [0.3, -0.2, 0.1, 0.4, -0.3, 0.2, 0.1, -0.1] * 3])
def test_the_same_difference_on_so_many_rows_is_significant(differences, confidence):
    """Of rows like these: about so many are enough, and four in five of them are not."""
    enough = rows_to_show(differences, confidence)

    def p_value(rows):
        return compare(np.quantile(differences, np.linspace(0, 1, rows), method="nearest"), confidence).p_value

    assert p_value(math.ceil(1.1 * enough)) <= 1 - confidence < p_value(math.floor(0.8 * enough))
