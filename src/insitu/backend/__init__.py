"""One process that serves a model over an OpenAI-compatible endpoint and trains it; start reading at server.

server          creates the parts, listens and stops; http: routes and their OpenAPI document
protocols/      the HTTP interfaces, one package each: openai, native (training jobs)
inference/      sampling: from token ids to completions
learner/        training: from rows to new weights
compute         the thread that touches the weights, shared by inference and training
model           loads Hugging Face causal language models and GGUF files, which `insitu.disk` has checked
adapters        layers with LoRA adapters, faster than peft computes them
packed          products in bfloat16 on a CPU, a row of which does not depend on the others
activations     activation functions on a CPU whose result for one row does not depend on the others
experts         layers of experts on a CPU, in which a token does not depend on the others
attention       the attention of training rows and of prompts, many of which begin alike
quantization    frozen weights of 8 or 4 bits, over which adapters are trained
active_waiting  whether the threads of an operation wait actively for one another
"""

import json
import os
from collections.abc import MutableMapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from insitu.disk.processor import processor_words
from insitu.wire.http_access import AccessPolicy

if TYPE_CHECKING:
    from insitu.schemas.training_jobs import Retention

TOKEN_VARIABLE = "INSITU_BACKEND_TOKEN"
"""The environment variable with the bearer token."""
SAMPLER_KEY_VARIABLE = "INSITU_SAMPLER_API_KEY"
"""The environment variable with the API key of vLLM servers."""


def configure_math_libraries(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what MKL and libgomp read when torch is loaded, unless it is set.

    MKL's strict mode makes a row of a matrix product independent of the number of rows, of threads, and of addresses
    (oneMKL Developer Guide, "Obtaining Numerically Reproducible Results"), on processors with AVX2 alone and on other
    makers' with AVX-512 if there are four rows and products of few columns have as many rows as columns, which
    `BatchShapes` sees to.
    libgomp's threads wait actively for a tenth of its default: longer than between two operations, and at less cost
    until `active_waiting` has seen that other programs use the cores.
    """
    environment.setdefault("GOMP_SPINCOUNT", "30000")
    processor = processor_words()
    if "GenuineIntel" in processor or "avx512f" in processor:
        environment.setdefault("MKL_CBWR", "AUTO,STRICT")
    elif "avx2" in processor:
        environment.setdefault("MKL_CBWR", "AVX2,STRICT")


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(map(int, value.split(","))) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r}; give numbers such as 0,1") from None


def _addresses(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (each.strip() for each in (value or "").split(","))))


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    from insitu.schemas.backend_processes import memory_size  # not at import: pydantic would slow `--help` down

    try:
        return memory_size(value) if value is not None else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _object(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        if isinstance(parsed := json.loads(value), dict):
            return parsed
    except ValueError:
        pass
    raise click.BadParameter(f'{value!r}; give a JSON object such as {{"max-num-seqs": 64}}')


def _option(default: Any, help: str, **of_click: Any) -> Any:
    """A field with the arguments of `click.option` for it."""
    return field(default=default, metadata={"help": help, **of_click})


_PATH = click.Path(path_type=Path)
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_COUNT = click.IntRange(min=1)


@dataclass(frozen=True)
class BackendOptions:
    """The options of `insitu backend`; importing them does not import torch.

    `token` is required of every request; without one, `insecure_no_auth` allows a `host` that other machines can
    connect to, and `allowed_host` further names in the Host header. `max_length`, `max_batch`, `threads` and
    `kv_memory`, in bytes, default to values that suit the model and the machine. With `lora_rank`, jobs without a
    `lora` block train adapters of that rank instead of all weights. The options that begin with `learner` are the keys
    of `LearnerOptions`, those that begin with `sampler` the keys of `SamplerOptions`. `keep_last`, `keep_every` and
    `keep_snapshots` say which checkpoints are written and kept after jobs that do not.
    """

    model: str = _option(MISSING, "A folder, GGUF file or Hub name, or RUN_DIR/best or RUN_DIR/latest.", required=True)
    name: str = _option("policy", "The name the model is served under.")
    host: str = _option("127.0.0.1", "The address to bind.")
    port: int = _option(8700, "0 picks a free port.", type=click.IntRange(0, 65535))
    device: str = _option("auto", "cpu, cuda, cuda:1 ..., or auto.")
    dtype: str = _option("auto", "float32, bfloat16, float16, or auto.")
    quantization: str | None = _option(
        None, "Bits of the weights under LoRA adapters: 8 or 4.", type=click.Choice(["int8", "nf4"])
    )
    chat_template: Path | None = _option(  # noqa: RUF009
        None, "File with the chat template, instead of the model's.", type=_FILE
    )
    tool_format: str | None = _option(None, "How the model writes tool calls (default: what its template says).")
    reasoning_format: str | None = _option(None, "How it writes reasoning (default: what its template says).")
    output_dir: Path | None = _option(None, "Folder for checkpoints (default: temporary).", type=_PATH)  # noqa: RUF009
    token: str | None = field(default=None, repr=False)
    insecure_no_auth: bool = False
    allowed_host: tuple[str, ...] = ()
    max_length: int | None = _option(None, "Maximum tokens of prompt and completion.", type=click.IntRange(min=2))
    max_batch: int | None = _option(None, "Maximum number of concurrent requests.", type=_COUNT)
    threads: int | None = _option(None, "CPU threads for sampling.", type=_COUNT)
    kv_memory: int | None = _option(
        None, "Memory for the keys and values of requests, such as 2GB.", callback=_size, metavar="SIZE"
    )
    lora_rank: int | None = _option(None, "LoRA rank (default: train all weights).", type=_COUNT)
    learner_processes: int = _option(1, "Processes that train together.", type=_COUNT)
    learner_gpus: tuple[int, ...] = _option((), "Their GPUs, as 0,1,2 (default: the first ones).", callback=_numbers)
    learner_strategy: str = _option("auto", "How they share.", type=click.Choice(["auto", "ddp", "fsdp"]))
    learner_nodes: int = _option(1, "Machines that train together.", type=_COUNT)
    learner_rendezvous: str | None = _option(None, "HOST:PORT of this machine for the others.")
    sampler: str = _option("embedded", "What samples.", type=click.Choice(["embedded", "vllm"]))
    sampler_python: str | None = _option(None, "The Python that has vLLM (default: this one).", metavar="PATH")
    sampler_gpus: tuple[int, ...] = _option((), "GPUs of the vLLM to start, as 0,1.", callback=_numbers)
    sampler_tensor_parallel: int = _option(1, "GPUs for each vLLM server.", type=_COUNT)
    sampler_args: dict[str, Any] | None = _option(  # noqa: RUF009
        None, "Further arguments of vLLM, as a JSON object.", callback=_object, metavar="JSON"
    )
    sampler_addresses: tuple[str, ...] = _option(
        (), "URLs of running vLLM servers, separated by commas.", callback=_addresses
    )
    sampler_api_key: str | None = field(default=None, repr=False)
    keep_last: int = _option(3, "Checkpoints to keep, the latest ones.", type=_COUNT)
    keep_every: int | None = _option(None, "Also keep every Nth checkpoint; 1 keeps all.", type=_COUNT)
    keep_snapshots: int | None = _option(
        None, "Write every Nth version and log the jobs between (default: by size and work).", type=_COUNT
    )
    allow_code: Path | None = _option(  # noqa: RUF009
        None,
        "Folder whose Python files jobs may run as losses, optimizers and schedules (default: none).",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
    )
    parent_pid: int | None = _option(None, "Exit when this process has exited.", type=int)

    @property
    def keep(self) -> "Retention":
        """The retention policy of jobs that name none."""
        from insitu.schemas.training_jobs import Retention  # not at import: pydantic would slow `--help` down

        return Retention(last=self.keep_last, every=self.keep_every, snapshots=self.keep_snapshots)

    def access(self) -> AccessPolicy:
        """Raises ConfigError if the options would leave the server open to other machines, or the token is empty."""
        return AccessPolicy.of(
            self.host,
            self.token,
            variable=TOKEN_VARIABLE,
            allow_anyone=self.insecure_no_auth,
            allowed_hosts=self.allowed_host,
        )
