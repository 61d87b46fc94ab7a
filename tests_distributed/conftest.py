"""Commands of these tests are forked from a process that has imported everything, as in `tests`."""

from collections.abc import Iterator

import pytest
from processes import fork_server


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    with fork_server():
        yield
