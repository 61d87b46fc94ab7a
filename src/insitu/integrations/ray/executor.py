"""The executor `_type: ray`: attempts at episodes run in workflow services on the machines of a Ray cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from insitu import __version__
from insitu.builder import Builder
from insitu.collect.episodes import Attempt
from insitu.config import Config
from insitu.errors import BackendError, ConfigError, InsituError, PluginError
from insitu.integrations.ray.cluster import Cluster, RayExecutorConfig, brief, connected
from insitu.integrations.ray.worker import Opening
from insitu.registry import register_executor
from insitu.remote.attempt_records import Counts, ServedPolicy
from insitu.remote.client import ServiceLost, ServiceSession
from insitu.remote.executor import RemoteExecutor, policy_of_run
from insitu.remote.pool import KEY, RemoteService, ServicePool
from insitu.wire.json_values import encode

_CLOSE_SECONDS = 12.0
_MOST_FAILED_STARTS = 3
_CAUSE_SECONDS = 5.0
"""How long Ray may take to say why a worker has ended."""


class RayWorker(RemoteService):
    """A worker process on the cluster, with a session for each workflow that it serves."""

    name = "a worker that has not started"

    def __init__(self, cluster: Cluster, capacity: int, count: Callable[[Counts], object]) -> None:
        super().__init__(capacity)
        self._cluster = cluster
        self._count = count
        self._actor = cluster.create_worker()
        self._host = self._token = ""

    async def start(self) -> None:
        about = await self._call("start", self._cluster.environment, self._cluster.ray.util.get_node_ip_address())
        self._host, self._token = about["host"], about["token"]
        self.name = f"the worker with pid {about['pid']} on {about['host']}"
        if about["insitu"] != __version__:
            problem = f"{self.name} has insitu {about['insitu']}, but this process has {__version__}"
            raise ConfigError(f"{KEY}: {problem}: use one release everywhere")

    async def open(self, workflow: str, description: Opening) -> None:
        try:
            description.check_host(self._host)
            report = await self._call("open", encode(description))
            if "error" in report:
                raise (ConfigError if report["in_file"] else PluginError)(report["error"])
        except (ConfigError, PluginError) as error:
            raise type(error)(f"{KEY}: {self.name}: {error}") from None
        url = report["url"].replace("://", f"://:{self._token}@")
        self.sessions[workflow] = await self.connect(ServiceSession(url, self.name, self.note_lost, self._count))

    async def until_lost(self) -> str:
        """Asks Ray, which knows whether the process was killed, and by whom."""
        reason = await super().until_lost()
        try:
            await asyncio.wait_for(self._call("ping"), _CAUSE_SECONDS)
        except (TimeoutError, InsituError) as error:
            reason = str(error) or reason
        return reason

    async def close(self, *, gently: bool) -> None:
        """Ends the process; `gently`: after its attempts and workflows have."""
        await super().close(gently=gently)
        if gently:
            with suppress(TimeoutError, InsituError):
                await asyncio.wait_for(self._call("close"), _CLOSE_SECONDS)
        await asyncio.to_thread(self._cluster.ray.kill, self._actor)

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Raises ServiceLost if the process has ended."""
        exceptions = self._cluster.ray.exceptions
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except exceptions.RayTaskError as error:
            raise InsituError(f"{self.name} failed to {method}: {brief(error)}: this is a fault of insitu") from error
        except exceptions.RayError as error:
            raise ServiceLost(brief(error)) from error


@register_executor(config_type=RayExecutorConfig)
class RayExecutor(RemoteExecutor):
    """Runs attempts on the workers of a Ray cluster, which it connects to when it is first used."""

    def __init__(self, config: RayExecutorConfig, builder: Builder) -> None:
        super().__init__(ServicePool("worker", _MOST_FAILED_STARTS), config.max_losses)
        self.config = config
        self._builder = builder
        self._stack = AsyncExitStack()
        self._cluster: Cluster | None = None
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        """Ends the workers and disconnects."""
        await self._stack.aclose()

    async def check(self, builder: Builder) -> None:
        """Has one worker load the file."""
        one = RayExecutor(self.config.model_copy(update={"workers": 1}), builder)
        try:
            await one._open(None, loads_only=True)
        finally:
            await one.close()

    @asynccontextmanager
    async def open(
        self, builder: Builder, trained: Collection[str] = (), *, reached: bool = False
    ) -> AsyncIterator[Attempt]:
        policy = await policy_of_run(builder)
        yield partial(self.attempt, await self._open(policy(), builder.config), policy)

    async def _open(self, policy: ServedPolicy | None, file: Config | None = None, *, loads_only: bool = False) -> str:
        """Opens the workflow of a file on the workers; returns its id."""
        config, workers = self._builder.config, self.config.workers
        async with self._connecting:
            if self._cluster is None:
                cluster = await self._stack.enter_async_context(connected(self.config, config))
                self._stack.push_async_callback(self.pool.close)
                capacity = -(-config.max_concurrency // workers)
                self.pool.starters = [partial(RayWorker, cluster, capacity, self.stray_completions.update)] * workers
                self._cluster = cluster
        opening = Opening.of(file or config, policy, self._cluster.working_dir)
        if loads_only:
            opening = opening.model_copy(update={"build": False, "targets": []})
        limit, room = self.config.start_timeout, await asyncio.to_thread(self._cluster.room)
        if not await self.pool.open(opening.id, opening, max(room, 1), limit):
            problem = f"the machines of the cluster have room for {room} of {workers} workers"
            raise BackendError(f"{KEY}: no worker has started within start_timeout: {limit:g} s; {problem}")
        return opening.id
