"""A worker: a process on a machine of the cluster that starts workflow services, as `insitu serve` does.

    worker = EpisodeWorker()
    await worker.start(environment, "10.0.0.5")         # {"host": ..., "pid": ..., "token": ...}
    await worker.open(opening)                          # {"url": ...}, or {"error": "...", "in_file": True}

All arguments and results are plain data. The methods run in the caller's event loop; workflows run in a loop and a
thread of the worker, so that it answers even while an agent blocks them.
"""

import asyncio
import json
import logging
import os
import secrets
import socket
import sys
from contextlib import AsyncExitStack, ExitStack, nullcontext
from typing import Any

import aiohttp

from insitu import __version__
from insitu.collect.event_loop import loop_in_thread, new_loop, run_in_loop
from insitu.errors import ConfigError, InsituError, PluginError, describe_error
from insitu.gateway.programs import kill_programs
from insitu.integrations.ray.openings import Opening, Target, read_config, this_host
from insitu.remote.attempt_records import ServedPolicy
from insitu.remote.client import TOKEN_VARIABLE
from insitu.remote.service import WorkflowService
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_server import raise_file_limit
from insitu.wire.redaction import redact, redact_stream, remember_environment, remember_secret

logger = logging.getLogger(__name__)

_REACH_SECONDS = 10.0
_CLOSE_SECONDS = 8.0
"""How long attempts and workflows may take to end."""


class EpisodeWorker:
    """Serves the workflows that it has opened, each at a port of this machine."""

    def __init__(self) -> None:
        self._loop, _ = new_loop()
        self._thread = ExitStack()
        self._thread.enter_context(loop_in_thread(self._loop, "insitu-worker"))
        self._stack = AsyncExitStack()
        self._services: dict[str, tuple[WorkflowService, str]] = {}
        """With their addresses."""
        self._address = "127.0.0.1"
        self._access = AccessPolicy()

    async def start(self, environment: dict[str, str], client: str = "127.0.0.1") -> dict[str, Any]:
        """Sets environment variables, among them secrets, which then appear in no output of this process.

        The services listen at the address of this machine that `client`, the address of another, can reach.
        """
        os.environ.update(environment)
        remember_environment(os.environ)
        redact_stream(sys.stdout)
        redact_stream(sys.stderr)
        raise_file_limit()
        token = secrets.token_urlsafe(32)
        self._address = _address_towards(client)
        self._access = AccessPolicy.of(self._address, token, variable=TOKEN_VARIABLE)
        return {
            "insitu": __version__,
            "python": sys.version.split()[0],
            "host": this_host(),
            "pid": os.getpid(),
            "token": token,
        }

    async def open(self, opening: bytes) -> dict[str, Any]:
        """Loads a file, checks that its policy can be reached, builds its workflow, and serves it.

        Returns the error if that fails, and whether it is the file's.
        """
        return await run_in_loop(self._loop, self._open(Opening.model_validate_json(opening)))

    async def ping(self) -> None:
        """Fails if the process has ended."""

    async def close(self) -> None:
        """Ends all attempts, closes the workflows, and kills the programs of external agents."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await run_in_loop(self._loop, self._stack.aclose())
        except TimeoutError:
            logger.warning("the workflows of a worker did not end within %g s", _CLOSE_SECONDS)
        kill_programs()

    async def _open(self, opening: Opening) -> dict[str, Any]:
        policy = opening.policy
        if policy is not None:
            remember_secret(policy.api_key)
        try:
            if opening.id not in self._services:
                await self._serve(opening)
            service, url = self._services[opening.id]
            for target in opening.targets:
                await _reach(target, policy)
            if opening.build and (policy is None or policy.model):  # otherwise its name is known when an episode begins
                async with service.hosted.workflow(policy):
                    pass
        except Exception as error:  # building runs user code
            text = str(error) if isinstance(error, InsituError) else describe_error(error)
            return {"error": redact(text), "in_file": isinstance(error, ConfigError)}
        return {"url": url}

    async def _serve(self, opening: Opening) -> None:
        try:
            config = read_config(opening)
        except (ConfigError, PluginError) as error:
            problems = "; ".join(line.strip() for line in str(error).splitlines()).replace(":;", ":")
            raise ConfigError(
                f"the file cannot be loaded there: {problems} (what the workflow imports must be installed on every "
                "node, or be shipped by general.executor.runtime_env)"
            ) from error
        urls = [opening.policy.base_url] if opening.policy is not None else []
        service = WorkflowService(config, lambda _: nullcontext(), self._access, urls)
        self._services[opening.id] = service, await self._stack.enter_async_context(service.listening(self._address, 0))


def _address_towards(client: str) -> str:
    """The address of this machine from which it reaches another one; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in client else socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((client, 9))
        address: str = route.getsockname()[0]
        return address


async def _reach(target: Target, policy: ServedPolicy | None) -> None:
    """Raises ConfigError unless the server answers requests from here."""
    key = policy.api_key if policy is not None else "none"
    timeout = aiohttp.ClientTimeout(total=_REACH_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {key}"}) as session:
            async with session.get(f"{target.base_url.rstrip('/')}/models") as response:
                status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if status < 400 and policy is not None and policy.model and not _lists(body, policy.model):
            problem = f"another server answers there: it has no model {policy.model!r}"
        elif status < 500:
            return
        else:
            problem = f"it answers with status {status}"
    raise target.unreachable(problem)


def _lists(body: bytes, model: str) -> bool:
    """Whether a list of models, as servers of the OpenAI API give it, has this one; true if it is something else."""
    try:
        names = [entry["id"] for entry in json.loads(body)["data"]]
    except (ValueError, TypeError, KeyError):
        return True
    return model in names
