"""The ranks that train for a backend: started by `torchrun`, given jobs, and started again after one of them has ended.

A rank holds the weights; the backend gets them from the checkpoint of each job.
"""

import json
import logging
import os
import re
import shlex
import socket
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from insitu.backend.learner.batches import Row
from insitu.backend.learner.optimizer_loop import Progress
from insitu.backend.learner.versions import write_rows
from insitu.backend.model import LoadedModel
from insitu.disk.model_files import JobRecord
from insitu.disk.processor import usable_cores
from insitu.errors import BackendError, JobFailed
from insitu.integrations.torchrun.heartbeat import LIMIT_SECONDS, Heartbeats
from insitu.schemas.backend_processes import LearnerOptions
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import TrainingSettings
from insitu.wire.child_process import ChildProcess, describe_exit

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02
"""How long one step of a job waits for the ranks: sampling waits for that long."""
LOG = "learner.log"
_END_SECONDS = 5.0
"""How long ranks that are waiting for a job may take to end."""
RESTORED = "the weights from before the job were restored"


class RankGroup:
    """The ranks of `options`. `train` runs in the compute thread, `close` also after that ended."""

    def __init__(
        self, options: LearnerOptions, loaded: LoadedModel, output_dir: Path, allow_code: Path | None = None
    ) -> None:
        """Raises BackendError if there are not enough GPUs."""
        self._gpus = list(options.gpus or range(options.processes)) if loaded.device.type == "cuda" else []
        if max(self._gpus, default=-1) >= (devices := torch.cuda.device_count()):
            needed = ", ".join(map(str, self._gpus))
            raise BackendError(f"learner: the processes need the GPUs {needed}, but torch finds {devices} GPUs")
        self._options = options
        self._loaded = loaded
        self._folder = (output_dir / "learner").resolve()
        self._code = str(allow_code.resolve()) if allow_code is not None else None
        self._process: ChildProcess | None = None
        self._connection: socket.socket | None = None
        self._received = b""

    def train(
        self, folder: Path, policy: str, version: int, settings: TrainingSettings, rows: Sequence[Row], job: JobRecord
    ) -> Generator[Progress | None, None, dict[str, Any]]:
        """Yields while the ranks train, None if there is nothing to report.

        Returns {"metrics"}. Raises JobFailed with the reason of the ranks, or with the last
        error of one that has ended. If the generator is closed, the ranks are stopped.
        """
        path = self._folder / "rows.safetensors"
        try:
            if self._connection is None:
                yield from self._start(settings.lora)
            write_rows(path, rows)
            self._send(
                folder=str(folder.resolve()),
                policy=policy,
                version=version,
                settings=settings.model_dump(mode="json"),
                rows=str(path),
                job=job.model_dump(mode="json"),
            )
            while True:
                message = yield from self._receive()
                if "progress" in message:
                    yield Progress(*message["progress"])
                elif "failed" in message:
                    raise JobFailed(message["failed"])
                else:
                    return message
        except BaseException:  # re-raised: the ranks are in an unknown state
            self.close(0.0)
            raise
        finally:
            path.unlink(missing_ok=True)

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Ends the ranks; those that are waiting for a job, on other machines too, end themselves in this time."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.wait(seconds)
            self._process.kill()
            self._process = None

    def _start(self, lora: LoRASettings | None) -> Generator[None, None, None]:
        """Starts the ranks and waits until all have loaded the model."""
        self._folder.mkdir(parents=True, exist_ok=True)
        order = {
            "model": str(source.resolve()) if (source := Path(self._loaded.source)).exists() else str(source),
            "dtype": str(self._loaded.dtype).removeprefix("torch."),
            "quantization": self._loaded.quantization,
            "strategy": self._strategy(lora),
            "allow_code": self._code,
            "gpus": self._gpus,
        }
        path = self._folder / "order.json"
        path.write_text(json.dumps(order))
        arguments = ["-m", "insitu.integrations.torchrun.rank", str(path)]
        for node in range(1, self._options.nodes):
            command = shlex.join(["torchrun", *self._torchrun_options(node), *arguments])
            logger.warning("training waits for machine %d of %d; run there: %s", node, self._options.nodes - 1, command)
        self._heartbeats, self._received = Heartbeats(self._folder), b""
        self._connection, stdin = socket.socketpair()
        self._connection.settimeout(POLL_SECONDS)
        with stdin:
            self._process = ChildProcess(
                [sys.executable, "-m", "torch.distributed.run", *self._torchrun_options(node=0), *arguments],
                self._folder / LOG,
                {**os.environ, "OMP_NUM_THREADS": str(max(1, usable_cores() // self._options.processes))},
                bound=True,
                stdin=stdin.fileno(),
            )
        yield from self._receive()  # the first message: all have loaded the model

    def _torchrun_options(self, node: int) -> list[str]:
        options = ["--nproc-per-node", str(self._options.processes), "--max-restarts", "0"]
        if self._options.rendezvous is None:
            return ["--standalone", *options]
        host, _, port = self._options.rendezvous.rpartition(":")
        nodes = ["--nnodes", str(self._options.nodes), "--node-rank", str(node)]
        return [*nodes, "--master-addr", host, "--master-port", port, *options]

    def _strategy(self, lora: LoRASettings | None) -> str:
        """Adapters are small, and sharding them leaves some untrained in other libraries: they are never sharded."""
        if self._options.strategy == "auto":
            return "fsdp" if lora is None else "ddp"
        if lora is not None and self._options.strategy == "fsdp":
            raise JobFailed("learner.strategy is fsdp, but LoRA adapters are trained; allowed: auto, ddp")
        return self._options.strategy

    def _send(self, **job: Any) -> None:
        """Sends the name of a file: it fits into the socket even if rank 0 does not read."""
        assert self._connection is not None
        path = self._folder / "job.json"
        path.write_text(json.dumps(job))
        try:
            self._connection.sendall(f"{path}\n".encode())
        except OSError:
            raise self._failure() from None

    def _receive(self) -> Generator[None, None, dict[str, Any]]:
        """The next message of rank 0; yields while there is none. Raises JobFailed if a rank has ended or stopped."""
        assert self._connection is not None
        while b"\n" not in self._received:
            try:
                received = self._connection.recv(1 << 16)
            except TimeoutError:
                self._check_alive()
                yield None
                continue
            except OSError:
                raise self._failure() from None
            if not received:
                raise self._failure()
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _check_alive(self) -> None:
        if self._process is not None and self._process.ended:
            raise self._failure()
        if (silent := self._heartbeats.silent_rank()) is not None:
            rank, process = silent
            problem = f"rank {rank} of {self._options.total} ({process}) has been silent for {LIMIT_SECONDS:.0f} s"
            raise JobFailed(f"{problem}: its process is stopped or blocked, or its machine is lost; {RESTORED}")

    def _failure(self) -> JobFailed:
        """Which rank has ended how, from torchrun's summary, with the last lines of the log."""
        assert self._process is not None
        self._process.wait(20)  # torchrun stops the other ranks first
        log = self._process.output()
        match = re.search(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", log, re.DOTALL)
        what, prefix = "the learner's processes have ended", ""
        if match is not None:
            rank, code = map(int, match.groups())
            what, prefix = f"rank {rank} of {self._options.total} {describe_exit(code)}", f"[rank{rank}]: "
        return JobFailed(f"{what}{_last_error(log, prefix)} ({self._folder / LOG}); {RESTORED}")


def _last_error(log: str, prefix: str) -> str:
    """The last line of a rank's traceback, or else of what was printed before torchrun's own log lines; or nothing."""
    own = re.split(r"^[EWI]\d{4} ", log, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    traceback = [line.removeprefix(prefix) for line in own if line.startswith(prefix)]
    lines = [line for line in traceback or own if line and not line[0].isspace() and not line.startswith("[rank")]
    return f": {lines[-1]}" if lines else ""
