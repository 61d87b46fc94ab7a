"""Group advantages against numpy and hand-worked groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from insitu.advantages.credit import AdvantageConfig, group_advantages
from insitu.errors import TrajectoryError

rewards = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=12).filter(
    lambda values: len(set(values)) > 1
)


def test_conventions_by_hand():
    group = [1.0, 0.0, 0.0, 1.0]
    of = lambda **config: group_advantages(group, AdvantageConfig(**config))  # noqa: E731
    assert of(scale="none") == [0.5, -0.5, -0.5, 0.5]
    assert of(baseline="leave_one_out", scale="none") == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert of(scale="population_std", epsilon=0.5) == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert of(scale="sample_std", epsilon=0) == pytest.approx([0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5])
    assert of() == of(baseline="mean", scale="sample_std", epsilon=1e-6)


@given(rewards)
def test_equal_to_numpy(group):
    array = np.array(group)
    scaled = (array - array.mean()) / (array.std(ddof=1) + 1e-6)
    assert group_advantages(group, AdvantageConfig()) == pytest.approx(scaled, rel=1e-9, abs=1e-9)
    alone = [value - np.delete(array, i).mean() for i, value in enumerate(array)]
    left_out = AdvantageConfig(baseline="leave_one_out", scale="population_std", epsilon=1e-4)
    assert group_advantages(group, left_out) == pytest.approx(np.array(alone) / (array.std() + 1e-4), abs=1e-9)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "sample_std", "population_std"])
@pytest.mark.parametrize("group", [[], [3.0], [0.1, 0.1, 0.1], [7.0] * 5])
def test_nothing_to_compare_is_exactly_zero(group, baseline, scale):
    assert group_advantages(group, AdvantageConfig(baseline=baseline, scale=scale, epsilon=0)) == [0.0] * len(group)


def test_differences_too_small_for_a_deviation_are_none():
    assert group_advantages([1e-200, 2e-200], AdvantageConfig(epsilon=0)) == [0.0, 0.0]
    assert group_advantages([1e-200, 2e-200], AdvantageConfig(epsilon=0, scale="none")) == [-5e-201, 5e-201]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -1e200])
def test_a_reward_whose_square_is_no_number_is_refused(reward):
    with pytest.raises(TrajectoryError, match="reward 1 of the group is "):
        group_advantages([1.0, reward], AdvantageConfig())


def test_misspelt_conventions_are_refused():
    with pytest.raises(ValidationError):
        AdvantageConfig(scale="std")
    with pytest.raises(ValidationError):
        AdvantageConfig(eps=1e-6)
