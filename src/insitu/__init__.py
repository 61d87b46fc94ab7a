"""insitu improves a language model from inside the agent workflow that uses it."""

TYPE_CHECKING = False  # for type checkers it is true; importing it from typing takes as long as all below

if TYPE_CHECKING:
    from insitu.api.calls import evaluate as evaluate
    from insitu.api.calls import finetune as finetune
    from insitu.api.results import Evaluation as Evaluation
    from insitu.api.results import Run as Run
    from insitu.collect.scores import Score as Score
    from insitu.errors import BackendError as BackendError
    from insitu.errors import BackendUnavailable as BackendUnavailable
    from insitu.errors import CaptureError as CaptureError
    from insitu.errors import ConfigError as ConfigError
    from insitu.errors import EpisodeTimeout as EpisodeTimeout
    from insitu.errors import InputError as InputError
    from insitu.errors import InsituError as InsituError
    from insitu.errors import JobFailed as JobFailed
    from insitu.errors import JobLost as JobLost
    from insitu.errors import PluginError as PluginError
    from insitu.errors import RequestRefused as RequestRefused
    from insitu.errors import Stalled as Stalled
    from insitu.errors import TrajectoryError as TrajectoryError
    from insitu.errors import UnknownJob as UnknownJob
    from insitu.errors import WorkflowError as WorkflowError
    from insitu.schemas.evaluation import Row as Row
    from insitu.workflow.llms import ModelClient as Model  # noqa: F401

__version__ = "0.1.0"

_LAZY = {
    "Evaluation": ("insitu.api.results", "Evaluation"),
    "Model": ("insitu.workflow.llms", "ModelClient"),
    "Row": ("insitu.schemas.evaluation", "Row"),
    "Run": ("insitu.api.results", "Run"),
    "Score": ("insitu.collect.scores", "Score"),
    "evaluate": ("insitu.api.calls", "evaluate"),
    "finetune": ("insitu.api.calls", "finetune"),
}
"""Imported when they are used, so that the command line and programs that import insitu start quickly."""


def _places() -> dict[str, tuple[str, str]]:
    """By name, the module and its attribute: those of `_LAZY`, and all exceptions."""
    import insitu.errors as errors

    kinds = [name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)]
    return _LAZY | {name: (errors.__name__, name) for name in kinds}


def __getattr__(name: str) -> object:
    places = _places()
    if name not in places:
        raise AttributeError(f"module 'insitu' has no attribute {name!r}; it has: {', '.join(sorted(places))}")
    from importlib import import_module

    module, attribute = places[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_places()])
