"""Whether threads wait actively for one another: by what the kernel says of the cores, in a file of the test."""

import os
import threading
from itertools import count
from pathlib import Path

from waiting import until

from insitu.backend.active_waiting import active_waiting, busy_seconds

CORES = sorted(os.sched_getaffinity(0))


def stat(ticks: int) -> str:
    """Each of this process's cores was busy for so many ticks; another one much longer."""
    rows = [f"cpu{core} {ticks} 0 0 5000 700 0 0 0 9 9" for core in CORES]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *rows, "cpu9999 77777 0 0 0 0 0 0 0 0 0", "intr 1 2 3"])


def test_the_cores_of_this_process_are_counted_while_they_are_busy() -> None:
    rows = (
        "cpu  9 9 9 9 9 9 9 9 9 9",
        "cpu0 1 2 4 8 16 32 64 128 256 512",
        "cpu1 100 0 0 900 0 0 0 0 0 0",
        "cpu10 1 1 1",
    )
    text = "\n".join(rows)
    assert busy_seconds(text, {0}) * os.sysconf("SC_CLK_TCK") == 1 + 2 + 4 + 32 + 64 + 128
    assert busy_seconds(text, {0, 1}) * os.sysconf("SC_CLK_TCK") == 231 + 100


def teams() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "insitu-team"]


async def test_a_second_team_is_there_while_other_programs_use_the_cores(tmp_path: Path) -> None:
    (file := tmp_path / "stat").write_text(stat(0))
    ticks = count(1000, 1000)

    def others_are_busy() -> list[threading.Thread]:
        (part := tmp_path / "part").write_text(stat(next(ticks)))
        part.rename(file)
        return teams()

    with active_waiting(file):
        await until(others_are_busy)
        assert len(teams()) == 1
        await until(lambda: not teams())
        await until(others_are_busy)
    await until(lambda: not teams())
    assert "insitu-waiting" not in [thread.name for thread in threading.enumerate()]


def test_other_systems_do_not_say_what_their_cores_do(tmp_path: Path) -> None:
    with active_waiting(tmp_path / "none"):
        assert "insitu-waiting" not in [thread.name for thread in threading.enumerate()]
