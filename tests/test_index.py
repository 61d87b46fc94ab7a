"""The index of a run: kept by the run, made by readers, and never more than what the files say."""

import fcntl
import json
import logging
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_inspection import Run, episode, failed, show
from test_view import of_epoch, shown, write_run

from insitu.runs.files import INDEX
from insitu.runs.index import RunIndex
from insitu.runs.records import RunProgress
from insitu.runs.store import RunStore
from insitu.runs.summary import read_summary


def content(run: Path) -> list[list[tuple[Any, ...]]]:
    """What the database in a run's directory holds."""
    with closing(sqlite3.connect(run / INDEX)) as database:
        queries = (
            "SELECT * FROM groups ORDER BY id",
            "SELECT * FROM episodes ORDER BY episode",
            "SELECT * FROM epochs",
        )
        tables = [database.execute(query).fetchall() for query in queries]
    groups, episodes, epochs = tables
    return [groups, [row[1:] for row in episodes], epochs]


def refreshed(run: Path) -> list[list[tuple[Any, ...]]]:
    index = RunIndex(run)
    index.refresh()
    assert index.complete
    assert index.problems == []
    index.close()
    return content(run)


def write(folder: Path) -> Path:
    """A run whose store has kept the index, with two updates."""
    made = write_run(folder)
    made.store.update_index()
    made.add("late", *of_epoch(2, episode(0, "late"), failed(1, "late")))
    made.store.update_index()
    made.store.close()
    return folder


def test_what_a_run_keeps_is_what_a_reader_makes(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    kept = content(run)
    assert [len(table) for table in kept] == [5, 10, 1]
    assert refreshed(run) == kept
    (run / INDEX).unlink()
    assert refreshed(run) == kept


def damaged(run: Path) -> None:
    (run / INDEX).write_bytes(b"no database" * 1000)


def cut(run: Path) -> None:
    data = (run / INDEX).read_bytes()
    (run / INDEX).write_bytes(data[: len(data) // 2])


def of_another_release(run: Path) -> None:
    with closing(sqlite3.connect(run / INDEX)) as database:
        database.executescript("PRAGMA user_version = 99; DROP TABLE episodes;")


def not_closed_before_a_restart(run: Path) -> None:
    with closing(sqlite3.connect(run / INDEX)) as database:
        database.executescript("UPDATE about SET boot = 'another'; DELETE FROM episodes;")


@pytest.mark.parametrize("damage", [damaged, cut, of_another_release, not_closed_before_a_restart])
def test_an_index_that_cannot_be_trusted_is_made_anew(tmp_path: Path, damage: Any) -> None:
    run = write(tmp_path / "run")
    kept = content(run)
    damage(run)
    assert refreshed(run) == kept


def test_a_damaged_index_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write(tmp_path / "run")
    damaged(run)
    made = Run(run, epoch_over=False)
    made.store.cut_to({name: (run / name).stat().st_size for name in ("episodes.jsonl.gz", "calls.jsonl.gz")})
    made.add("new", *of_epoch(3, episode(0, "new")))
    made.store.update_index()
    made.store.close()
    assert f"{run / INDEX} is damaged (file is not a database): it is made anew" in caplog.text
    assert [row[1:3] for row in content(run)[0]] == [(3, "new")]


def test_a_run_without_a_place_for_its_index_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Readers make a temporary one."""
    run = tmp_path / "run"
    (run / INDEX).mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        write(run)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{run / INDEX} is not kept up to date: unable to open database file")
    assert len(show(run).out.splitlines()) == 10
    assert not [*(run / INDEX).iterdir()]


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
    shutil.copytree(run, tmp_path / "copy")
    made = Run(run, epoch_over=False)
    made.store.cut_to({})
    made.store.close()
    run.rename(tmp_path / "run.1")
    assert [len(table) for table in refreshed(tmp_path / "copy")] == [5, 10, 1]
    assert [len(table) for table in refreshed(tmp_path / "run.1")] == [0, 0, 0]


def test_lines_that_a_run_has_written_again_are_those_of_the_index(tmp_path: Path) -> None:
    made = write_run(tmp_path / "run")
    sizes = made.store.sizes()
    made.add("late", *of_epoch(2, episode(0, "late", reward=0.25)))
    made.store.update_index()
    made.store.close()
    reader = RunIndex(tmp_path / "run")
    reader.refresh()
    again = Run(tmp_path / "run", epoch_over=False)
    again.store.cut_to(sizes)
    again.add("late", *of_epoch(2, episode(0, "late", reward=0.75)))
    again.store.update_index()
    reader.refresh()
    rewards = "SELECT reward FROM episodes WHERE row_id = 'late'"
    assert [row["reward"] for row in reader.select(rewards)] == [0.75]
    reader.close()
    again.store.close()
    kept = content(tmp_path / "run")
    (tmp_path / "run" / INDEX).unlink()
    assert refreshed(tmp_path / "run") == kept


def test_a_file_that_is_deleted_while_it_is_used(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    kept = content(run)
    index = RunIndex(run)
    index.refresh()
    (run / INDEX).unlink()
    assert index.indexed == (5, 5)
    index.refresh()
    assert index.indexed == (5, 5)
    index.close()
    assert content(run) == kept


def test_a_run_and_its_readers_change_the_index_together(tmp_path: Path) -> None:
    """Each has a connection of its own, as if it were a process."""
    made = write_run(tmp_path / "run")
    over, failures = threading.Event(), list[BaseException]()

    def read() -> None:
        index = RunIndex(tmp_path / "run")
        try:
            while not over.is_set():
                index.refresh()
                index.select("SELECT count(*) FROM episodes")
        except BaseException as error:  # reported by the test
            failures.append(error)
        finally:
            index.close()

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        row = f"row{number}"
        members = of_epoch(2, episode(0, row), episode(1, row))
        made.add(row, *members)
        made.weigh({0: 0.5}, *members)
        made.store.update_index()
    over.set()
    for reader in readers:
        reader.join()
    made.store.close()
    assert failures == []
    kept = refreshed(tmp_path / "run")
    assert [len(table) for table in kept] == [64, 128, 1]
    (tmp_path / "run" / INDEX).unlink()
    assert refreshed(tmp_path / "run") == kept


async def test_a_page_shows_what_the_run_writes_and_leaves_its_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = write_run(run)
    made.store.write("progress.json", RunProgress(run_id="run_1", epoch=1).model_dump(mode="json"))
    before = read_summary(run).written
    async with shown(run) as page:
        assert len(await page.episodes()) == 8
        made.add("late", *of_epoch(2, replace(episode(0, "late"))))
        assert (await page.groups())[-1] == (2, "late")
        made.store.update_index()
        made.store.close()
        assert len(await page.episodes()) == 9
    assert read_summary(run).written is not None
    assert before is not None
    for path in run.iterdir():
        if path.name != INDEX:
            os.utime(path, (1e9, 1e9))
    assert read_summary(run).written == "2001-09-09T01:46:40+00:00"


def test_a_store_without_groups_makes_no_index(tmp_path: Path) -> None:
    with closing(RunStore(tmp_path)) as store:
        store.append("journal.jsonl", [{"a": 1}])
        store.update_index()
    assert not (tmp_path / INDEX).exists()
