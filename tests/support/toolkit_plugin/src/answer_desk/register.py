"""Importing this module registers everything the package has."""

# ruff: noqa: F401
from . import agent, audit, desk, drafting, evaluators, look, shop, strategies, training
