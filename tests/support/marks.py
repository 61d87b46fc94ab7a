"""Which values of a parametrised test `make test` leaves to `make test WITH=slow`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """The values, of which those after the first `count` are slow; a tuple has the values of several parameters."""
    return [each if number < count else _slow(each) for number, each in enumerate(values)]


def slow_but(kept: Container[Any], values: Iterable[Any]) -> list[Any]:
    """The values, of which all but those in `kept` are slow."""
    return [each if each in kept else _slow(each) for each in values]


def slow_but_at(places: Container[int], values: Iterable[Any]) -> list[Any]:
    """The values, of which all but those at these places (0, 1, ...) are slow."""
    return [each if place in places else _slow(each) for place, each in enumerate(values)]


def _slow(value: Any) -> Any:
    values = value if type(value) is tuple else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
