"""What a bug report needs to know of a machine: versions, processors, memory, GPUs and optional programs."""

import importlib.metadata
import platform
import re
import shutil
from dataclasses import dataclass
from importlib.util import find_spec

from insitu import __version__
from insitu.disk.memory import machine_memory
from insitu.disk.processor import usable_cores
from insitu.errors import ConfigError, format_error
from insitu.gateway.bubblewrap import find_bubblewrap

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;]*(?:;.*extra == [\"'](?P<extra>[\w-]+)[\"'])?")
_PROGRAMS = ("bwrap", "docker", "podman", "node")


@dataclass(frozen=True, slots=True)
class Environment:
    insitu: str
    python: str
    platform: str
    cores: int
    memory: int | None
    """Bytes of the machine, or of the control group that this process is in."""
    packages: dict[str, str]
    """The versions of what insitu and its extras need, as far as it is installed."""
    gpus: list[str]
    programs: dict[str, str]
    """Optional programs, each with `found`, `not found`, or why it cannot be used."""


def this_environment() -> Environment:
    """Imports torch if it is installed, and nothing else of the backend."""
    memory = machine_memory()
    return Environment(
        insitu=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        cores=usable_cores(),
        memory=memory.total if memory is not None else None,
        packages=_packages(),
        gpus=_gpus(),
        programs={name: _state_of(name) for name in _PROGRAMS},
    )


def _packages() -> dict[str, str]:
    versions = {}
    for line in importlib.metadata.requires("insitu") or ():
        requirement = _REQUIREMENT.match(line)
        if requirement is None or requirement["extra"] == "dev" or requirement["name"] == "insitu":
            continue
        try:
            versions[requirement["name"].lower()] = importlib.metadata.version(requirement["name"])
        except importlib.metadata.PackageNotFoundError:
            continue
    return dict(sorted(versions.items()))


def _gpus() -> list[str]:
    if find_spec("torch") is None:
        return []
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [f"{torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}" for index in range(count)]
    except Exception as error:  # an installation of torch that is broken is what the report is about
        return [f"unknown, torch cannot be used: {format_error(error)}"]


def _state_of(program: str) -> str:
    if shutil.which(program) is None:
        return "not found"
    try:
        if program == "bwrap":
            find_bubblewrap()
    except ConfigError as error:
        return f"found, but {error}"
    return "found"
