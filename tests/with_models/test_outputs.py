"""As many outputs of each format as `conftest.py` says."""

from test_message_formats import *  # noqa: F403
