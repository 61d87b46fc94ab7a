"""Importing this module registers everything the package has."""

# ruff: noqa: F401
from . import agent, desk, drafting, evaluators, look, strategies
