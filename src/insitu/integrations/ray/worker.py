"""A worker: a process on a machine of the cluster that starts workflow services, as `insitu serve` does.

    worker = EpisodeWorker()
    await worker.start(environment, "10.0.0.5")         # {"host": ..., "pid": ..., "token": ...}
    await worker.open(encode(opening))                  # {"url": ...}, or {"error": "...", "in_file": True}

All arguments and results are plain data. The methods run in the caller's event loop; workflows run in a loop and a
thread of the worker, so that it answers even while an agent blocks them.
"""

import asyncio
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
from contextlib import AsyncExitStack, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel

from insitu import __version__
from insitu.config import Config, check_config
from insitu.errors import ConfigError, InsituError, PluginError, describe_error
from insitu.remote.attempt_records import ServedPolicy
from insitu.remote.client import TOKEN_VARIABLE
from insitu.remote.pool import KEY
from insitu.remote.service import WorkflowService
from insitu.wire.addresses import is_loopback_address
from insitu.wire.http_access import AccessPolicy
from insitu.wire.json_values import encode
from insitu.wire.open_files import raise_file_limit
from insitu.wire.redaction import redact, redact_stream, remember_environment, remember_secret
from insitu.workflow.event_loop import loop_in_thread, new_loop, run_in_loop
from insitu.workflow.programs import kill_programs

logger = logging.getLogger(__name__)

_REACH_SECONDS = 10.0
_CLOSE_SECONDS = 8.0
"""How long attempts and workflows may take to end."""


class Target(BaseModel):
    """A server that workers must be able to reach, and the key of the file that says where it is."""

    key: str
    base_url: str

    def unreachable(self, problem: str) -> ConfigError:
        where = f"the model is served at {self.base_url}, which is out of reach from there ({problem})"
        advice = "serve it at an address that all nodes of the cluster can reach (insitu backend --host)"
        return ConfigError(f"{self.key}: {where}: {advice} and set url or base_url to that")


class Opening(BaseModel):
    """A workflow to be opened by a worker.

    `data` is the content of the file at `path`, before its variables are expanded. `shipped_path` is its place in the
    copy of the working directory that the cluster has sent to the worker, if it has. Without `build` the file is only
    loaded.
    """

    id: str = ""
    data: dict[str, Any]
    path: str
    directory: str
    shipped_path: str | None = None
    policy: ServedPolicy | None = None
    targets: list[Target] = []
    build: bool = True

    @classmethod
    def of(cls, config: Config, policy: ServedPolicy | None, working_dir: str | None) -> "Opening":
        """Raises ConfigError for a configuration that was not read from a file."""
        if config.data is None:
            problem = "the configuration was made in Python; only one that was read from a file can be sent to workers"
            raise ConfigError(f"{KEY}: {problem}")
        path = Path(config.source).resolve()
        shipped = None
        if working_dir is not None and path.is_relative_to(folder := Path(working_dir).resolve()):
            shipped = str(path.relative_to(folder))
        general = {key: value for key, value in (config.data.get("general") or {}).items() if key != "executor"}
        opening = cls(
            data={**config.data, "general": general},
            path=str(path),
            directory=os.getcwd(),
            shipped_path=shipped,
            policy=policy and policy.unversioned,
            targets=_targets(config, policy),
        )
        return opening.model_copy(update={"id": hashlib.blake2b(encode(opening), digest_size=12).hexdigest()})

    def check_host(self, host: str) -> None:
        """Raises ConfigError if a server is only at a loopback address, which on another machine is another one's."""
        for target in self.targets:
            if host != socket.gethostname() and is_loopback_address(urlsplit(target.base_url).hostname or ""):
                raise target.unreachable("that is another machine's address of itself")

    def config(self) -> Config:
        """The configuration, on a worker. Relative paths mean there what they mean to the driver."""
        if self.shipped_path is not None:
            return check_config(self.data, Path.cwd() / self.shipped_path)
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        return check_config(self.data, Path(self.path))


def _targets(config: Config, policy: ServedPolicy | None) -> list[Target]:
    """The servers of the model under training, with the keys that say where they are."""
    if policy is not None:
        return [Target(key=f"trainer_adapters.{config.finetuning.trainer_adapter}", base_url=policy.base_url)]
    names = sorted(config.trained_llms()) if config.finetuning.enabled else []
    urls = {name: config.llm(name).request_settings().get("base_url") for name in names}
    return [Target(key=f"llms.{name}.base_url", base_url=url) for name, url in urls.items() if url is not None]


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
        return {"insitu": __version__, "host": socket.gethostname(), "pid": os.getpid(), "token": token}

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
            config = opening.config()
        except (ConfigError, PluginError) as error:
            problems = "; ".join(line.strip() for line in str(error).splitlines()).replace(":;", ":")
            advice = f"what the workflow imports must be installed on every node, or be shipped by {KEY}.runtime_env"
            raise ConfigError(f"the file cannot be loaded there: {problems} ({advice})") from error
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
    """Raises ConfigError unless the server answers requests from here, and has the model of the policy."""
    headers = {"Authorization": f"Bearer {policy.api_key if policy is not None else 'none'}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REACH_SECONDS), headers=headers) as session,
            session.get(f"{target.base_url.rstrip('/')}/models") as response,
        ):
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise target.unreachable(f"{type(error).__name__}: {error}") from error
    if status >= 500:
        raise target.unreachable(f"it answers with status {status}")
    if status < 400 and policy is not None and policy.model and not _lists(body, policy.model):
        raise target.unreachable(f"another server answers there: it has no model {policy.model!r}")


def _lists(body: bytes, model: str) -> bool:
    """Whether a list of models, as servers of the OpenAI API give it, has this one; true if it is something else."""
    try:
        names = [entry["id"] for entry in json.loads(body)["data"]]
    except (ValueError, TypeError, KeyError):
        return True
    return model in names
