"""The index of a run: made by readers, and never more than what the files say."""

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from marks import slow_after
from test_inspection import Run, episode, failed, show
from test_view import of_epoch, shown, write_run

from insitu.runs.files import INDEX
from insitu.runs.index import RunIndex
from insitu.runs.records import RunProgress
from insitu.runs.summary import read_summary


def content(run: Path) -> list[list[tuple[Any, ...]]]:
    """What the database in a run's directory holds."""
    with closing(sqlite3.connect(run / INDEX)) as database:
        queries = (
            "SELECT * FROM groups ORDER BY id",
            "SELECT * FROM episodes ORDER BY episode",
            "SELECT * FROM epochs",
            "SELECT * FROM advantages ORDER BY episode",
        )
        tables = [database.execute(query).fetchall() for query in queries]
    groups, episodes, epochs, advantages = tables
    return [groups, [row[1:] for row in episodes], epochs, advantages]


def refreshed(run: Path) -> list[list[tuple[Any, ...]]]:
    index = RunIndex(run)
    index.refresh()
    assert index.complete
    assert index.problems == []
    index.close()
    return content(run)


def write(folder: Path) -> Path:
    """A run of two epochs, one of which is over."""
    made = write_run(folder)
    made.add("late", *of_epoch(2, episode(0, "late"), failed(1, "late")))
    made.store.close()
    return folder


def rebuilt(run: Path) -> list[list[tuple[Any, ...]]]:
    (run / INDEX).unlink()
    return refreshed(run)


def test_what_was_read_in_parts_is_what_is_read_at_once(tmp_path: Path) -> None:
    made = write_run(tmp_path)
    refreshed(tmp_path)
    made.add("late", *of_epoch(2, episode(0, "late"), failed(1, "late")))
    made.store.close()
    kept = refreshed(tmp_path)
    assert [len(table) for table in kept] == [5, 10, 1, 5]
    assert rebuilt(tmp_path) == kept


def damaged(run: Path) -> None:
    (run / INDEX).write_bytes(b"no database" * 1000)


def cut(run: Path) -> None:
    data = (run / INDEX).read_bytes()
    (run / INDEX).write_bytes(data[: len(data) // 2])


def of_another_release(run: Path) -> None:
    with closing(sqlite3.connect(run / INDEX)) as database:
        database.executescript("PRAGMA user_version = 99; DROP TABLE episodes;")


def not_closed(run: Path) -> None:
    code = f"""
import os, pathlib
from insitu.runs.index import RunIndex
index = RunIndex(pathlib.Path({str(run)!r}))
index.refresh()
with index.changing():
    index.insert("groups.jsonl", "DELETE FROM episodes", [()])
os._exit(1)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
    assert content(run)[1] == []


@pytest.mark.parametrize("damage", slow_after(2, [damaged, cut, of_another_release, not_closed]))
def test_an_index_that_is_odd_is_built_again(tmp_path: Path, damage: Any) -> None:
    run = write(tmp_path / "run")
    kept = refreshed(run)
    damage(run)
    assert refreshed(run) == kept


@pytest.mark.parametrize("name", [f"{INDEX}-wal", f"{INDEX}-journal"])
def test_a_link_beside_a_received_index_is_not_followed(tmp_path: Path, name: str) -> None:
    run = write(tmp_path / "run")
    kept = refreshed(run)
    with closing(sqlite3.connect(run / INDEX)) as database:
        database.execute("PRAGMA journal_mode = WAL")
    (tmp_path / "private").write_text("private " * 1000)
    (run / name).symlink_to("../private")
    assert refreshed(run) == kept
    assert not (run / name).exists()
    assert (tmp_path / "private").read_text() == "private " * 1000


def test_a_damaged_index_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write(tmp_path / "run")
    damaged(run)
    refreshed(run)
    assert f"{run / INDEX} is built again: file is not a database" in caplog.text


def test_a_run_without_a_place_for_its_index_is_shown(tmp_path: Path) -> None:
    """By a temporary one."""
    run = tmp_path / "run"
    (run / INDEX).mkdir(parents=True)
    write(run)
    assert len(show(run).out.splitlines()) == 10
    assert not [*(run / INDEX).iterdir()]


def test_what_is_shown_twice_is_read_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    show(run)
    inode = (run / INDEX).stat().st_ino
    show(run)
    assert (run / INDEX).stat().st_ino == inode
    assert [len(table) for table in content(run)] == [5, 10, 1, 5]


def test_while_another_machine_runs_it_the_index_is_temporary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.store.close()
    lock = {"pid": 1, "host": "elsewhere.example", "since": "now"}
    (run.folder / ".lock").write_text(json.dumps(lock))
    descriptor = (run.folder / ".lock").open()
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    index = RunIndex(run.folder)
    index.refresh()
    assert index.indexed == (4, 4)
    index.close()
    descriptor.close()
    assert not (run.folder / INDEX).exists()


def test_a_copy_and_a_moved_run_are_indexed_by_their_own_files(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    refreshed(run)
    shutil.copytree(run, tmp_path / "copy")
    made = Run(run, epoch_over=False)
    made.store.cut_to({})
    made.store.close()
    run.rename(tmp_path / "run.1")
    assert [len(table) for table in refreshed(tmp_path / "copy")] == [5, 10, 1, 5]
    assert [len(table) for table in refreshed(tmp_path / "run.1")] == [0, 0, 0, 0]


def test_lines_that_a_run_has_written_again_are_those_of_the_index(tmp_path: Path) -> None:
    """Also of one that is in use meanwhile. The lines are as long as before."""
    made = write_run(tmp_path / "run")
    sizes = made.store.sizes()
    made.add("late", *of_epoch(2, episode(0, "late", reward=0.25)))
    made.store.close()
    with closing(RunIndex(tmp_path / "run")) as reader:
        reader.refresh()
        again = Run(tmp_path / "run", epoch_over=False)
        again.store.cut_to(sizes)
        again.add("late", *of_epoch(2, episode(0, "late", reward=0.75)))
        reader.refresh()
        rewards = "SELECT reward FROM episodes WHERE row_id = 'late'"
        assert [row["reward"] for row in reader.select(rewards)] == [0.75]
    again.store.close()
    kept = content(tmp_path / "run")
    assert rebuilt(tmp_path / "run") == kept


def test_a_file_that_is_deleted_while_it_is_used(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    kept = refreshed(run)
    index = RunIndex(run)
    index.refresh()
    (run / INDEX).unlink()
    assert index.indexed == (5, 5)
    index.refresh()
    assert index.indexed == (5, 5)
    index.close()
    assert content(run) == kept


@pytest.mark.slow
def test_one_of_several_readers_keeps_the_index_while_a_run_writes(tmp_path: Path) -> None:
    """Each has a connection of its own, as if it were a process, and sees what the run has written."""
    made = write_run(tmp_path / "run")
    over, failures = threading.Event(), list[BaseException]()
    counts = list[int]()

    def read() -> None:
        try:
            with closing(RunIndex(tmp_path / "run")) as index:
                while not over.is_set():
                    index.refresh()
                index.refresh()
                [row] = index.select("SELECT count(*) AS episodes FROM episodes JOIN advantages USING (episode)")
                counts.append(row["episodes"])
        except BaseException as error:  # reported by the test
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        row = f"row{number}"
        members = of_epoch(2, episode(0, row), episode(1, row))
        made.add(row, *members)
        made.weigh({0: 0.5}, *members)
    over.set()
    for reader in readers:
        reader.join()
    made.store.close()
    assert failures == []
    assert len(counts) == 3
    assert len({*counts}) == 1
    assert counts[0] >= 120
    kept = refreshed(tmp_path / "run")
    assert [len(table) for table in kept] == [64, 128, 1, 125]
    assert rebuilt(tmp_path / "run") == kept


@pytest.mark.slow
def test_another_process_keeps_its_index_meanwhile(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    with closing(RunIndex(run)) as index:
        index.refresh()
        inode = (run / INDEX).stat().st_ino
        done = subprocess.run(
            [sys.executable, "-m", "insitu", "trajectories", "show", str(run)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert len(done.stdout.splitlines()) == 10
        assert (run / INDEX).stat().st_ino == inode
        index.refresh()
        assert index.indexed == (5, 5)


def test_episodes_that_are_not_in_their_file_yet(tmp_path: Path) -> None:
    """As in a folder that is being copied: their advantages come with them."""
    run = write(tmp_path / "run")
    kept = refreshed(run)
    whole = (run / "episodes.jsonl.gz").read_bytes()
    with closing(RunIndex(run)) as index:
        index.refresh()
        (run / INDEX).unlink()
        os.truncate(run / "episodes.jsonl.gz", len(whole) - 1)
        index.refresh()
        assert index.indexed == (5, 5)
        assert [f"has {len(whole) - 1} bytes, but {len(whole)} were written" in each for each in index.problems] == [
            True
        ]
        (run / "episodes.jsonl.gz").write_bytes(whole)
        index.refresh()
        assert index.problems == []
    assert content(run) == kept


async def test_a_page_shows_what_the_run_writes_and_leaves_its_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = write_run(run)
    made.store.write("progress.json", RunProgress(run_id="run_1", epoch=1).model_dump(mode="json"))
    before = read_summary(run).written
    async with shown(run) as page:
        assert len(await page.episodes()) == 8
        made.add("late", *of_epoch(2, replace(episode(0, "late"))))
        assert (await page.groups())[-1] == (2, "late")
        made.store.close()
        assert len(await page.episodes()) == 9
    assert read_summary(run).written is not None
    assert before is not None
    for path in run.iterdir():
        if path.name != INDEX:
            os.utime(path, (1e9, 1e9))
    (run / ".progress.json.1.draft").touch()  # it would be a problem if it vanished while it is looked at
    assert read_summary(run).written == "2001-09-09T01:46:40+00:00"
