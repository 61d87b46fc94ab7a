"""Temporary folders of processes that end and of processes that are killed."""

import asyncio
import os
import subprocess
import sys
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


async def siblings(place: Path) -> tuple[Path, list[Path]]:
    """A folder that has been deleted, and those that were there beside it."""
    async with temporary_folder(place) as folder:
        beside = [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]
    return folder, beside


def test_a_folder_is_deleted_at_the_end_or_by_the_next_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        ours, beside = asyncio.run(siblings(tmp_path))
        assert beside == [theirs]
        assert not ours.exists()
        assert (theirs / "file").exists()
        other.kill()
    assert (theirs / "file").exists()
    assert asyncio.run(siblings(tmp_path))[1] == []
    assert not theirs.exists()


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / f"insitu-{os.getuid()}").touch()
    with pytest.raises(ConfigError, match=r"workflow.workspace.folder: .* is not a folder"):
        async with temporary_folder(tmp_path, "workflow.workspace.folder"):
            pass
