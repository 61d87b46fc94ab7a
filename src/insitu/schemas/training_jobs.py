"""Settings and states of the backend's training jobs, and the processes that train and sample.

A job is uploaded as gzipped JSON lines, settings first, then one line per row:

    {"settings": {"method": "grpo", "learning_rate": 0.001, "clip_low": 0.2, ...}, "num_rows": 2}
    {"token_ids": [1, 5, 7, 2], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -1], "advantages": 1, "episode": "a"}
    {"token_ids": [1, 6, 8, 2], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -2], "advantages": -1, "episode": "b"}

Rows of a preference pair (`method: dpo`) share `pair`; a dialogue as `messages` is rendered with the chat template:

    {"token_ids": [1, 5, 7, 2], "loss_mask": [0, 0, 1, 1], "pair": "p1", "preferred": true}
    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}], "pair": "p1", "preferred": false}

The `Idempotency-Key` header identifies the job (run id and epoch): a key is trained on at most once.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from insitu.schemas.losses import SETTINGS, DPOSettings, KTOSettings, LossSettings
from insitu.schemas.parts import PYTHON, Optimizer, Part, Schedule

SET_BY_BACKEND = frozenset(
    {
        *("model", "served-model-name", "host", "port", "uds", "api-key", "enable-scale-out", "logprobs-mode"),
        *("tensor-parallel-size", "tokens-only", "api-server-count", "data-parallel-size", "headless"),
    }
)
"""Arguments of vLLM that `args` cannot set."""
DecayRate = Annotated[float, Field(ge=0, lt=1)]


class Retention(BaseModel):
    """The checkpoints that a backend keeps once a job has completed; it deletes the others.

    The latest version and those that a running request samples from are always kept.
    """

    model_config = SETTINGS

    last: int = Field(default=3, ge=1)
    """Number of latest versions to keep."""
    every: int | None = Field(default=None, ge=1)
    """Also keep the versions that are multiples of this."""
    optimizer: int = Field(default=2, ge=2)
    """Number of latest versions whose optimizer state is kept."""
    versions: list[int] = Field(default_factory=list)
    """Further versions to keep."""
    after: int = 0
    """Versions up to this one are not touched."""


class KeepConfig(BaseModel):
    """The checkpoints of a run to keep; the others are deleted after each training job."""

    model_config = SETTINGS

    last: int = Field(default=3, ge=1)
    """Number of latest versions to keep. The latest two are always kept."""
    best: bool = True
    """Also keep the version with the best validation score so far."""
    every: int | None = Field(default=None, ge=1)
    """Also keep the versions that are multiples of this, such as 10, 20, 30; 1 keeps all."""
    optimizer: int = Field(default=2, ge=2)
    """Number of latest versions whose optimizer state is kept, so that `insitu runs fork` continues exactly from there.
    It takes twice the space of trained weights in float32."""


class LoRASettings(BaseModel):
    """Trains low-rank adapters instead of all weights (Hu et al., arXiv:2106.09685)."""

    model_config = SETTINGS

    rank: int = Field(default=16, ge=1, le=65536)
    """Rank of the two matrices whose product is added to each weight."""
    alpha: float = Field(default=32, gt=0)
    """The product is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, le=0)
    """Always 0: with dropout the learner's log-probabilities would not be those of the sampler."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get adapters: module names or suffixes, or `all-linear`."""


class LearnerOptions(BaseModel):
    """The processes that train a model together, started by `torchrun`."""

    model_config = SETTINGS

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
        fields = self.model_fields_set - {"kind"}
        if self.kind == "embedded" and fields:
            raise ValueError(f"{', '.join(sorted(fields))}: allowed with _type: vllm only")
        if self.addresses and (unused := sorted(fields & {"gpus", "tensor_parallel", "args"})):
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


class TrainingOptions(LossSettings):
    """Loss and optimizer settings; [losses](losses.md) has the formulas, and the keys of TRL, verl and prime-rl."""

    method: Literal["grpo", "dpo", "kto", "sft"] = "grpo"
    """`grpo`: policy gradients with group-relative advantages (arXiv:2402.03300); the keys of the loss outside of the
    blocks below are this method's. `dpo`: preference pairs. `kto`: episodes that are desirable or not. `sft`: the mean
    negative log-likelihood of the trained tokens."""
    dpo: DPOSettings | None = None
    """`method: dpo` only."""
    kto: KTOSettings | None = None
    """`method: kto` only."""
    optimizer: Optimizer | None = None
    """`adamw`, or a [function](../guides/extend.md#an-optimizer) that makes another one; none: `adamw`."""
    learning_rate: float = Field(default=5e-5, ge=0)
    """Peak learning rate."""
    schedule: Schedule = "constant"
    """Decay of the learning rate over the run: `constant`, `linear` to 0, `cosine` (half a cosine to 0), or a
    [function](../guides/extend.md#a-schedule) of yours."""
    warmup: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the run during which the learning rate rises linearly from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay, applied to matrices only."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW's decay rates."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""
    mini_batch_size: int | None = Field(default=None, ge=1)
    """Rows per optimizer step (a preference pair has at least two); none: all rows of the job. Rows are split evenly
    into the number of steps that batches of this size would take; the rows of an episode or a pair stay together."""
    num_iterations: int = Field(default=1, ge=1)
    """Passes over the job's rows, each shuffled by the seed."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens computed per forward pass, padding included; affects memory and speed, not the result."""
    attention: Literal["auto", "packed", "padded"] = "auto"
    """`packed`: computes shared prefixes once, if the model allows it. `auto`: on a CPU, if that saves enough."""
    gradient_checkpointing: bool = False
    """Keeps the inputs of each layer only and recomputes its activations in the backward pass: needs less memory and
    about a third more time, with the same result."""
    lora: LoRASettings | None = None
    """Low-rank adapters instead of all weights; fixed by the first job of a backend."""

    @model_validator(mode="after")
    def _check_method(self) -> "TrainingOptions":
        """Refuses what the method ignores, and fills in the defaults of its block."""
        for method, block in (("dpo", DPOSettings), ("kto", KTOSettings)):
            if self.method == method and getattr(self, method) is None:
                self.__dict__[method] = block()
                self.model_fields_set.add(method)
            elif self.method != method and getattr(self, method) is not None:
                raise ValueError(f"{method} requires method: {method}, not {self.method}")
        if self.method != "grpo":
            for key, field in LossSettings.model_fields.items():
                if getattr(self, key) != field.get_default(call_default_factory=True):
                    raise ValueError(f"{key} requires method: grpo, not {self.method}")
        return self

    @property
    def code(self) -> dict[str, Part]:
        """The parts that are Python code, by key."""
        blocks = {"": self, "kl.": self.kl, "dpo.": self.dpo, "kto.": self.kto}
        fields = {f"{prefix}{key}": value for prefix, block in blocks.items() for key, value in block or ()}
        return {key: value for key, value in fields.items() if isinstance(value, Part) and value.type == PYTHON}

    @property
    def reference(self) -> str | Part | None:
        """The weights that the loss compares with; None if it needs none."""
        if self.method == "grpo":
            return (self.kl.reference or "initial") if self.kl.beta > 0 else None
        block = self.dpo or self.kto
        return block.reference if block is not None else None

    def effective(self) -> dict[str, Any]:
        """The settings as JSON, without those that the method ignores."""
        ignored = set() if self.method == "grpo" else set(LossSettings.model_fields)
        return self.model_dump(mode="json", exclude_none=True, exclude=ignored)


class TrainingSettings(TrainingOptions):
    """Everything that determines a job's result, except its rows and starting weights."""

    seed: int = 0
    """Seed of the shuffling."""
    steps_per_iteration: int | None = Field(default=None, ge=1)
    """Optimizer steps per pass over the rows; overrides mini_batch_size."""
    schedule_range: tuple[float, float] = (0.0, 1.0)
    """Part of the run this job covers, for the learning-rate schedule: epoch 3 of 10 is (0.2, 0.3)."""

    @model_validator(mode="after")
    def _check_schedule_range(self) -> "TrainingSettings":
        first, last = self.schedule_range
        if not 0 <= first <= last <= 1:
            raise ValueError(f"schedule_range is {[first, last]}; allowed: two ascending numbers between 0 and 1")
        return self


class JobState(BaseModel):
    """Response of `GET /v1/train/jobs/{id}`, and the data of each event."""

    model_config = ConfigDict(extra="ignore")

    id: str
    status: Literal["pending", "running", "completed", "failed", "canceled"]
    key: str | None = None
    digest: str | None = None
    body_differs: bool = False
    """In the response to a submission: the settings and rows of this key's job have another `digest`."""
    progress: float = 0.0
    """Percent."""
    message: str | None = None
    policy_version: int | None = None
    checkpoint: str | None = None
    """Folder of the weights the job produced, which are `policy_version`, once completed."""
    metrics: dict[str, Any] = Field(default_factory=dict)
    """By name, as `docs/reference/losses.md` lists them for each method."""
