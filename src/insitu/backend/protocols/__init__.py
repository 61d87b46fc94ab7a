"""The HTTP interfaces of the backend, one package each.

A protocol is a module with a function `routes(services) -> list[ApiRoute]`, declared by an entry point of the group
`insitu.backend.protocols`. The server serves the routes of all of them.
"""

from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from insitu.backend import BackendOptions
from insitu.backend.compute import ComputeThread
from insitu.backend.http import ApiRoute
from insitu.backend.inference.sampler import ModelRegistry, Sampler
from insitu.backend.learner.jobs import TrainingQueue
from insitu.backend.learner.learners import Learners
from insitu.backend.model import LoadedModel

GROUP = "insitu.backend.protocols"


@dataclass(frozen=True)
class Services:
    """The parts of a backend, as protocols use them. `models` takes further model names."""

    options: BackendOptions
    loaded: LoadedModel
    compute: ComputeThread
    sampler: Sampler
    learners: Learners
    jobs: TrainingQueue
    models: ModelRegistry
    output_dir: Path


def protocol_routes(services: Services) -> list[ApiRoute]:
    """The routes of all protocols, in the order of their names; one whose module is not installed is left out."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return [route for point in points if is_installed(point.module) for route in point.load()(services)]


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is its package
        return False
