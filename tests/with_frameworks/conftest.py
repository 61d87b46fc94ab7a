"""The model that all agents are tested with."""

from pathlib import Path

import pytest
from looker import looker

pytest.register_assert_rewrite("harness")


@pytest.fixture(scope="session")
def model() -> Path:
    return looker()
