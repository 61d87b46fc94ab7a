"""A Ray cluster: its configuration, what Ray gets, which writes it to files, and what only running workers get."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from insitu.config import Config
from insitu.errors import ConfigError, format_error, needing
from insitu.integrations.ray.worker import EpisodeWorker
from insitu.plugin_api import suppress_logs
from insitu.remote.pool import KEY
from insitu.schemas.components import ExecutorBaseConfig
from insitu.wire.redaction import hide_url_secrets, is_secret_variable, redact, remember_environment

_CONNECT_SECONDS = 5.0
_JOIN_SECONDS = 45.0
_CLIENT_VARIABLES = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "NVIDIA_API_KEY")
"""The variables that llms are configured by."""


class RuntimeEnvConfig(BaseModel):
    """What Ray sets up for the workers, as in its own documentation."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    working_dir: str | None = None
    """A folder that is copied to the workers, in which they run; or the URI of an archive."""
    py_modules: list[str] | None = None
    """Folders of Python packages, or URIs, that workers can import."""
    excludes: list[str] | None = None
    """Files of `working_dir` and `py_modules` that are not copied, as in a .gitignore."""
    pip: list[str] | dict[str, Any] | str | None = None
    """Packages to install, or a requirements file."""
    uv: list[str] | dict[str, Any] | str | None = None
    """The same, installed by uv."""
    conda: dict[str, Any] | str | None = None
    """A conda environment."""
    image_uri: str | None = None
    """A container image."""
    env_vars: dict[str, Annotated[str, Field(coerce_numbers_to_str=True)]] = Field(default_factory=dict)
    """Environment variables. Secrets among them are sent to the running workers instead of being given to Ray, which
    writes them to files."""
    config: dict[str, Any] | None = None
    """Options of the set-up, such as `setup_timeout_seconds`."""

    @field_validator("env_vars")
    @classmethod
    def _remember_secrets(cls, variables: dict[str, str]) -> dict[str, str]:
        remember_environment(variables)
        return variables


class RayExecutorConfig(ExecutorBaseConfig, name="ray"):
    """Episodes run in worker processes on the machines of a Ray cluster."""

    address: str = "auto"
    """Address of the cluster's head, such as `10.0.0.5:6379`; auto: the cluster that this machine belongs to, or that
    the variable RAY_ADDRESS names."""
    workers: int = Field(ge=1)
    """Number of worker processes. They share `eval.general.max_concurrency` episodes equally."""
    cpus_per_worker: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for each worker."""
    runtime_env: RuntimeEnvConfig = Field(default_factory=RuntimeEnvConfig)
    """What Ray sets up for the workers: their files, packages and environment variables."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of environment variables that workers get from this process, besides those that the file refers to."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds to wait for the first worker."""
    max_losses: int = Field(default=3, ge=0)
    """How often an attempt is made again because its worker has ended. After the second loss it gets a worker without
    other episodes, so that an agent that ends its process fails only itself."""


class Cluster(NamedTuple):
    """A connected cluster. `environment` holds the variables that workers are sent once they run."""

    ray: Any
    config: RayExecutorConfig
    environment: dict[str, str]
    working_dir: str | None

    def create_worker(self) -> Any:
        """The handle of a new worker, which runs once the cluster has room for it."""
        options = {"num_cpus": self.config.cpus_per_worker, "max_concurrency": 16, "max_restarts": 0}
        return self.ray.remote(EpisodeWorker).options(**options, scheduling_strategy="SPREAD").remote()

    def room(self) -> int:
        """The workers that the machines of the cluster could run if they ran nothing else."""
        needed = self.config.cpus_per_worker
        if not needed:
            return self.config.workers
        nodes = (node["Resources"].get("CPU", 0) for node in self.ray.nodes() if node["Alive"])
        return min(self.config.workers, int(sum(cpus // needed for cpus in nodes)))


@asynccontextmanager
async def connected(settings: RayExecutorConfig, config: Config) -> AsyncIterator[Cluster]:
    """Raises ConfigError if Ray is not installed, or does not run where the file says."""
    with needing("ray", f"{KEY}: _type ray"):
        import ray
    runtime_env, secrets = _runtime_env(settings, config)
    cluster = Cluster(ray, settings, _environment(settings, config) | secrets, runtime_env.get("working_dir"))
    if ray.is_initialized():  # by the program that uses insitu
        _check_unused(settings.address, ray.get_runtime_context().gcs_address, runtime_env)
        yield cluster
        return
    await _check_address(settings.address)
    try:
        async with asyncio.timeout(_JOIN_SECONDS), suppress_logs("ray"):  # it warns that signals keep their handlers
            await asyncio.to_thread(_connect, ray, settings.address, runtime_env)
    except TimeoutError:  # Ray tries again for ever if another server answers
        raise _wrong_address(settings.address, f"where no Ray cluster answers within {_JOIN_SECONDS:g} s") from None
    try:
        _take_signals_back()
        yield cluster
    finally:
        await asyncio.to_thread(ray.shutdown)


def _check_unused(address: str, connected_to: str, runtime_env: dict[str, Any]) -> None:
    """Raises ConfigError for settings that only `ray.init` takes, once it has been called.

    `working_dir` is also where workers look for the files of the program.
    """
    if address not in ("auto", connected_to):
        problem = f"but this process has called ray.init, which connected to {connected_to}"
        raise ConfigError(f"{KEY}.address is {address!r}, {problem}: leave address out")
    if unused := runtime_env.keys() - {"working_dir"}:
        keys = ", ".join(f"{KEY}.runtime_env.{name}" for name in sorted(unused))
        raise ConfigError(f"{keys}: this process has called ray.init: give it the runtime_env there, or do not call it")


def _connect(ray: Any, address: str, runtime_env: dict[str, Any]) -> None:
    """In a thread other than the main one, where Ray leaves the handlers of signals alone."""
    try:
        ray.init(address=address, runtime_env=runtime_env or None, configure_logging=False)
    except ConnectionError as error:
        raise _wrong_address(address, f"but no Ray cluster can be reached there ({brief(error)})") from error
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise ConfigError(f"{KEY}: Ray refuses the address or runtime_env: {brief(error)}") from error


def _take_signals_back() -> None:
    """Installs Python's handlers again: Ray has replaced that of SIGTERM by one that ends the process."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.getsignal(number))


def _wrong_address(address: str, problem: str) -> ConfigError:
    advice = "start a Ray cluster (ray start --head), or set the address of its head, as that prints it"
    return ConfigError(f"{KEY}.address is {address!r}, {problem}: {advice}")


def brief(error: Exception) -> str:
    """Ray's messages are long; their first sentences say what has happened."""
    return redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


async def _check_address(address: str) -> None:
    """Raises ConfigError if nothing listens at an address: Ray would try for a minute, and end the process."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address.startswith("ray://"):
        advice = "run insitu on a machine of the cluster (ray job submit), with address auto"
        raise ConfigError(f"{KEY}.address is {address!r}: the Ray Client protocol cannot carry episodes; {advice}")
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{KEY}.address is {address!r}; expected auto, or host:port such as 10.0.0.5:6379")
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
    except (OSError, TimeoutError, OverflowError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else format_error(error)
        if isinstance(error, socket.gaierror):
            reason = "no such host"
        raise _wrong_address(address, f"but nothing can be reached there ({reason})") from error


def _runtime_env(settings: RayExecutorConfig, config: Config) -> tuple[dict[str, Any], dict[str, str]]:
    """What Ray gets, and the secrets among the environment variables, which it does not get.

    Ray writes its runtime environments to the logs of the session, and shows them on its dashboard.
    """
    runtime_env = settings.runtime_env.model_dump(exclude_none=True)
    variables = runtime_env.pop("env_vars")
    secrets = {name: v for name, v in variables.items() if is_secret_variable(name, v) or redact(v) != v}
    if public := {name: value for name, value in variables.items() if name not in secrets}:
        runtime_env["env_vars"] = public
    for key, value in runtime_env.items():
        text = str(value)
        if redact(text) != text or hide_url_secrets(text) != text:
            advice = "put the secret into a variable of the nodes' environment, or of env_vars"
            raise ConfigError(f"{KEY}.runtime_env.{key} holds a secret, and Ray writes it to files: {advice}")
    folder = runtime_env.get("working_dir")
    if folder is not None and "://" not in folder:
        runtime_env["working_dir"] = str(config.find_path(Path(folder), f"{KEY}.runtime_env.working_dir").resolve())
    return runtime_env, secrets


def _environment(settings: RayExecutorConfig, config: Config) -> dict[str, str]:
    """Variables of this process that workers are sent."""
    if missing := [name for name in settings.pass_env if name not in os.environ]:
        raise ConfigError(f"{KEY}.pass_env names {', '.join(missing)}: no such environment variable")
    names = {*config.variables, *settings.pass_env, *_CLIENT_VARIABLES}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}
