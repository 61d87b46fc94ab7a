"""Every file of a run: its name, its format, and what it holds.

No other module has such a name as a literal.
"""

from enum import StrEnum
from typing import NamedTuple


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
    holds: str
    by_epoch: bool = False
    marks_run: bool = False


RUN = "run.json"
PROGRESS = "progress.json"
PROGRESS_HISTORY = "progress_history.jsonl"
JOURNAL = "journal.jsonl"
EVENTS = "events.jsonl"
EPISODES = "episodes.jsonl.gz"
CALLS = "calls.jsonl.gz"
GROUPS = "groups.jsonl"
ADVANTAGES = "advantages.jsonl"
RESCORES = "rescores.jsonl"
METRICS = "training_metrics.jsonl"
REWARDS = "reward_history.json"
VALIDATIONS = "validation_history.json"
VALIDATION_SCORES = "validation_scores.jsonl"
BEST = "best.json"
WARM_UP = "warm_up.json"
CURRICULUM = "curriculum_state.json"
PLOT = "reward_plot.png"
INDEX = ".index.sqlite"
COLLECTIONS = "data_collection_progress.jsonl"
COLLECTION_HISTORY = "collection_history.json"
PAIRS = "pairs.jsonl"
SUBMISSION = "submission.json"
FINAL_METRICS = "final_metrics.json"

FILES = {
    RUN: RunFile(Format.OBJECT, "run id, settings, versions", marks_run=True),
    PROGRESS: RunFile(Format.OBJECT, "the point from which the run can continue"),
    JOURNAL: RunFile(Format.LINES, "the finished episodes of the epoch in progress"),
    EVENTS: RunFile(Format.LINES, "when the run was started, forked, continued and ended"),
    EPISODES: RunFile(Format.BLOCKS, "outcome, reward and cost of each episode", by_epoch=True, marks_run=True),
    CALLS: RunFile(Format.BLOCKS, "the model calls; a call that extends another holds what it adds", by_epoch=True),
    GROUPS: RunFile(Format.LINES, "the groups, and where the lines of each are in both files above", by_epoch=True),
    ADVANTAGES: RunFile(Format.LINES, "the advantages of each scored episode, or why it was dropped", by_epoch=True),
    RESCORES: RunFile(Format.LINES, "scores given later, by `insitu trajectories rescore`"),
    METRICS: RunFile(Format.PLAIN_LINES, "the metrics of each epoch", by_epoch=True, marks_run=True),
    PROGRESS_HISTORY: RunFile(Format.LINES, "the earlier points, from which a fork can begin", by_epoch=True),
    REWARDS: RunFile(Format.LIST, "the mean reward of each epoch", marks_run=True),
    VALIDATIONS: RunFile(Format.LIST, "the score of each validation", marks_run=True),
    VALIDATION_SCORES: RunFile(Format.LINES, "the scores of each held-out row"),
    BEST: RunFile(Format.OBJECT, "the best validation so far, and its checkpoint"),
    WARM_UP: RunFile(Format.OBJECT, "the result of the warm-up"),
    CURRICULUM: RunFile(Format.OBJECT, "what the curriculum has learned about the examples"),
    PLOT: RunFile(Format.IMAGE, "training reward and held-out score by epoch"),
    INDEX: RunFile(Format.DATABASE, "an index of the episodes, made again if it is deleted"),
    ".lock": RunFile(Format.LOCK, "who writes the run"),
    COLLECTIONS: RunFile(Format.PLAIN_LINES, "NeMo Customizer: each collection", by_epoch=True),
    COLLECTION_HISTORY: RunFile(Format.LIST, "NeMo Customizer: the same as a list"),
    PAIRS: RunFile(Format.LINES, "NeMo Customizer: the pairs that are trained", by_epoch=True),
    SUBMISSION: RunFile(Format.OBJECT, "NeMo Customizer: the state of the job, in runs of earlier releases"),
    FINAL_METRICS: RunFile(Format.OBJECT, "NeMo Customizer: how the job has ended"),
}

BACKEND_FOLDER = "backend"
"""The folder of the embedded backend: its log, checkpoints and jobs."""
CHECKPOINTS = f"{BACKEND_FOLDER}/checkpoints"
STARTED_FILE = "started_from.json"
"""In the backend's folder: the model that the training started from, since names such as `latest` change meaning."""
TRACKERS = "trackers"
"""The folder of experiment trackers."""

BY_EPOCH = tuple(name for name, file in FILES.items() if file.by_epoch)
PLAIN_LINES = tuple(name for name, file in FILES.items() if file.format is Format.PLAIN_LINES)
BLOCKS = tuple(name for name, file in FILES.items() if file.format is Format.BLOCKS)
RUN_FILES = tuple(name for name, file in FILES.items() if file.marks_run)
