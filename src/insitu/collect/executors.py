"""What runs the attempts at the episodes of a run: this process, or what `general.executor` says."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from insitu.builder import Builder
from insitu.collect.episodes import Attempt, in_process
from insitu.registry import register_executor
from insitu.schemas.components import ExecutorBaseConfig


class Executor(ABC):
    """Runs attempts at episodes of the workflows of a run; a run has one, which its evaluations share."""

    def __init__(self) -> None:
        self.stray_completions = Counter[str]()
        """Completions that workflows in other processes have requested outside every episode, by key of `llms`."""
        self.outside_completions = Counter[str]()
        """Completions requested outside every episode, by URL of the server."""

    @property
    def lost_workers(self) -> int:
        """How many processes have ended without saying what their episodes had requested."""
        return 0

    async def check(self, builder: Builder) -> None:
        """Raises ConfigError or BackendError if no episode could be run; called before anything else is started."""
        return

    @abstractmethod
    def open(
        self, builder: Builder, trained: Collection[str] = (), *, reached: bool = False
    ) -> AbstractAsyncContextManager[Attempt]:
        """Attempts that run the workflow of `builder`'s file, with the policy that `builder` knows.

        `trained` names the llms whose calls are trained. `reached`: `check` has succeeded before. Raises
        BackendUnavailable, ConfigError or RequestRefused if no episode can be run.
        """


class LocalExecutorConfig(ExecutorBaseConfig, name="local"):
    """Episodes run in this process, as they do without the block."""


class LocalExecutor(Executor):
    """Runs attempts in this event loop."""

    @asynccontextmanager
    async def open(
        self, builder: Builder, trained: Collection[str] = (), *, reached: bool = False
    ) -> AsyncIterator[Attempt]:
        yield in_process(await builder.get_workflow())


@register_executor(config_type=LocalExecutorConfig)
async def local_executor(config: LocalExecutorConfig, builder: Builder) -> AsyncIterator[LocalExecutor]:
    yield LocalExecutor()
