"""A Ray cluster, and runs that use it; both in their own environment."""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from factories import MODEL, digits_project
from processes import HANGS, fork_server, serving, wait_until

# One thread each, as in tests/conftest.py: a fork server must have no threads.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".environments/ray/bin/python"
TOKEN = "tok-of-the-backend-1f6c0b"
WORKER = "ray::EpisodeWorker"


class RayCluster:
    """Two nodes with room for a worker each. `folder` is where Ray writes its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = subprocess.Popen(
            [PYTHON, HERE / "cluster.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **self.environment},
            start_new_session=True,  # Ctrl-C is for pytest, which closes its standard input
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the cluster did not start"

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == command

    def workers(self) -> list[psutil.Process]:
        """The running worker processes, of this cluster only."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if process.name().startswith("ray::Epi") or (process.cmdline() or [""])[0].startswith(WORKER):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    @contextmanager
    def other_machine(self) -> Iterator[None]:
        """Adds a node with another host name."""
        options = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--disable-usage-stats", "--block"]
        start = shlex.join([str(PYTHON.with_name("ray")), "start", f"--address={self.address}", *options])
        namespace = ["unshare", "--uts", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
        with subprocess.Popen(
            [*namespace, "sh", "-c", f"hostname elsewhere && exec {start}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.environment},
        ) as process:
            assert process.stdout is not None
            printed = []
            for line in process.stdout:
                printed.append(line)
                if "Ray runtime started" in line:
                    break
            else:
                raise AssertionError("".join(printed))
            try:
                yield
            finally:
                process.terminate()

    def close(self) -> None:
        self._process.communicate(timeout=HANGS)

    def start(self, folder: Path, *options: Any, command: str = "finetune", **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [PYTHON, "-m", "insitu", command, "--config_file", "config.yml", *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, **self.environment, "COLUMNS": "200", **variables},
            start_new_session=True,
        )

    def run(self, folder: Path, *options: Any, command: str = "finetune", **variables: str) -> tuple[int, str]:
        """The exit code of a command, and what it has printed."""
        with self.start(folder, *options, command=command, **variables) as process:
            out, _ = process.communicate(timeout=HANGS)
            return process.returncode, out

    def executor(self, **settings: Any) -> tuple[str, str, str]:
        """The option that has episodes run on the cluster."""
        block = {"_type": "ray", "address": self.address, "workers": 2, **settings}
        return "-o", "general.executor", yaml.safe_dump(block, default_flow_style=True, width=10_000)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # Ray's sockets need a short path
    cluster = RayCluster(folder)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """For the backends."""
    with fork_server():
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """For tests that leave it as it was."""
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def own_cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@contextmanager
def project(folder: Path, workflow: str | None = None) -> Iterator[Path]:
    """A training run on `digits_plugin`, or on a workflow of `worker_plugin`, with a new backend."""
    folder.mkdir()
    command = ("backend", "--model", MODEL, "--port", "0", "--output_dir", folder / "backend", "--threads", "1")
    with serving(*command, "--token", TOKEN) as (_, address):
        digits_project(folder, workflow={"_type": workflow} if workflow else None, url=address, api_key=TOKEN)
        config = yaml.safe_load((folder / "config.yml").read_text())
        config["general"]["plugins"] = ["digits_plugin", "worker_plugin"]
        (folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
        shutil.copy(HERE / "worker_plugin.py", folder)
        yield folder


def wait_for(holds: Callable[[], Any], process: "subprocess.Popen[str]") -> None:
    """Waits for something that a command does; fails if it ends instead."""
    wait_until(lambda: holds() or process.poll() is not None)
    if process.poll() is not None:
        assert process.stdout is not None
        raise AssertionError(process.stdout.read())
