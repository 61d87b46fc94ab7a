"""Agents on models of all families of `tests/support/message_formats.py`."""

import pytest
from message_formats import ALL_FAMILIES
from taught_families import *  # noqa: F403
from taught_families import taught_family


@pytest.fixture(scope="module", params=ALL_FAMILIES)
def taught(request, tmp_path_factory):
    yield from taught_family(request, tmp_path_factory.mktemp("taught"))
