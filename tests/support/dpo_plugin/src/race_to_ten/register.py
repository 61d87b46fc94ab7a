"""Registers what the file names."""

from . import game, moves, pairs  # noqa: F401
