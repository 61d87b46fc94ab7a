"""What a process can use of a processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.disk.processor import usable_cores

CORES = usable_cores(Path("none"))
V1 = {"cpu.cfs_quota_us": "{quota}\n", "cpu.cfs_period_us": "100000\n"}
V2 = {"cpu.max": "{quota} 100000\n"}


def groups(root: Path, lines: str, quotas: dict[str, str]) -> tuple[Path, Path]:
    """A /proc with the cgroups of this process, and their folders."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(lines)
    for folder, quota in quotas.items():
        (cgroups / folder).mkdir(parents=True, exist_ok=True)
        for name, text in (V1 if folder.startswith("cpu") else V2).items():
            (cgroups / folder / name).write_text(text.format(quota=quota))
    return proc, cgroups


@pytest.mark.parametrize(
    ("lines", "quotas", "expected"),
    [
        ("4:memory:/a\n1:cpu,cpuacct:/a/b\n0::/\n", {"cpu/a/b": "-1", "cpu/a": "100000", "cpu": "-1"}, 1),
        ("1:cpu:/docker/1f\n", {"cpu": "50000"}, 1),  # in a container, whose group is mounted as the root
        ("0::/a/b\n", {"a/b": "max", "a": "100000", ".": "max"}, 1),
        ("0::/a\n", {"a": "max"}, CORES),
        ("0::/a\n", {"a": "64000000"}, CORES),
        ("0::/a\n", {"a": "150000"}, min(CORES, 2)),  # a part of a core more is a thread more
        ("0::/a\n", {"a": "0"}, 1),
        ("1:cpuacct:/\n", {}, CORES),
    ],
)
def test_quotas_of_control_groups(tmp_path: Path, lines: str, quotas: dict[str, str], expected: int) -> None:
    assert usable_cores(*groups(tmp_path, lines, quotas)) == expected


def test_cores_are_counted_before_threads_are_bound() -> None:
    code = "import insitu.backend, torch; from insitu.disk.processor import usable_cores; print(usable_cores())"
    environment = {**os.environ, "OMP_PROC_BIND": "true"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout == f"{CORES}\n"


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/cpu", os.W_OK), reason="needs cgroups of version 1 to write to")
def test_a_process_in_a_group_with_a_quota() -> None:
    group = Path(f"/sys/fs/cgroup/cpu/insitu-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("100000")
        code = "from insitu.disk.processor import usable_cores; print(usable_cores())"
        joined = f"echo 0 > {group}/cgroup.procs && exec {sys.executable} -c '{code}'"
        done = subprocess.run(["/bin/sh", "-c", joined], check=True, capture_output=True, text=True)
    finally:
        group.rmdir()
    assert done.stdout == "1\n"
