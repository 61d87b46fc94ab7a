"""Agents on models of two families, one with special tokens; `make test WITH=models` has all families."""

import pytest
from marks import slow_after
from taught_families import *  # noqa: F403
from taught_families import taught_family


@pytest.fixture(scope="module", params=slow_after(1, ["hermes", "gpt_oss"]))
def taught(request, tmp_path_factory):
    yield from taught_family(request, tmp_path_factory.mktemp("taught"))
