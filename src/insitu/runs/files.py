"""Every file of a run: its name, its format, and what it holds."""

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from insitu.disk.model_files import JOB_LOG


class Format(StrEnum):
    """How a file is written. Files of lines begin with `{"format": 2}`, except for those of plain lines."""

    OBJECT = "a JSON object"
    LIST = "a list of JSON objects"
    LINES = "a JSON object per line"
    PLAIN_LINES = "a JSON object per line, without a first line for the format"
    BLOCKS = "a gzip member of lines per group"
    IMAGE = "PNG"
    DATABASE = "SQLite"
    LOCK = "the process that has locked the folder"


class RunFile(NamedTuple):
    """A file of a run.

    `by_epoch`: the lines of an epoch that is not complete are removed and written again by a run that continues.
    `marks_run`: a folder with this file holds a run.
    """

    format: Format
    by_epoch: bool = False
    marks_run: bool = False


FILES: dict[str, RunFile] = {}
"""All files by name."""


def _file(name: str, format: Format, *, by_epoch: bool = False, marks_run: bool = False) -> str:
    FILES[name] = RunFile(format, by_epoch, marks_run)
    return name


RUN = _file("run.json", Format.OBJECT, marks_run=True)
"""Run id, settings, versions."""
PROGRESS = _file("progress.json", Format.OBJECT)
"""The point from which the run can continue."""
JOURNAL = _file("journal.jsonl", Format.LINES)
"""The finished episodes of the epoch in progress."""
EVENTS = _file("events.jsonl", Format.LINES)
"""When the run was started, forked, continued and ended."""
EPISODES = _file("episodes.jsonl.gz", Format.BLOCKS, by_epoch=True, marks_run=True)
"""Outcome, reward and cost of each episode."""
CALLS = _file("calls.jsonl.gz", Format.BLOCKS, by_epoch=True)
"""The model calls; a call that extends another holds what it adds."""
GROUPS = _file("groups.jsonl", Format.LINES, by_epoch=True)
"""The groups, and where the lines of each are in both files above."""
ADVANTAGES = _file("advantages.jsonl", Format.LINES, by_epoch=True)
"""The advantages of each scored episode, or why it was dropped."""
RESCORES = _file("rescores.jsonl", Format.LINES)
"""Scores given later, by `insitu trajectories rescore`."""
METRICS = _file("training_metrics.jsonl", Format.PLAIN_LINES, by_epoch=True, marks_run=True)
"""The metrics of each epoch."""
PROGRESS_HISTORY = _file("progress_history.jsonl", Format.LINES, by_epoch=True)
"""The earlier points, from which a fork can begin."""
REWARDS = _file("reward_history.json", Format.LIST, marks_run=True)
"""The mean reward of each epoch."""
VALIDATIONS = _file("validation_history.json", Format.LIST, marks_run=True)
"""The score of each validation."""
VALIDATION_SCORES = _file("validation_scores.jsonl", Format.LINES)
"""The scores of each held-out row."""
BEST = _file("best.json", Format.OBJECT)
"""The best validation so far, and its checkpoint."""
WARM_UP = _file("warm_up.json", Format.OBJECT)
"""The result of the warm-up."""
CURRICULUM = _file("curriculum_state.json", Format.OBJECT)
"""What the curriculum has learned about the examples."""
PLOT = _file("reward_plot.png", Format.IMAGE)
"""Training reward and held-out score by epoch."""
INDEX = _file(".index.sqlite", Format.DATABASE)
"""An index of the episodes, made by readers."""
_file(".lock", Format.LOCK)
"""Who writes the run."""
COLLECTIONS = _file("data_collection_progress.jsonl", Format.PLAIN_LINES, by_epoch=True)
"""NeMo Customizer: each collection."""
COLLECTION_HISTORY = _file("collection_history.json", Format.LIST)
"""NeMo Customizer: the same as a list."""
PAIRS = _file("pairs.jsonl", Format.LINES, by_epoch=True)
"""NeMo Customizer: the pairs that are trained."""
FINAL_METRICS = _file("final_metrics.json", Format.OBJECT)
"""NeMo Customizer: how the job has ended."""

BACKEND_FOLDER = "backend"
"""The folder of the embedded backend: its log, checkpoints and jobs."""
CHECKPOINTS = f"{BACKEND_FOLDER}/checkpoints"
LOGGED_JOBS = f"{BACKEND_FOLDER}/{JOB_LOG}"
"""The jobs of versions between two checkpoints."""
JOBS = f"{BACKEND_FOLDER}/jobs"
STARTED_FILE = "started_from.json"
"""In the backend's folder: the model that the training started from, since names such as `latest` change meaning."""
PROMOTION = "promotion.json"
"""In a promoted model's folder: what it was compared with, and its scores by row."""
TRACKERS = "trackers"
"""The folder of experiment trackers."""

BY_EPOCH = tuple(name for name, file in FILES.items() if file.by_epoch)
PLAIN_LINES = tuple(name for name, file in FILES.items() if file.format is Format.PLAIN_LINES)
BLOCKS = tuple(name for name, file in FILES.items() if file.format is Format.BLOCKS)
RUN_FILES = tuple(name for name, file in FILES.items() if file.marks_run)


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES)
