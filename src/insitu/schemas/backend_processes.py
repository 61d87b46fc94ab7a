"""The processes of a backend: those that train a model, and those that sample, and the memory that they may use."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from insitu.schemas.components import Settings

SET_BY_BACKEND = (
    *("model", "served-model-name", "host", "port", "uds", "api-key", "enable-scale-out", "logprobs-mode"),
    *("tensor-parallel-size", "tokens-only", "api-server-count", "data-parallel-size", "headless"),
)
"""Arguments of vLLM that `args` cannot set."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", re.IGNORECASE)


def memory_size(value: int | str) -> int:
    """Bytes of `2000000000`, `"2GB"` or `"1.5 GiB"`. Raises ValueError for anything else."""
    text = str(value).strip()
    match = _SIZE.fullmatch(text)
    size = int(text) if text.isdecimal() and not isinstance(value, bool) else 0
    if match is not None:
        base = 1024 if match[3] else 1000
        size = round(float(match[1]) * base ** ("KMGT".index(match[2].upper()) + 1))
    if size <= 0:
        allowed = "a number of bytes, or a size such as 2GB or 1.5GiB (KB to TB, KiB to TiB)"
        raise ValueError(f"{value!r:.40} is not a size of memory; allowed: {allowed}")
    return size


MemorySize = Annotated[int, BeforeValidator(memory_size, json_schema_input_type=int | str)]


class LearnerOptions(Settings):
    """The processes that train a model together, started by `torchrun`."""

    processes: int = Field(default=1, ge=1)
    """Processes on each machine. 1, on one machine: the backend's own process trains."""
    gpus: list[int] | None = None
    """The GPU of each process; none: the first ones. On a CPU it has no effect."""
    nodes: int = Field(default=1, ge=1)
    """Machines, the backend's among them. On each of the others you start `torchrun`, with the command that the backend
    logs; all must see its `output_dir` and the model under the same paths."""
    rendezvous: str | None = None
    """With `nodes`: HOST:PORT, the address of the backend's machine, and a free port there that the other machines can
    connect to."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """ddp: each process holds all weights; fsdp: a part of them (FSDP2). auto: ddp for LoRA, fsdp for all weights."""

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.gpus is not None and len({*self.gpus}) != self.processes:
            raise ValueError(f"gpus is {self.gpus}; {self.processes} processes need as many different ones")
        if (self.nodes > 1) != (self.rendezvous is not None):
            problem = f"nodes is {self.nodes} and rendezvous {self.rendezvous}"
            raise ValueError(f"{problem}; set both, or none on one machine")
        host, _, port = (self.rendezvous or "host:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"rendezvous is {self.rendezvous!r}; it must be HOST:PORT, such as node0:29400")
        return self

    @property
    def total(self) -> int:
        """The processes of all machines."""
        return self.processes * self.nodes


class SamplerOptions(Settings):
    """What samples: the backend's own process, or vLLM, which the backend starts unless it is at `addresses`."""

    model_config = ConfigDict(serialize_by_alias=True)

    kind: Literal["embedded", "vllm"] = Field(default="embedded", alias="_type")
    """`embedded`: the backend's own process. `vllm`: vLLM servers."""
    python: str | None = None
    """The Python of another environment that has vLLM, such as `~/vllm/bin/python`; none: that of the backend."""
    gpus: list[int] | None = None
    """GPUs of the vLLM that the backend starts; none: those that vLLM chooses. There is a server for each
    `tensor_parallel` of them."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs that share the weights of a server."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `vllm serve`, such as `{gpu-memory-utilization: 0.6, enforce-eager: true}`."""
    addresses: list[str] = Field(default_factory=list)
    """URLs of running vLLM servers with the same weights, such as `[http://10.0.0.7:8000]`."""
    api_key: SecretStr | None = None
    """Bearer token for the servers at `addresses`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = self.model_fields_set - {"kind"}
        if self.kind == "embedded" and fields:
            raise ValueError(f"{', '.join(sorted(fields))}: allowed with _type: vllm only")
        if self.addresses and (unused := sorted(fields & {"python", "gpus", "tensor_parallel", "args"})):
            raise ValueError(f"{', '.join(unused)}: allowed without addresses only, for a vLLM that the backend starts")
        if self.api_key is not None and not self.addresses:
            raise ValueError("api_key: allowed with addresses only")
        for address in self.addresses:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"addresses has {address!r}; each must begin with http:// or https://")
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError("addresses has the same address twice")
        if self.gpus is not None and (len({*self.gpus}) != len(self.gpus) or len(self.gpus) % self.tensor_parallel):
            problem = f"gpus is {self.gpus}; allowed: different ones, a multiple of tensor_parallel"
            raise ValueError(f"{problem} ({self.tensor_parallel})")
        for key in self.args:
            if key.replace("_", "-") in SET_BY_BACKEND:
                raise ValueError(f"args has {key}, which the backend sets itself")
        return self
