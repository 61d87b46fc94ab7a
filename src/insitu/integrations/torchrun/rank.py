"""A rank: one of the processes that `torchrun` starts to train together; see `group` for the other side.

    python -m torch.distributed.run --nproc-per-node 4 -m insitu.integrations.torchrun.rank ORDER_FILE

Every rank reads ORDER_FILE, a JSON file with the model. Standard input is a socket of the backend: rank 0 gets a line
per job, the name of a JSON file with {"folder", "policy", "version", "settings", "rows", "job"}, and sends lines of
JSON: {"progress"}, and a last one with the metrics, or with the reason why the job failed.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from insitu.backend.compute import Parked
from insitu.backend.learner.batches import Ranks
from insitu.backend.learner.code import CodeFolder
from insitu.backend.learner.learner import Learner
from insitu.backend.learner.optimizer_loop import Progress
from insitu.backend.learner.versions import read_rows
from insitu.backend.model import load_model
from insitu.disk.model_files import JobRecord
from insitu.errors import InsituError, JobFailed
from insitu.integrations.torchrun.heartbeat import end_with_parent, start_beating
from insitu.schemas.training_jobs import TrainingSettings

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

_WAIT = timedelta(days=20)
"""As long as gloo can count. A rank that has ended is noticed by its closed connections."""


class ProcessGroup(Ranks):
    """The ranks of torch's default process group, which has been initialized.

    With `shards_weights` they hold parts of the weights (FSDP2), otherwise all of them (data parallel).
    """

    def __init__(self, device: torch.device, *, shards_weights: bool) -> None:
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.on_machine = int(os.environ["LOCAL_WORLD_SIZE"])
        self.shards_weights = shards_weights
        self._mesh = init_device_mesh(device.type, (self.count,))
        # Of CPU data, and without torch's time limit: rank 0 may wait hours for a job, or write a large file.
        self._control = dist.new_group(backend="gloo", timeout=_WAIT)

    def close(self) -> None:
        """Ends the connections to the other ranks; torch may abort a process that still holds a group when it ends."""
        self._control = None
        dist.destroy_process_group()

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        if self.shards_weights:  # summed in the backward pass
            return
        for parameter in parameters:  # a rank without micro-batches has none
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def merge(self, values: dict[K, V]) -> dict[K, V]:
        parts: list[Any] = [None] * self.count
        dist.all_gather_object(parts, values, self._control)
        return {key: value for part in parts for key, value in part.items()}

    def on_first(self, function: Callable[[], T]) -> T:
        outcome: list[Any] = [None, None]
        if self.index == 0:
            try:
                outcome[0] = function()
            except Exception as error:  # raised below, on all ranks
                outcome[1] = error
        dist.broadcast_object_list(outcome, group=self._control)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def on_each(self, function: Callable[[], object]) -> None:
        error = None
        try:
            function()
        except Exception as raised:  # raised below, on all ranks
            error = raised
        errors: list[Exception | None] = [None] * self.count
        dist.all_gather_object(errors, error, self._control)
        if (first := next(filter(None, errors), None)) is not None:
            raise first

    def shard(self, module: nn.Module, root: nn.Module) -> None:
        if not self.shards_weights:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        blocks = set(getattr(module, "_no_split_modules", None) or ())
        for part in [part for part in module.modules() if type(part).__name__ in blocks]:
            fully_shard(part, mesh=self._mesh)
        # Also after forward passes without gradient, so that the parameters are always the sharded ones.
        fully_shard(root, mesh=self._mesh, reshard_after_forward=True)
        for part in root.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # the sum, not the mean
                part.set_force_sum_reduction_for_comms(True)  # gloo has no other


class _Server:
    """The backend, as rank 0 sees it; to the other ranks what rank 0 has read is broadcast."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        if ranks.index == 0:
            self._connection = socket.socket(fileno=sys.stdin.fileno()).makefile("rw", buffering=1)

    def send(self, message: dict[str, Any]) -> None:
        if self._ranks.index == 0:
            self._connection.write(json.dumps(message) + "\n")

    def receive(self) -> dict[str, Any] | None:
        """The next job; None if the backend has closed the connection."""

        def read() -> Any:
            path = self._connection.readline().strip()
            return json.loads(Path(path).read_text()) if path else None

        return self._ranks.on_first(read)


def main(order_file: Path) -> None:
    """Trains job after job until the backend closes the connection."""
    end_with_parent()
    start_beating(order_file.parent, int(os.environ["RANK"]))
    order = json.loads(order_file.read_text())
    local_rank = int(os.environ["LOCAL_RANK"])
    gpus = order["gpus"]
    device = torch.device(f"cuda:{gpus[local_rank]}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
    ranks = ProcessGroup(device, shards_weights=order["strategy"] == "fsdp")
    try:
        loaded = load_model(order["model"], str(device), order["dtype"], order["quantization"])
        server = _Server(ranks)
        code = CodeFolder(Path(order["allow_code"]) if order["allow_code"] else None)
        learners: dict[str, Learner] = {}
        server.send({"ready": True})
        while (job := server.receive()) is not None:
            learner = learners.get(job["folder"])
            if learner is None or learner.version != job["version"]:  # which was deleted, or its last job not served
                learner = Learner(loaded, Path(job["folder"]), job["policy"], ranks=ranks, code=code)
                learner.resume()
                learners[job["folder"]] = learner
            if learner.version != job["version"]:
                found = f"{job['folder']} has version {learner.version}"
                server.send({"failed": f"{found}, but the backend trains version {job['version']}"})
                continue
            try:
                for message in _messages(learner, job):
                    if message is not None:
                        server.send(message if isinstance(message, dict) else {"progress": message})
            except JobFailed as error:  # raised on all ranks alike
                server.send({"failed": str(error)})
    finally:
        ranks.close()


def _messages(learner: Learner, job: dict[str, Any]) -> Iterator[Progress | Parked | dict[str, Any] | None]:
    """The progress of a job, and in the end its metrics."""
    settings, record = TrainingSettings(**job["settings"]), JobRecord(**job["job"])
    trained = yield from learner.run(settings, read_rows(Path(job["rows"])), record.id, record.key, record.digest)
    yield {"metrics": trained.metrics}


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except InsituError as error:
        sys.exit(str(error))
