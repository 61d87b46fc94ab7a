"""Control groups of episodes: those of this machine, and the files of version 2 in a folder."""

import errno
import os
import subprocess
from pathlib import Path

import pytest
from processes import wait_until

from insitu.gateway.cgroups import Cgroup


def proc(folder: Path, mounts: str, groups: str) -> Path:
    """A folder like /proc/self."""
    (folder / "mountinfo").write_text(mounts)
    (folder / "cgroup").write_text(groups)
    return folder


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """The group of this process in a tree of version 2, of which a part is mounted."""
    own = tmp_path / "tree/mine"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("cpu memory pids")
    mount = f"41 31 0:38 /user {tmp_path / 'tree'} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
    proc(tmp_path, mount, "0::/user/mine\n")
    return own


def test_the_files_of_version_2(unified: Path) -> None:
    own = Cgroup.own(unified.parents[1])
    assert own is not None
    group = own.new(2**20, 10)
    folder = Path(group.entrances[0]).parent
    assert group.entrances == [f"{folder}/cgroup.procs"]
    assert folder.parent == unified
    names = {"memory.max": "1048576", "memory.swap.max": "0", "pids.max": "14"}
    assert {path.name: path.read_text() for path in folder.iterdir()} == names
    assert group.exceeded(1.0) is None
    for name, text, limit in (
        ("cpu.stat", "usage_usec 1500000\nuser_usec 1\n", "cpu_seconds"),
        ("memory.events", "low 0\noom 2\noom_kill 1\n", "memory"),
        ("pids.events", "max 3\n", "processes"),
    ):
        (folder / name).write_text(text)
        assert group.exceeded(1.0) == limit
    assert own.new(None, 10).exceeded(None) is None


def test_processes_leave_a_group_that_is_to_have_others_below(unified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = unified / "cgroup.subtree_control"
    control.write_text("")
    (unified / "cgroup.procs").write_text("11\n12\n")
    write, moved = Path.write_text, []

    def busy_until_moved(self: Path, data: str) -> int:
        if self == control and len(moved) < 2:
            raise OSError(errno.EBUSY, "busy")
        moved.extend([data] if self.parent.name == "insitu.main" or self == control else [])
        return write(self, data)

    monkeypatch.setattr(Path, "write_text", busy_until_moved)
    assert Cgroup.own(unified.parents[1]) is not None
    assert moved == ["11", "12", "+memory +pids", "+cpu"]


def test_episodes_share_processors_where_a_group_of_version_1_can_say_so(tmp_path: Path) -> None:
    names = ("memory", "pids", "cpuacct", "cpu")
    for name in names:
        (tmp_path / name).mkdir()
    mounts = [f"41 31 0:38 / {tmp_path / name} rw - cgroup cgroup rw,{name}\n" for name in names]
    groups = [f"{number}:{name}:/\n" for number, name in enumerate(names)]
    for count in (3, 4):
        own = Cgroup.own(proc(tmp_path, "".join(mounts[:count]), "".join(groups)))
        assert own is not None
        entrances = own.new(None, 1).entrances
        assert [Path(each).parent.parent.name for each in entrances] == list(names[:count])


@pytest.mark.parametrize(
    ("mounts", "groups"),
    [
        ("", "0::/"),
        ("41 31 0:38 / /none rw - cgroup2 cgroup2 rw\n", "0::/mine\n"),
        ("41 31 0:38 / /none rw - cgroup cgroup rw,memory\n", "4:memory:/\n3:pids:/\n2:cpuacct:/\n"),
    ],
)
def test_where_none_can_be_made(tmp_path: Path, mounts: str, groups: str) -> None:
    assert Cgroup.own(proc(tmp_path, mounts, groups)) is None


def test_a_group_of_this_machine_ends_with_its_processes() -> None:
    own = Cgroup.own()
    if own is None:
        pytest.skip("this account cannot make control groups")
    group = own.new(2**30, 5)
    join = f"for each in {' '.join(group.entrances)}; do echo 0 > $each; done; sleep 61.5"
    with subprocess.Popen(["sh", "-c", f"({join}) & ({join}) & wait"], start_new_session=True) as process:
        wait_until(lambda: len(Path(group.entrances[0]).read_text().split()) == 2)
        assert group.exceeded(60) is None
        group.remove()
        assert process.wait() == 0
    assert not any(os.path.exists(each) for each in group.entrances)


def test_processes_stay_where_controllers_cannot_be_enabled(unified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are moved only if it is they that are in the way; and groups of others are left alone."""
    (unified / "cgroup.subtree_control").write_text("")
    (unified / "cgroup.procs").write_text(f"{os.getpid()}\n")
    write, others = Path.write_text, unified / "insitu-test-1"
    others.mkdir()
    (others / "cgroup.procs").write_text(f"{os.getpid()}\n")

    def forbidden(self: Path, data: str) -> int:
        if self.name == "cgroup.subtree_control":
            raise OSError(errno.ENOENT, "there is no such controller")
        return write(self, data)

    monkeypatch.setattr(Path, "write_text", forbidden)
    assert Cgroup.own(unified.parents[1]) is None
    monkeypatch.undo()
    assert not (unified / "insitu.main").exists()
    (unified / "cgroup.subtree_control").write_text("memory pids")
    assert Cgroup.own(unified.parents[1]) is not None  # and this process lives
    assert (others / "cgroup.procs").exists()
