"""The memory of this machine and its cgroups, and a backend that the kernel ends for lack of it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories import MODEL
from waiting import until

from insitu.disk.files import available_memory
from insitu.disk.memory import MachineMemory, kill_counter, machine_memory, memory_kills
from insitu.errors import BackendUnavailable
from insitu.training.native.backend_process import BackendProcess
from insitu.wire.endings import end_tasks

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """The folders `proc` and `cgroups` of a machine of 8 GiB, 6 of which are free, without cgroups."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {8 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {6 * 2**20} kB\n")
    (proc / "vmstat").write_text("nr_free_pages 12\noom_kill 3\n")
    return proc, cgroups


def enter(machine: tuple[Path, Path], path: str, files: dict[str, str], version: int) -> Path:
    """Puts the process into a cgroup of a version; `files` are those of the group."""
    proc, cgroups = machine
    folder = cgroups / ("memory" if version == 1 else "") / path
    folder.mkdir(parents=True, exist_ok=True)
    lines = {1: f"5:cpu:/other\n4:memory:/{path}\n0::/\n", 2: f"0::/{path}\n"}
    (proc / "self/cgroup").write_text(lines[version])
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def kills(machine: tuple[Path, Path]) -> int | None:
    counter = kill_counter("self", *machine)
    assert counter is not None
    return memory_kills(counter)


def test_a_machine_without_cgroups(machine: tuple[Path, Path], tmp_path: Path) -> None:
    assert machine_memory(*machine) == MachineMemory(8 * GIB, 6 * GIB)
    assert kills(machine) == 3
    assert machine_memory(tmp_path, tmp_path) is None
    assert kill_counter("self", tmp_path, tmp_path) is None
    assert kill_counter(7, *machine) is None


def test_limits_of_version_2(machine: tuple[Path, Path]) -> None:
    """What files hold in the page cache can be used; the limit of a group around it holds, too."""
    files = {
        "memory.max": str(4 * GIB),
        "memory.current": str(3 * GIB),
        "memory.stat": f"anon 5\ninactive_file {2 * GIB}",
        "memory.events": "low 0\noom 2\noom_kill 9\noom_group_kill 0",
        "memory.events.local": "low 0\noom 2\noom_kill 2\noom_group_kill 0",
    }
    inner = enter(machine, "app.slice/run.service", files, version=2)
    assert machine_memory(*machine) == MachineMemory(4 * GIB, 3 * GIB, inner)
    assert kills(machine) == 2
    (inner.parent / "memory.max").write_text(str(2 * GIB))
    (inner.parent / "memory.current").write_text(str(GIB))
    assert machine_memory(*machine) == MachineMemory(2 * GIB, GIB, inner.parent)
    (inner.parent / "memory.max").write_text("max\n")
    (inner / "memory.max").write_text("max\n")
    assert machine_memory(*machine) == MachineMemory(8 * GIB, 6 * GIB)


def test_limits_of_version_1(machine: tuple[Path, Path]) -> None:
    files = {
        "memory.limit_in_bytes": str(4 * GIB),
        "memory.usage_in_bytes": str(3 * GIB),
        "memory.stat": f"cache 7\ntotal_inactive_file {GIB}",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4",
    }
    inner = enter(machine, "docker/abc", files, version=1)
    assert machine_memory(*machine) == MachineMemory(4 * GIB, 2 * GIB, inner)
    assert kills(machine) == 4
    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    assert machine_memory(*machine) == MachineMemory(8 * GIB, 6 * GIB)


def test_a_container_sees_its_group_as_the_root(machine: tuple[Path, Path]) -> None:
    proc, _ = machine
    root = enter(machine, "", {"memory.max": str(GIB), "memory.current": "0"}, version=2)
    (proc / "self/cgroup").write_text("0::/docker/abc\n")
    assert machine_memory(*machine) == MachineMemory(GIB, GIB, root)
    assert kills(machine) == 3  # a root says nothing


def test_this_machine() -> None:
    memory = machine_memory()
    assert memory is not None
    assert 0 < memory.available <= memory.total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory() == pytest.approx(memory.available, rel=0.5)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of version 1 with a limit of 16 MiB, for processes that the test moves into it."""
    group = Path("/sys/fs/cgroup/memory") / f"insitu-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(2**24))
    except OSError as error:
        pytest.skip(f"no memory cgroup of version 1 can be made here: {error}")
    yield group
    group.rmdir()


def end_for_memory(group: Path) -> None:
    """Has the kernel end a process."""
    command = f"echo $$ > {group}/cgroup.procs && exec tail /dev/zero"  # which has no lines
    assert subprocess.run(command, shell=True, check=False).returncode == -signal.SIGKILL


def test_the_kernel_counts_what_it_ends_in_a_group(small_group: Path) -> None:
    counters = small_group / "memory.oom_control", kill_counter()
    before = [memory_kills(counter) for counter in counters if counter is not None]
    assert None not in before
    end_for_memory(small_group)
    after = [memory_kills(counter) for counter in counters if counter is not None]
    assert after == [before[0] + 1, *before[1:]]


REASON = (
    r"was ended by SIGKILL( before it was ready)?; the kernel ended it for lack of memory[^;]*; (the memory of this "
    r"machine|the limit of \S+) is \S+ GB; it needs less with training\.lora, dtype, quantization, max_length, "
    r"kv_memory, eval\.general\.max_concurrency \(insitu validate lists what needs how much; log: \S+/backend\.log\)"
)


OTHER = r"process was ended by SIGKILL; the end of its log"


async def test_a_backend_that_is_ended_while_it_loads(small_group: Path, tmp_path: Path) -> None:
    process = BackendProcess(["--model", str(MODEL)], tmp_path / "backend.log", 3, {})
    starting = asyncio.create_task(process.start(300))
    await until(lambda: process.pid is not None)
    (small_group / "cgroup.procs").write_text(str(process.pid))
    with pytest.raises(BackendUnavailable, match=REASON):
        await starting


@pytest.mark.slow
async def test_a_backend_that_the_kernel_ends_is_started_again_once(
    small_group: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = BackendProcess(["--model", str(MODEL)], tmp_path / "backend.log", 3, {})
    url = await process.start(300)
    watched = asyncio.create_task(process.keep_running())
    try:
        await exhaust(small_group, process, url)
        await until(lambda: process.restarted_at > 0)
        assert re.search(rf"{REASON}\nstarting it again \(1 of 1\)", caplog.text)
        await exhaust(small_group, process, url)
        with pytest.raises(BackendUnavailable, match=REASON):
            await asyncio.wait_for(watched, 300)
    finally:
        watched.cancel()
        await process.stop()


async def exhaust(group: Path, process: BackendProcess, url: str) -> None:
    """Moves a backend into a cgroup, whose limit holds for what it takes from now on, and asks for completions."""
    (group / "cgroup.procs").write_text(str(process.pid))
    await until(lambda: any(counter.parent == group for counter, _ in process.kills))
    body = {"model": "policy", "prompt": [7] * 100, "n": 64, "max_tokens": 100, "min_tokens": 100}
    headers = {"Authorization": f"Bearer {process.token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with contextlib.suppress(OSError):
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=300).read())


async def test_another_sigkill_is_not_taken_for_it(forked_backends: None, tmp_path: Path) -> None:
    process = BackendProcess(["--model", str(MODEL)], tmp_path / "backend.log", 0, {})
    await process.start(300)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(BackendUnavailable, match=OTHER):
        await process.keep_running()
    await process.stop()


async def test_what_the_kernel_ends_in_other_groups_is_not_taken_for_it(
    forked_backends: None, small_group: Path, tmp_path: Path
) -> None:
    """Such as agents at the limit of their episodes."""
    process = BackendProcess(["--model", str(MODEL)], tmp_path / "backend.log", 0, {})
    await process.start(300)
    assert process.pid is not None
    watched = asyncio.create_task(process.keep_running())
    end_for_memory(small_group)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(BackendUnavailable, match=OTHER):
        await watched
    end_for_memory(small_group)
    assert re.search(OTHER, str(process.exit_report()))
    await process.stop()


async def test_a_restart_that_is_given_up_is_reported(
    forked_backends: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The backend was killed when the run ended, which does not wait for it to answer."""
    process = BackendProcess(["--model", str(MODEL)], tmp_path / "backend.log", 3, {})
    await process.start(300)
    watched = asyncio.create_task(process.keep_running())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: "starting it again (1 of 3)" in caplog.text)
    assert process.final_report() is None
    await end_tasks(watched)
    assert process.final_report() == "the backend process was stopped"


@pytest.mark.parametrize("restarts", [3, 1])
async def test_a_port_that_was_taken_for_a_moment_is_waited_for(
    forked_backends: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, restarts: int
) -> None:
    """Unless no restart is left: then the process has ended for this reason."""
    process = BackendProcess(["--model", str(MODEL)], tmp_path / "backend.log", restarts, {})
    url = await process.start(300)
    watched = asyncio.create_task(process.keep_running())
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: free_for(other, url))
        if restarts == 1:
            with pytest.raises(BackendUnavailable, match="Address already in use"):
                await watched
            assert "Address already in use" in str(process.final_report())
            return
        await until(lambda: "starting it again (2 of 3)" in caplog.text)
    await until(lambda: process.restarted_at > 0)
    assert "Address already in use" in caplog.text
    await end_tasks(watched)
    await process.stop()


def free_for(other: socket.socket, url: str) -> bool:
    """Whether the socket has got the port of a URL, at which it listens then."""
    try:
        other.bind(("127.0.0.1", int(url.rpartition(":")[2])))
    except OSError:
        return False
    other.listen()
    return True
