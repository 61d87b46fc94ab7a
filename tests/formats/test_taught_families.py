"""Agents on models of two families, one with special tokens; `make test WITH=models` has all families."""

import pytest
from taught_families import *  # noqa: F403
from taught_families import taught_family

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["hermes", "gpt_oss"])
def taught(request, tmp_path_factory):
    yield from taught_family(request, tmp_path_factory.mktemp("taught"))
