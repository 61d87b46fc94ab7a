"""The executor of `--endpoint`: a workflow service runs the episodes."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from insitu.builder import Builder
from insitu.collect.episodes import Attempt
from insitu.collect.executors import Executor
from insitu.registry import LLM, register_executor
from insitu.remote.client import RemoteWorkflow
from insitu.schemas.components import ExecutorBaseConfig


class ServiceExecutorConfig(ExecutorBaseConfig, name="service"):
    """Episodes run in a workflow service (`insitu serve`), as with `--endpoint`."""

    url: str
    """The address of the service; a password in it is its token."""
    timeout: float = 300.0
    """Seconds per attempt."""


class ServiceExecutor(Executor):
    """Runs attempts in a workflow service."""

    def __init__(self, config: ServiceExecutorConfig) -> None:
        self.config = config

    async def check(self, builder: Builder) -> None:
        async with RemoteWorkflow(self.config.url, self.config.timeout) as remote:
            await remote.check(builder.config.trained_llms())

    @asynccontextmanager
    async def open(
        self, builder: Builder, trained: Collection[str] = (), *, reached: bool = False
    ) -> AsyncIterator[Attempt]:
        config = builder.config
        async with RemoteWorkflow(self.config.url, self.config.timeout) as remote:
            if any(config.block(LLM, name).type == "policy" for name in config.names(LLM)):
                remote.policy = await builder.policy_endpoint()
            await remote.check(trained, reached=reached)
            yield remote.attempt


@register_executor(config_type=ServiceExecutorConfig)
async def service_executor(config: ServiceExecutorConfig, builder: Builder) -> AsyncIterator[ServiceExecutor]:
    yield ServiceExecutor(config)
