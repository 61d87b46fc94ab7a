"""Which rows `insitu train` holds out."""

import pytest

from insitu.api.train import split


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.99])
@pytest.mark.parametrize("number", [1, 2, 3, 10, 101])
def test_no_row_is_lost_or_trained_and_held_out(number: int, share: float) -> None:
    rows = [f"row {n}" for n in range(number)]
    left, held = split(rows, share, seed=3)
    assert sorted([*left, *held]) == sorted(rows)
    assert left
    assert bool(held) == (share > 0 and number > 1)
    assert abs(len(held) - share * number) <= 1
    assert (left, held) == split(rows, share, seed=3)
    assert left == sorted(left, key=rows.index)


def test_the_seed_chooses_them() -> None:
    assert len({tuple(split(range(20), 0.2, seed)[1]) for seed in range(5)}) == 5
