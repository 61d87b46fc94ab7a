"""One process that serves a model over an OpenAI-compatible endpoint and trains it; start reading at server.

server       creates the parts, listens and stops; http: routes and their OpenAPI document
protocols/   the HTTP interfaces, one package each: openai, native (training jobs)
inference/   sampling: from token ids to completions
learner/     training: from rows to new weights
child_process  commands that work for the backend
compute      the thread that touches the weights, shared by inference and training
model        loads Hugging Face causal language models, after insitu.disk.model_files has checked their files
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from insitu.wire.http_access import AccessPolicy

if TYPE_CHECKING:
    from insitu.schemas.training_jobs import Retention

TOKEN_VARIABLE = "INSITU_BACKEND_TOKEN"
"""The environment variable with the bearer token."""
SAMPLER_KEY_VARIABLE = "INSITU_SAMPLER_API_KEY"
"""The environment variable with the API key of vLLM servers."""


@dataclass(frozen=True)
class BackendOptions:
    """The options of `insitu backend`; importing them does not import torch.

    `port` 0 picks a free port. `token` is required of every request; without one, `insecure_no_auth` allows a `host`
    that other machines can connect to, and `allowed_host` further names in the Host header. `output_dir` receives
    checkpoints (None: a temporary folder). `max_length`, `max_batch` and `threads` default to values that suit the
    model. `log_samples` is a file that gets a JSON line per completion. The process stops when `parent_pid` ends. With
    `lora_rank`, jobs without a `lora` block train adapters of that rank instead of all weights.
    With `learner_processes` above 1, that many processes train instead of the backend's own, on the GPUs
    `learner_gpus`; `learner_strategy` says whether they divide the weights. With `learner_nodes` above 1, as many train
    on each of the other machines, which find this one at `learner_rendezvous`.
    `sampler` is `embedded` or `vllm`; the options that begin with its name are the keys of `SamplerOptions`, with
    `sampler_args` as JSON.
    `keep_last` and `keep_every` say which checkpoints are kept after jobs that do not.
    Jobs may choose functions of the Python files in `allow_code`; without it, none.
    """

    model: str
    name: str = "policy"
    host: str = "127.0.0.1"
    port: int = 8700
    device: str = "auto"
    dtype: str = "auto"
    output_dir: Path | None = None
    token: str | None = field(default=None, repr=False)
    insecure_no_auth: bool = False
    allowed_host: tuple[str, ...] = ()
    max_length: int | None = None
    max_batch: int | None = None
    threads: int | None = None
    log_samples: Path | None = None
    lora_rank: int | None = None
    parent_pid: int | None = None
    learner_processes: int = 1
    learner_gpus: tuple[int, ...] = ()
    learner_strategy: str = "auto"
    learner_nodes: int = 1
    learner_rendezvous: str | None = None
    sampler: str = "embedded"
    sampler_gpus: tuple[int, ...] = ()
    sampler_tensor_parallel: int = 1
    sampler_args: str | None = None
    sampler_addresses: tuple[str, ...] = ()
    sampler_api_key: str | None = field(default=None, repr=False)
    keep_last: int = 3
    keep_every: int | None = None
    allow_code: Path | None = None

    @property
    def keep(self) -> "Retention":
        """The retention policy of jobs that name none."""
        from insitu.schemas.training_jobs import Retention  # not at import: pydantic would slow `--help` down

        return Retention(last=self.keep_last, every=self.keep_every)

    def access(self) -> AccessPolicy:
        """Raises ConfigError if the options would leave the server open to other machines, or the token is empty."""
        return AccessPolicy.of(
            self.host,
            self.token,
            variable=TOKEN_VARIABLE,
            allow_anyone=self.insecure_no_auth,
            allowed_hosts=self.allowed_host,
        )
