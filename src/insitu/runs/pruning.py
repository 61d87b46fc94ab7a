"""Deletes checkpoints and job records of runs that have ended, but nothing that a later command may need.

Kept are the best and the latest checkpoint, those with an optimizer state, from which `--resume` and forks continue,
those from which a run with `staleness` samples then, those that another run has started from, and the job records of
these. Runs are looked for beside the folders that are
searched; checkpoints have the same name there as in a copy, or through a link.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from insitu.disk.files import delete_folder, writing
from insitu.disk.folder_lock import FolderLock
from insitu.disk.model_files import OPTIMIZER_FILE
from insitu.errors import InsituError
from insitu.runs.reader import RunReader
from insitu.runs.summary import find_runs, read_summary

ENDED = ("completed", "failed", "interrupted")
"""The states of a run that has recorded its end."""


class Surplus(NamedTuple):
    """What can be deleted of a run; `problem` says why nothing can."""

    run: Path
    checkpoints: Sequence[Path] = ()
    jobs: Sequence[Path] = ()
    problem: str | None = None


def find_surplus(folders: Sequence[Path]) -> list[Surplus]:
    """What can be deleted of each run in folders, and up to three levels below them."""
    runs = [*find_runs(folders)]
    beside = find_runs([*folders, *{run.resolve().parent for run in runs}], links=True)
    models = (RunReader(run).starting_model() for run in (*runs, *beside))
    started_from = {_place(model) for model in models if model is not None}
    return [_surplus_of(run, started_from) for run in runs]


def _place(checkpoint: Path) -> tuple[str, ...]:
    """Where a checkpoint is in its run, with the run's name: the same after the project was moved or copied."""
    return checkpoint.resolve().parts[-4:]


def _surplus_of(run: Path, started_from: Collection[tuple[str, ...]]) -> Surplus:
    summary = read_summary(run)
    if summary.status not in ENDED or summary.problems:
        return Surplus(run, problem="; ".join(summary.problems) or f"it is {summary.status}")
    try:
        return _surplus(run, started_from)
    except InsituError as error:
        return Surplus(run, problem=str(error))


def _surplus(run: Path, started_from: Collection[tuple[str, ...]]) -> Surplus:
    reader = RunReader(run)
    progress, saved = reader.progress(), reader.checkpoints()
    if not reader.own_backend or progress is None or (served := progress.policy_version) is None:
        return Surplus(run)
    sampled = reader.sampled_versions(reader.history(progress), progress.epoch)
    best = Path((reader.best() or {}).get("checkpoint") or "none").name
    surplus = {
        record.version: path
        for path, record in saved[:-1]
        if record.version < served
        and record.version not in sampled
        and path.name != best
        and not (path / OPTIMIZER_FILE).exists()
        and not path.is_symlink()
        and _place(path) not in started_from
    }
    kept = {record.version for _, record in saved} - surplus.keys()
    jobs = [path for path, made in sorted(reader.jobs().items()) if (made or 0) <= served and made not in kept]
    return Surplus(run, [*surplus.values()], jobs)


def freed_bytes(surplus: Iterable[Surplus]) -> int:
    """What the deletion frees on the disk: files that a fork has too stay there."""
    links: Counter[tuple[int, int]] = Counter()
    freed = 0
    for each in surplus:
        for path in [*each.jobs, *(file for folder in each.checkpoints for file in folder.rglob("*"))]:
            if not path.exists():  # deleted by now
                continue
            status = path.lstat()
            links[key := (status.st_dev, status.st_ino)] += 1
            freed += status.st_size * (links[key] == status.st_nlink)
    return freed


def delete(surplus: Surplus) -> None:
    """Raises ConfigError if the run is in progress by now, and InsituError if something cannot be deleted."""
    with FolderLock(surplus.run, "RUN_DIR"):
        for path in (*surplus.checkpoints, *surplus.jobs):
            with writing(path):
                delete_folder(path) if path.is_dir() else os.unlink(path)
