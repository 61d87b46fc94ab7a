"""What a worker needs in order to run a workflow, as plain data: the file's contents and where the policy is served."""

import hashlib
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from insitu.config import Config, check_config
from insitu.errors import ConfigError
from insitu.registry import LLM
from insitu.remote.attempt_records import ServedPolicy
from insitu.wire.http_access import is_loopback_address
from insitu.wire.http_format import encode


class Target(BaseModel):
    """A server that workers must be able to reach, and the key of the file that says where it is."""

    key: str
    base_url: str

    def unreachable(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self.key}: the model is served at {self.base_url}, which is out of reach from there ({problem}): serve "
            "it at an address that all nodes of the cluster can reach (insitu backend --host) and set url or base_url "
            "to that"
        )


class Opening(BaseModel):
    """A workflow to be opened by a worker.

    `data` is the content of the file at `path`, before its variables are expanded. `shipped_path` is its place in the
    copy of the working directory that the cluster has sent to the worker, if it has. Without `build` the file is only
    loaded.
    """

    id: str
    data: dict[str, Any]
    path: str
    directory: str
    shipped_path: str | None = None
    policy: ServedPolicy | None = None
    targets: list[Target] = []
    build: bool = True

    def check_host(self, host: str) -> None:
        """Raises ConfigError if a server is only at a loopback address, which on another machine is another one's."""
        for target in self.targets:
            if host != this_host() and is_loopback_address(urlsplit(target.base_url).hostname or ""):
                raise target.unreachable("that is another machine's address of itself")


def this_host() -> str:
    """The name of this machine, or of this container."""
    return socket.gethostname()


def opening_of(config: Config, policy: ServedPolicy | None, working_dir: str | None) -> Opening:
    """Raises ConfigError for a configuration that was not read from a file."""
    if config.data is None:
        raise ConfigError(
            "general.executor: the configuration was made in Python; only one that was read from a file can be sent to "
            "workers"
        )
    path = Path(config.source).resolve()
    shipped = None
    if working_dir is not None and path.is_relative_to(Path(working_dir).resolve()):
        shipped = str(path.relative_to(Path(working_dir).resolve()))
    general = {key: value for key, value in (config.data.get("general") or {}).items() if key != "executor"}
    fields: dict[str, Any] = {
        "data": {**config.data, "general": general},
        "path": str(path),
        "directory": os.getcwd(),
        "shipped_path": shipped,
        "policy": policy and policy.unversioned,
        "targets": targets_of(config, policy),
    }
    return Opening(id=hashlib.blake2b(encode(fields), digest_size=12).hexdigest(), **fields)


def targets_of(config: Config, policy: ServedPolicy | None) -> list[Target]:
    """The servers of the model under training, with the keys that say where they are."""
    targets = []
    if policy is not None:
        targets.append(Target(key=f"trainer_adapters.{config.finetuning.trainer_adapter}", base_url=policy.base_url))
    for name in sorted(config.trained_llms()) if config.finetuning.enabled else ():
        url = getattr(config.block(LLM, name), "base_url", None)
        if url is not None and policy is None:
            targets.append(Target(key=f"llms.{name}.base_url", base_url=url))
    return targets


def read_config(opening: Opening) -> Config:
    """The configuration of a workflow, on a worker. Relative paths mean there what they mean to the driver."""
    if opening.shipped_path is not None:
        path = Path.cwd() / opening.shipped_path
    else:
        path = Path(opening.path)
        if os.path.isdir(opening.directory):
            os.chdir(opening.directory)
    return check_config(opening.data, path)
