"""A rank: one of the processes that `torchrun` starts to train together; see `rank_group` for the other side.

    python -m torch.distributed.run --nproc-per-node 4 -m insitu.backend.learner.rank_process ORDER_FILE

Every rank reads ORDER_FILE, a JSON file with the model. Standard input is a pipe of the backend, in both directions,
for messages in JSON: rank 0 gets one per job, {"folder", "policy", "settings", "rows", "job"}, and sends {"progress"}
and a last one with the trained version, or with the reason why the job failed.
"""

import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from insitu.backend.learner.code import CodeFolder
from insitu.backend.learner.learner import Learner, TrainedVersion
from insitu.backend.learner.ranks import ProcessGroup, read_rows
from insitu.backend.model import load_model
from insitu.disk.model_files import JobRecord
from insitu.errors import InsituError, JobFailed
from insitu.schemas.training_jobs import TrainingSettings


class _Server:
    """The backend, as rank 0 sees it; to the other ranks what rank 0 has read is broadcast."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        if ranks.index == 0:
            self._connection = Connection(sys.stdin.fileno())

    def send(self, message: dict[str, Any]) -> None:
        if self._ranks.index == 0:
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """The next job; None if the backend has closed the connection."""

        def read() -> Any:
            try:
                return json.loads(self._connection.recv_bytes())
            except EOFError:
                return None

        return self._ranks.on_first(read)


def main(order_file: Path) -> None:
    """Trains job after job until the backend closes the connection."""
    order = json.loads(order_file.read_text())
    local_rank = int(os.environ["LOCAL_RANK"])
    gpus = order["gpus"]
    device = torch.device(f"cuda:{gpus[local_rank]}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
    ranks = ProcessGroup(device, shards_weights=order["strategy"] == "fsdp")
    try:
        loaded = load_model(order["model"], str(device), order["dtype"])
        server = _Server(ranks)
        code = CodeFolder(Path(order["allow_code"]) if order["allow_code"] else None)
        learners: dict[str, Learner] = {}
        server.send({"ready": True})
        while (job := server.receive()) is not None:
            if job["folder"] not in learners:
                learners[job["folder"]] = Learner(loaded, Path(job["folder"]), job["policy"], ranks=ranks, code=code)
                learners[job["folder"]].resume()
            try:
                server.send(_trained(learners[job["folder"]], job, server))
            except JobFailed as error:  # raised on all ranks alike
                server.send({"failed": str(error)})
    finally:
        ranks.close()


def _trained(learner: Learner, job: dict[str, Any], server: _Server) -> dict[str, Any]:
    settings, record = TrainingSettings(**job["settings"]), JobRecord(**job["job"])
    steps = learner.run(settings, read_rows(Path(job["rows"])), record.id, record.key)
    while True:
        try:
            progress = next(steps)
        except StopIteration as end:
            trained: TrainedVersion = end.value
            return {"version": trained.version, "metrics": trained.metrics}
        if progress is not None:
            server.send({"progress": progress})


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except InsituError as error:
        sys.exit(str(error))
