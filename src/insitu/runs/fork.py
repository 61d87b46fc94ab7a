"""Makes a new run from an epoch of another: all that the other one had recorded when that epoch was complete.

Files of checkpoints are hard links, as they are never changed in place; they are copied where the file system has no
such links. Files of lines are copied and cut, as `--resume` cuts them; JSON files are written anew.
"""

import os
import shlex
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from insitu.disk.files import cannot_write, new_folder, writable_folder
from insitu.disk.json_files import shorter_than_written
from insitu.disk.model_files import OPTIMIZER_FILE, RECORD_FILE, check_model, check_optimizer_file
from insitu.errors import ConfigError, InsituError
from insitu.runs import files
from insitu.runs.reader import RunReader
from insitu.runs.records import EpochState, RunProgress, best_validation, checkpoints_of, new_run_id
from insitu.runs.resume import find_run
from insitu.runs.store import RunStore
from insitu.runs.summary import read_summary

KEY = "NEW_DIR"


class Fork(NamedTuple):
    """`command` continues the new run, with the file and the options of the original."""

    run_id: str
    original: str
    command: str


class _Origin:
    """The run to fork: its folder, and the epochs, versions and checkpoints from which it can continue."""

    def __init__(self, folder: Path) -> None:
        progress = find_run(folder, "RUN_DIR")
        if progress is None:
            raise ConfigError(f"RUN_DIR: {folder} holds no run that can continue")
        self.folder, self.progress, self.reader = folder, progress, RunReader(folder)
        if not self.reader.own_backend:
            raise ConfigError(
                f"RUN_DIR: the backend of {folder} was not started by the run and keeps the checkpoints elsewhere: "
                "such a run cannot be forked"
            )
        self.checkpoints = {record.version: path for path, record in self.reader.checkpoints()}
        """The folders that still exist, by policy version."""
        self.states = self.reader.history(progress)

    def epochs(self) -> list[int]:
        """The epochs with a checkpoint and its optimizer state, or with the initial weights.

        The weights of earlier epochs are needed too, with `staleness`.
        """
        return [epoch for epoch, state in sorted(self.states.items()) if self._has(epoch, state.policy_version)]

    def _has(self, epoch: int, version: int | None) -> bool:
        folder = self.checkpoints.get(version) if version else None
        if version != 0 and (folder is None or not (folder / OPTIMIZER_FILE).is_file()):
            return False
        return self.reader.sampled_versions(self.states, epoch) <= {0, *self.checkpoints}


def fork_run(run: Path, target: Path, epoch: int) -> Fork:
    """Writes a run to `target` that continues after an epoch of another run, which may be in progress.

    The run is there completely, or not at all. Raises ConfigError if there is no such epoch, or what it needs was
    deleted; InsituError if a file is damaged or cannot be written.
    """
    if target.exists():
        raise ConfigError(f"{KEY}: {target} exists already; choose another name")
    origin, given = _Origin(run), target
    state = _state_after(origin, epoch)
    settings = origin.reader.settings(required=True)
    changes = {"run_id": new_run_id(), "status": "forked", "error": None, "submitted_epoch": 0}
    progress = state.restore(origin.progress).model_copy(update=changes)
    for name, size in state.sizes.items():
        if not (run / name).is_file():
            raise InsituError(f"{run / name} is missing: the run cannot be copied")
        if (written := (run / name).stat().st_size) < size:
            raise InsituError(shorter_than_written(run / name, written, size))
    target = writable_folder(target.absolute().parent, KEY) / target.name
    states = _states_until(origin, epoch, target)
    try:
        with new_folder(target) as draft:
            _copy_backend(origin, state.policy_version or 0, draft / files.BACKEND_FOLDER)
            for name in state.sizes:
                shutil.copyfile(run / name, draft / name)
            with closing(RunStore(draft, KEY)) as store:
                _write_files(origin, store, progress, states, settings)
    except OSError as error:
        raise cannot_write(target, error) from error
    words = ["insitu", "finetune", "--config_file", str(settings.get("source"))]
    words += [*chain(*origin.reader.options()), "--resume", str(given)]
    return Fork(progress.run_id, origin.progress.run_id, shlex.join(words))


def _state_after(origin: _Origin, epoch: int) -> EpochState:
    """Raises ConfigError naming the epochs that can be forked."""
    if epoch in (available := origin.epochs()):
        return origin.states[epoch]
    problem = (
        f"epoch {epoch} of {origin.folder} was not recorded, or its checkpoint or optimizer state was deleted or not "
        "written (see `keep` of the trainer adapter)"
    )
    if epoch > origin.progress.epoch:
        problem = f"{origin.folder} has no complete epoch {epoch}"
    forkable = ", ".join(map(str, available)) or "none"
    raise ConfigError(f"--epoch: {problem}; epochs that can be forked: {forkable}")


def _states_until(origin: _Origin, epoch: int, target: Path) -> list[EpochState]:
    """The states of the new run. Their jobs name their checkpoints in its folder."""
    checkpoints = target / files.CHECKPOINTS
    states = []
    for state in (state for number, state in sorted(origin.states.items()) if number <= epoch):
        if state.job is not None and (made := (state.job.metadata or {}).get("checkpoint")) is not None:
            metadata = {**(state.job.metadata or {}), "checkpoint": str(checkpoints / Path(made).name)}
            state = state.model_copy(update={"job": state.job.model_copy(update={"metadata": metadata})})
        states.append(state)
    return states


def _copy_backend(origin: _Origin, version: int, target: Path) -> None:
    """The checkpoints and jobs up to a version. Raises InsituError if the latest of these is damaged."""
    source = origin.folder / files.BACKEND_FOLDER
    target.mkdir()
    shutil.copyfile(source / files.STARTED_FILE, target / files.STARTED_FILE)
    if version:
        check_model(origin.checkpoints[version])
        check_optimizer_file(origin.checkpoints[version], required=True)
    for number, folder in sorted(origin.checkpoints.items()):
        copied = target / "checkpoints" / folder.name
        if number <= version and not _link_files(folder, copied) and number == version:
            raise InsituError(f"{folder} has been deleted meanwhile: fork a later epoch")
    (target / "jobs").mkdir()
    for path, made in origin.reader.jobs().items():
        if (made or version + 1) <= version:
            shutil.copyfile(path, target / "jobs" / path.name)


def _link_files(source: Path, target: Path) -> bool:
    """Whether the checkpoint is there with its optimizer state. The run in progress may delete both, or that alone."""
    target.mkdir(parents=True)
    with suppress(FileNotFoundError):
        for path in source.iterdir():
            with suppress(FileNotFoundError):
                _link(path, target / path.name)
    if not source.exists() or not (target / RECORD_FILE).exists():
        shutil.rmtree(target)
    return (target / OPTIMIZER_FILE).exists()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links; raises again if there is no such file
        shutil.copyfile(source, target)


def _write_files(
    origin: _Origin, store: RunStore, progress: RunProgress, states: list[EpochState], settings: Mapping[str, Any]
) -> None:
    """What is not copied as it is, `progress.json` last."""
    run, epoch = origin.folder, progress.epoch
    scores = [line for line in origin.reader.records(files.VALIDATION_SCORES) if line["epoch"] <= epoch]
    rescores = [  # of episodes named run/epoch/row/generation/attempt
        line for line in origin.reader.records(files.RESCORES) if int(line["episode"].split("/")[1]) <= epoch
    ]
    for name, lines in ((files.VALIDATION_SCORES, scores), (files.RESCORES, rescores)):
        if lines:
            store.append(name, lines)
    store.cut_to(progress.sizes)
    store.append(files.PROGRESS_HISTORY, [state.model_dump(mode="json") for state in states])
    original = {"run": str(run.absolute()), "run_id": origin.progress.run_id, "epochs": read_summary(run).epochs}
    store.record_event("forked", epoch=epoch, **original)
    store.write(files.RUN, {**settings, "run_id": progress.run_id})
    if epoch:
        store.write(files.REWARDS, origin.reader.rewards(epoch))
    if epoch and progress.curriculum is not None:
        store.write(files.CURRICULUM, progress.curriculum.model_dump(mode="json"))
    if progress.warmed_up:
        warm_up = origin.reader.object(files.WARM_UP) or {}
        store.write(files.WARM_UP, warm_up | {"checkpoint": store.relative(warm_up.get("checkpoint"))})
    validations = [record for record in origin.reader.validations() if record["epoch"] <= epoch]
    if validations:
        store.write(files.VALIDATIONS, validations)
    if (best := best_validation(validations)) is not None:
        version = best["policy_version"]
        made = checkpoints_of(state.job for state in states if state.job is not None)
        checkpoint = made.get(version) or origin.reader.warmed_up(version)
        store.write(files.BEST, {**best, "checkpoint": store.relative(checkpoint)})
    store.write(files.PROGRESS, progress.model_copy(update={"sizes": store.sizes()}).model_dump(mode="json"))
