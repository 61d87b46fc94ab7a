"""What `insitu backend` is told on its command line; importing it costs nothing."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BackendOptions:
    """One field an option, of the same name.

    `port` 0 picks a free one; `token` is asked of every request; `output_dir` takes checkpoints (none: a temporary
    folder); `max_length`, `max_batch` and `threads` default to what suits the model; `log_samples` is a file that
    gets a JSON line for every completion; the process ends by itself when `parent_pid` is gone. With `lora_rank`,
    jobs that do not ask for adapters of their own train adapters of that rank, otherwise all weights.
    """

    model: str
    name: str = "policy"
    host: str = "127.0.0.1"
    port: int = 8700
    device: str = "auto"
    dtype: str = "auto"
    output_dir: Path | None = None
    token: str | None = None
    max_length: int | None = None
    max_batch: int | None = None
    threads: int | None = None
    log_samples: Path | None = None
    lora_rank: int | None = None
    parent_pid: int | None = None
