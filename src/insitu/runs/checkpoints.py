"""Resolves the name of a run, `best` or `latest` to a checkpoint.

best, latest, step_N            of the run in `finetuning.output_dir`
RUN_DIR/best, RUN_DIR/latest    of another run; RUN_DIR/step_N too
RUN_DIR                         its best, or its latest if it was never validated
FOLDER                          any folder of weights
"""

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from insitu.config import Config, Moved, moved_path
from insitu.disk.model_files import JOB_LOG
from insitu.errors import ConfigError
from insitu.runs.files import BEST, CHECKPOINTS, LOGGED_JOBS, holds_run
from insitu.runs.reader import RunReader
from insitu.runs.store import OUTPUT_DIR

NAMES = ("best", "latest")
_STEP = re.compile(r"step_\d+")


class Checkpoint(NamedTuple):
    """A folder of weights, None for those that the run started from; `note` says how it was chosen, if it was."""

    folder: Path | None
    note: str | None = None


def find_checkpoint(config: Config, name: str | Path, key: str, moved: Moved | None = None) -> Checkpoint:
    """Raises ConfigError naming `key`, the option or key of the file, if there are no such weights."""
    path, find = Path(name), partial(config.find_path, key=key, moved=moved)
    if str(path) in NAMES:
        return _of_own_run(config, str(path), key, moved)
    try:
        folder = find(path)
    except ConfigError:
        if not _is_name(path.name):
            raise
        if path.name == str(path):
            return _of_own_run(config, path.name, key, moved)
        if holds_run(run := find(path.parent)):
            return _of_run(run, path.name, key)
        if path.name not in NAMES:
            _kept(run / path.name, key)
        raise
    return Checkpoint(folder) if _is_model(folder) or not holds_run(folder) else _of_run(folder, None, key)


def _of_own_run(config: Config, name: str, key: str, moved: Moved | None) -> Checkpoint:
    run = moved_path(config.run_dir, moved)
    if not holds_run(run):
        another = f"that of another is RUN_DIR/{name}"
        raise ConfigError(f"{key}: {name} is of the run in {OUTPUT_DIR}, but {run} holds no run; {another}")
    return _of_run(run, name, key)


def _is_name(text: str) -> bool:
    """Whether it names a checkpoint of a run."""
    return text in NAMES or _STEP.fullmatch(text) is not None


def _is_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.json", "adapter_config.json"))


def model_of_run(model: str, key: str) -> str:
    """The folder of the weights that RUN_DIR, RUN_DIR/best, latest or step_N names; any other model as it is.

    Of weights that were not trained, the model that the run started from. Raises ConfigError naming `key` if the run
    has no such weights.
    """
    path = Path(model)
    run, name = (path.parent, path.name) if _is_name(path.name) else (path, None)
    if _is_model(path) or not holds_run(run):
        return model
    if (folder := _of_run(run, name, key).folder) is not None:
        return str(folder)
    if not RunReader(run).own_backend:
        before = f"the best weights of {run} are those that its backend at a url had before training"
        raise ConfigError(f"{key}: {before}; name that model")
    return RunReader(run).started_from()


def checkpoint_of_run(run: Path, name: str | None, key: str) -> Path:
    """The folder of a run's `best`, `latest` or `step_N`; None: its best, or its latest if it was never validated.

    Raises ConfigError naming `key` if there is none.
    """
    if not holds_run(run):
        raise ConfigError(f"RUN_DIR: {run} holds no run of insitu finetune")
    if name is not None and not _is_name(str(name)):
        raise ConfigError(f"{key}: {name!r} is not a checkpoint; allowed: {', '.join(NAMES)}, step_N")
    folder, note = _of_run(run, name, key)
    if folder is None:
        newest = "`latest` is the newest version" if _steps(run / CHECKPOINTS) else _why_none(run)
        raise ConfigError(f"{key}: the checkpoint is {note}: these weights were not trained; {newest}")
    return folder


def _kept(folder: Path, key: str) -> Path:
    """A checkpoint's folder. Raises ConfigError if it does not exist where others do."""
    kept = [path.name for path in _steps(folder.parent)]
    if folder.name not in kept:
        if (folder.parents[1] / JOB_LOG / folder.name).is_dir():
            raise ConfigError(
                f"{key}: {folder} was not written: only its job is logged; checkpoints there: "
                f"{', '.join(kept) or 'none'} (the key `keep.snapshots` of the trainer adapter says which are written; "
                "`insitu finetune --resume` writes the best and the latest when the run ends)"
            )
        raise ConfigError(
            f"{key}: {folder} was deleted or never made; checkpoints there: {', '.join(kept) or 'none'} (the key "
            "`keep` of the trainer adapter says which are kept)"
        )
    return folder


def _steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step_*"), key=lambda path: (len(path.name), path.name))


def _why_none(run: Path) -> str:
    config = RunReader(run).settings(required=True).get("config") or {}
    block = (config.get("trainer_adapters") or {}).get((config.get("finetuning") or {}).get("trainer_adapter")) or {}
    starts_backend = block.get("model") is not None
    return "no job of the run has completed" if starts_backend else "a backend at a url keeps its own elsewhere"


def _of_run(run: Path, name: str | None, key: str) -> Checkpoint:
    """The checkpoint of this name; None: the best, or the latest if the run was never validated."""
    saved = run / CHECKPOINTS
    if name is not None and name not in NAMES:
        return Checkpoint(_kept(saved / name, key), f"of {run}")
    record = None if name == "latest" else RunReader(run, key).best()
    if name == "latest" or (name is None and record is None):
        folders = _steps(saved)
        if not folders:
            raise ConfigError(f"{key}: {saved} holds no checkpoints; {_why_none(run)}")
        newer = [path.name for path in _steps(run / LOGGED_JOBS) if path.name > folders[-1].name]
        more = f" that is written: of {', '.join(newer)} only the jobs are logged" if newer else ""
        return Checkpoint(folders[-1], f"the latest of {run}{more}")
    if record is None:
        raise ConfigError(f"{key}: {run} has no {BEST}: it was never validated; {run}/latest is its newest")
    note = f"the best of {run}: {record.get('avg_reward')} at epoch {record.get('epoch')}"
    checkpoint = record.get("checkpoint")
    if checkpoint is None:
        return Checkpoint(None, f"{note}, before training")
    folder = run / checkpoint
    if not folder.is_dir():
        if saved.is_dir():
            _kept(folder, f"{key}: {run / BEST}")
        raise ConfigError(f"{key}: {run / BEST} names {checkpoint}, which does not exist here")
    return Checkpoint(folder, note)
