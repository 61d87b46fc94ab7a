"""What samples for a backend: its own process, or vLLM."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

SET_BY_BACKEND = frozenset(
    {
        *("model", "served-model-name", "host", "port", "uds", "api-key", "enable-scale-out", "logprobs-mode"),
        *("tensor-parallel-size", "tokens-only", "api-server-count", "data-parallel-size", "headless"),
    }
)
"""Arguments of vLLM that `args` cannot set."""


class SamplerOptions(BaseModel):
    """What samples: the backend's own process, or vLLM, which the backend starts unless it is at `addresses`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True, frozen=True)

    kind: Literal["embedded", "vllm"] = Field(default="embedded", alias="_type")
    """`embedded`: the backend's own process. `vllm`: vLLM servers."""
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
        given = self.model_fields_set - {"kind"}
        if self.kind == "embedded" and given:
            raise ValueError(f"{', '.join(sorted(given))}: allowed with _type: vllm only")
        if self.addresses and (unused := sorted(given & {"gpus", "tensor_parallel", "args"})):
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
