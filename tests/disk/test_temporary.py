"""Temporary folders of processes that end and of processes that are killed."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from insitu.disk.temporary import temporary_folder
from insitu.errors import ConfigError

HOLD = """
import asyncio, sys
from pathlib import Path
from insitu.disk.temporary import temporary_folder

async def hold():
    async with temporary_folder(Path(sys.argv[1])) as folder:
        (folder / "file").touch()
        print(folder, flush=True)
        await asyncio.Event().wait()

asyncio.run(hold())
"""


@contextmanager
def holding(place: Path, **variables: str) -> Iterator[Path]:
    """The folder of a process, which is then killed."""
    command, environment = [sys.executable, "-c", HOLD, place], os.environ | variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield Path(process.stdout.readline().strip())
        finally:
            process.kill()


async def siblings(place: Path) -> tuple[Path, list[Path]]:
    """A folder that has been deleted, and those that were there beside it."""
    async with temporary_folder(place) as folder:
        beside = [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]
    return folder, beside


def test_a_folder_is_deleted_at_the_end_or_by_the_next_process(tmp_path: Path) -> None:
    with holding(tmp_path) as theirs:
        ours, beside = asyncio.run(siblings(tmp_path))
        assert beside == [theirs]
        assert not ours.exists()
        assert (theirs / "file").exists()
    assert (theirs / "file").exists()
    assert asyncio.run(siblings(tmp_path))[1] == []
    assert not theirs.exists()


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / f"insitu-{os.getuid()}").touch()
    with pytest.raises(ConfigError, match=r"workflow.workspace.folder: .* is a link or a file, not a folder"):
        async with temporary_folder(tmp_path, "workflow.workspace.folder"):
            pass


async def test_only_what_processes_have_left_is_deleted(tmp_path: Path) -> None:
    base = tmp_path / f"insitu-{os.getuid()}"
    for name in ("thesis", "run-left"):
        (base / name).mkdir(parents=True)
    async with temporary_folder(tmp_path):
        assert (base / "thesis").exists()
        assert not (base / "run-left").exists()


async def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """It could lead to any folder of the user."""
    (tmp_path / "home/run-2026").mkdir(parents=True)
    (tmp_path / f"insitu-{os.getuid()}").symlink_to("home")
    with pytest.raises(ConfigError, match=r"TMPDIR: .* is a link or a file, not a folder"):
        async with temporary_folder(tmp_path):
            pass
    assert (tmp_path / "home/run-2026").exists()


def test_a_folder_is_in_use_where_its_process_is_not_seen(tmp_path: Path) -> None:
    """From another namespace of processes, such as that of a container with the same /tmp."""
    code = HOLD.replace("await asyncio.Event().wait()", "print(*folder.parent.glob('run-*/file'), flush=True)")
    user = [] if os.getuid() == 0 else ["--user", "--map-current-user"]
    apart = ["unshare", *user, "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make namespaces")
    with holding(tmp_path) as theirs:
        done = subprocess.run(
            [*apart, sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60
        )
        assert str(theirs / "file") in done.stdout, done.stderr
        assert (theirs / "file").exists()
