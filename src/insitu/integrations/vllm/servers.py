"""The vLLM servers that the backend starts: their command, their log, and their end."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from insitu.backend import SAMPLER_KEY_VARIABLE, TOKEN_VARIABLE
from insitu.backend.model import LoadedModel, base_and_adapter
from insitu.disk.gguf_files import is_gguf
from insitu.disk.model_files import OPTIMIZER_FILE
from insitu.errors import BackendError, install_command
from insitu.schemas.backend_processes import SamplerOptions
from insitu.wire.child_process import ChildProcess

ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allows as the maximum rank of adapters."""


_LOOK_SECONDS = 60.0


class StartedServer:
    """A vLLM server on a socket that only this user can connect to; it ends with this process."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.socket = Path(tempfile.mkdtemp(prefix="insitu-vllm-")) / "socket"
        self._command = [*command, "--uds", str(self.socket)]
        self._environment = environment
        self._log = log
        self._process: ChildProcess | None = None

    def start(self) -> None:
        """Starts it, again if it has ended; it takes a minute or more until it responds."""
        self.kill()
        self.socket.unlink(missing_ok=True)
        self._process = ChildProcess(self._command, self._log, self._environment, bound=True)

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.ended

    def exit_report(self) -> str | None:
        """How it ended, with the end of its log; None while it runs."""
        if self._process is None or not self.ended:
            return None
        return f"{self.name} {self._process.outcome()}; {self._process.end_of_log()}"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.socket.parent, ignore_errors=True)


@contextlib.contextmanager
def model_files(folder: Path, links: Path) -> Iterator[str]:
    """A folder for vLLM to load a model from, see `link_model`; the links are deleted afterwards."""
    try:
        yield str(link_model(folder.resolve() if folder.exists() else folder, links))
    finally:
        shutil.rmtree(links, ignore_errors=True)


def link_model(folder: Path, links: Path) -> Path:
    """A model's folder; for a checkpoint, `links`, which gets links to its files without the optimizer's state.

    vLLM takes every file of tensors for weights.
    """
    if not (folder / OPTIMIZER_FILE).is_file():
        return folder
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir(parents=True)
    for path in folder.resolve().iterdir():
        if path.name != OPTIMIZER_FILE:
            (links / path.name).symlink_to(path)
    return links


def started_servers(
    options: SamplerOptions, loaded: LoadedModel, max_length: int, adapter_rank: int | None, folder: Path
) -> list[StartedServer]:
    """The servers of the options, not yet started: one for each `tensor_parallel` GPUs; they log into `folder`."""
    python = _python_with_vllm(options)
    size = options.tensor_parallel
    groups = [options.gpus[at : at + size] for at in range(0, len(options.gpus), size)] if options.gpus else [None]
    model = base_and_adapter(loaded.source)[0]
    if is_gguf(model):
        raise BackendError(f"sampler: vLLM is not given GGUF files such as {model}; save the model as a folder first")
    model = str(link_model(Path(model), folder / "vllm" / "model"))
    settings = _settings(options, model, loaded, max_length, adapter_rank)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *_arguments(settings)]
    servers = []
    for index, gpus in enumerate(groups):
        name = "the vLLM server" if len(groups) == 1 else f"vLLM server {index}"
        log = folder / ("vllm.log" if len(groups) == 1 else f"vllm.{index}.log")
        servers.append(StartedServer(name, command, _environment(gpus), log))
    return servers


def _python_with_vllm(options: SamplerOptions) -> str:
    """Raises BackendError if there is none."""
    if options.python is None:
        if importlib.util.find_spec("vllm") is None:
            here = f"the Python of the backend ({install_command('vllm')}, or name another Python with the key python)"
            raise BackendError(f"sampler: vllm is not installed in {here}")
        return sys.executable
    python = str(Path(options.python).expanduser())
    look = "import importlib.util, sys; sys.exit(3 * (importlib.util.find_spec('vllm') is None))"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, check=False, timeout=_LOOK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"sampler.python: {python} cannot be run: {error}") from error
    if done.returncode:
        why = "has no vllm" if done.returncode == 3 else f"fails: {done.stderr.decode(errors='replace').strip()[-200:]}"
        raise BackendError(f"sampler.python: {python} {why}")
    return python


def _settings(
    options: SamplerOptions, model: str, loaded: LoadedModel, max_length: int, adapter_rank: int | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": model,
        "served-model-name": "base",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "max-model-len": max_length,
        "tensor-parallel-size": options.tensor_parallel,
        "enable-scale-out": True,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": 21,
        "generation-config": "vllm",
        "disable-uvicorn-access-log": True,
    }
    if adapter_rank is not None:
        rank = next((rank for rank in ADAPTER_RANKS if rank >= adapter_rank), None)
        if rank is None:
            raise BackendError(f"lora.rank is {adapter_rank}; vLLM allows at most {ADAPTER_RANKS[-1]}")
        settings |= {"enable-lora": True, "max-lora-rank": rank, "max-loras": 2, "max-cpu-loras": 4}
    return settings | {key.replace("_", "-"): value for key, value in options.args.items()}


def _arguments(settings: dict[str, Any]) -> list[str]:
    """`{"max-loras": 2, "enforce-eager": True}` as `--max-loras 2 --enforce-eager`; None leaves an argument out."""
    arguments: list[str] = []
    for key, value in settings.items():
        if value is None:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{key}" if value else f"--no-{key}")
            continue
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{key}", *(json.dumps(each) if isinstance(each, dict) else str(each) for each in values)]
    return arguments


def _environment(gpus: list[int] | None) -> dict[str, str]:
    """The routes for new weights are vLLM's development mode. Keys and tokens are those of other servers."""
    others = (TOKEN_VARIABLE, SAMPLER_KEY_VARIABLE, "VLLM_API_KEY")
    environment = {key: value for key, value in os.environ.items() if key not in others}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(gpus)
    return environment


def visible_devices(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a process: `gpus` are numbers among those that this process may use, as torch has them.

    Raises BackendError if there are not as many.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        return ",".join(map(str, gpus))
    visible = [name.strip() for name in devices.split(",") if name.strip()]
    if max(gpus) >= len(visible):
        problem = f"but {len(visible)} GPUs are visible (CUDA_VISIBLE_DEVICES is {devices!r})"
        raise BackendError(f"sampler.gpus is {list(gpus)}, {problem}")
    return ",".join(visible[gpu] for gpu in gpus)
