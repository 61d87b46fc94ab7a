"""Tic-tac-toe for a language model; importing the package registers the workflow and its evaluators."""

from tic_tac_toe import evaluators, workflow

__all__ = ["evaluators", "workflow"]
