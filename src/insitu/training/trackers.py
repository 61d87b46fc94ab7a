"""The interface of experiment trackers (`finetuning.report_to`), and the way to the integration that runs them.

A package adds its own with an entry point of the group `insitu.trackers`: NAME = "module:Class". The integration is the
entry point `processes` of the group `insitu.run_followers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from insitu.config import Config
from insitu.errors import ConfigError, PluginError, foreign_errors, install_command, not_found
from insitu.schemas.installed import entry_points

GROUP = "insitu.trackers"
FOLLOWERS = "insitu.run_followers"
KEY = "finetuning.report_to"
PROJECT = "insitu"
"""The project or experiment, if the tracker's own environment variable names none."""


class TrackedRun(NamedTuple):
    """A run as trackers get to know it; `folder` is for their own files. `settings` are those of the file, by key."""

    name: str
    run_id: str
    folder: Path
    settings: dict[str, str | float | bool | None]


class Table(NamedTuple):
    """Texts and numbers by column."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class Step(NamedTuple):
    """What is logged of an epoch; 0 is before training. All numbers are finite."""

    epoch: int
    metrics: dict[str, float]
    tables: dict[str, Table]


class Tracker(ABC):
    """A run of an experiment tracker. Its methods are called one after the other, in a process of the tracker alone."""

    package: ClassVar[str | None] = None
    """What it imports, apart from what insitu needs itself; the package is installed by the extra of insitu `extra`."""
    extra: ClassVar[str | None] = None
    key: ClassVar[str] = KEY
    """The key of the file that asks for it."""
    end_seconds: ClassVar[float] = 10.0
    """How long it may take after the end of a run."""

    @classmethod  # noqa: B027 - optional
    def check(cls, config: Config) -> None:
        """Raises ConfigError if it cannot follow the run of a file."""

    @classmethod
    def server(cls) -> str | None:
        """The URL that it logs to, so that a run can say at once if it cannot be reached; None: none, or unknown."""
        return None

    @abstractmethod
    def start(self, run: TrackedRun, continued: str | None) -> str:
        """Begins a run, or continues the one whose id an earlier call has returned; returns its id."""

    @abstractmethod
    def log(self, step: Step) -> None:
        """Logs an epoch; epochs come in ascending order, each once. Must not return before it is safe."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """Ends the run, which is completed, failed, interrupted, or still running if its process was killed."""


def tracker_class(name: str) -> type[Tracker]:
    """Raises ConfigError if there is no such tracker, and PluginError if it cannot be imported."""
    points = {point.name: point for point in entry_points(GROUP)}
    if name not in points:
        raise ConfigError(not_found(f"{KEY}: the tracker", name, sorted(points)))
    with foreign_errors(PluginError, f"{KEY}: {name} cannot be imported"):
        tracker = points[name].load()
    if not (isinstance(tracker, type) and issubclass(tracker, Tracker)):
        raise PluginError(f"{KEY}: {name} is {tracker!r}, not a Tracker")
    return tracker


def check_trackers(config: Config) -> None:
    """Raises ConfigError for a tracker that does not exist, cannot follow the run, or whose package is missing."""
    if config.finetuning.followers:
        _processes()
    for name in config.finetuning.followers:
        tracker = tracker_class(name)
        tracker.check(config)
        if tracker.package is None:
            continue
        spec = find_spec(tracker.package)
        if spec is None or spec.origin is None:  # a folder of that name, such as W&B's, is no package
            where = f": {install_command(tracker.extra)} in the clone of insitu" if tracker.extra else ""
            raise ConfigError(f"{KEY}: {name} needs the package {tracker.package!r}{where}")


def reported(names: Sequence[str], folder: Path) -> AbstractAsyncContextManager[None]:
    """Trackers follow the run in `folder` while the body runs."""
    return _processes()(names, folder) if names else nullcontext()


def _processes() -> Callable[[Sequence[str], Path], AbstractAsyncContextManager[None]]:
    """Raises ConfigError if the integration that runs trackers is not installed."""
    try:
        processes: Callable[..., Any] = entry_points(FOLLOWERS)["processes"].load()
    except (KeyError, ModuleNotFoundError) as error:
        raise ConfigError(f"{KEY}: this installation of insitu cannot run trackers ({error}); remove the key") from None
    return processes
