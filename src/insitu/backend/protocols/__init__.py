"""The HTTP interfaces of the backend, one package each.

A protocol is a package in this folder with a function `routes(services) -> list[ApiRoute]`. The server serves the
routes of every package it finds here; adding or deleting a folder adds or removes a protocol.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from insitu.backend import BackendOptions
from insitu.backend.compute import ComputeThread
from insitu.backend.http import ApiRoute
from insitu.backend.inference.model_names import ModelRegistry
from insitu.backend.inference.sampler import Sampler
from insitu.backend.model import LoadedModel
from insitu.backend.training.jobs import TrainingQueue
from insitu.backend.training.learners import Learners


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
    """The routes of all protocols, in the order of their names."""
    names = sorted(module.name for module in iter_modules(__path__) if module.ispkg)
    return [route for name in names for route in import_module(f"{__name__}.{name}").routes(services)]
