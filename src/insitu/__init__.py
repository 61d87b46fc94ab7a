"""insitu improves a language model from inside the agent workflow that uses it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.schemas.evaluation import Row as Row
    from insitu.workflow.llms import ModelClient as Model  # noqa: F401

__version__ = "0.1.0"

_LAZY = {"Model": ("insitu.workflow.llms", "ModelClient"), "Row": ("insitu.schemas.evaluation", "Row")}
"""Imported when they are used, so that the command line starts quickly."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'insitu' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
