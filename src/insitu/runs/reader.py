"""Reads the files in a run's directory, whether the run is in progress, has ended, or is damaged."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from insitu.disk.files import file_size, read_received, reading
from insitu.disk.json_files import (
    AppendedLines,
    Block,
    Line,
    read_block,
    read_line,
    read_object,
    shorter_than_written,
    whole_lines,
)
from insitu.disk.model_files import TrainingRecord, saved_checkpoints
from insitu.errors import ConfigError, InsituError, first_problem
from insitu.runs import files
from insitu.runs.forms import RowScores, checked
from insitu.runs.records import (
    EpochState,
    RunProgress,
    StoredGroup,
    best_validation,
    format_problem,
    restore_calls,
    restore_journaled,
)
from insitu.runs.store import OUTPUT_DIR
from insitu.schemas.episodes import Episode, ModelCall
from insitu.schemas.evaluation import WORKFLOW_OUTPUT
from insitu.wire.http_format import load_json
from insitu.wire.redaction import MASK

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Problems(list[str]):
    """What is missing or damaged in a run, a sentence each."""

    def attempt(self, read: Callable[[], T], default: T) -> T:
        """What a function reads; the default if it fails, which is noted as a problem."""
        try:
            return read()
        except (InsituError, OSError) as error:
            self.note(str(error))
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # JSON of another form
            self.note(f"a file has another form than insitu writes: {type(error).__name__}: {error}")
        return default

    def note(self, problem: str) -> None:
        if problem not in self:
            self.append(problem)


class RunReader:
    """The files of a run; `key` is the option or key that names the directory.

    A file that does not exist has no records. Raises InsituError for one that is damaged, and ConfigError for one of
    another format; an incomplete last line is reported and left out.
    """

    def __init__(self, folder: Path, key: str = "") -> None:
        self.folder = folder
        self.where = f"{key}: {folder}" if key else str(folder)

    def object(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file; None if there is no such file."""
        path = self.folder / name
        return checked(path, path.name, read_object(path)) if path.is_file() else None

    def best(self) -> dict[str, Any] | None:
        """`best.json`; None before a validation. Raises ConfigError if it is missing, InsituError if it is damaged."""
        best = self.object(files.BEST)
        if best is None and best_validation(self.validations()) is not None:
            raise ConfigError(
                f"{self.where} has no {files.BEST}, although it was validated; {self.folder}/latest exists"
            )
        return best

    def warmed_up(self, version: int | None) -> str | None:
        """The checkpoint of this version if the warm-up made it."""
        warm_up = self.object(files.WARM_UP) or {}
        return warm_up.get("checkpoint") if warm_up.get("policy_version") == version else None

    def settings(self, *, required: bool = False) -> dict[str, Any]:
        """The content of `run.json`. Raises InsituError if it is `required` and missing."""
        path = self.folder / files.RUN
        return checked(path, files.RUN, read_object(path)) if required else self.object(files.RUN) or {}

    def config(self) -> dict[str, Any]:
        """The settings of the run's file, with defaults. Raises InsituError if `run.json` has none."""
        if (config := self.settings(required=True).get("config")) is None:
            raise InsituError(f"{self.folder / files.RUN} is damaged: config is missing")
        return dict(config)

    def overrides(self) -> list[tuple[str, str]]:
        """The options of the run's command that set keys of its file, but for secrets and where the run is written."""
        given = self.settings().get("override") or {}
        return [(key, text) for key, text in given.items() if MASK not in text and key != OUTPUT_DIR]

    def options(self) -> list[tuple[str, ...]]:
        """The words of each option of the run's command, as `overrides`; secrets in the others are masked."""
        given = self.settings().get("options") or {}
        return [*given.items(), *(("-o", *each) for each in self.overrides())]

    def validations(self) -> list[dict[str, Any]]:
        """The records of `validation_history.json`; none if the run was never validated."""
        return self._list(files.VALIDATIONS)

    def rewards(self, epoch: int) -> list[dict[str, Any]]:
        """The records of `reward_history.json` up to an epoch."""
        return [record for record in self._list(files.REWARDS) if record["epoch"] <= epoch]

    def _list(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        try:
            with reading(path):
                return checked(path, name, load_json(read_received(path))) if path.exists() else []
        except ValueError as error:
            raise InsituError(f"{path} is not JSON: {error}") from None

    def scores(self) -> list[RowScores]:
        """The validations whose row scores were recorded, in the order they were made."""
        return [RowScores(**record) for record in self.records(files.VALIDATION_SCORES)]

    def progress(self) -> RunProgress | None:
        """None if no run in the folder has begun. Raises ConfigError if the file cannot be used."""
        path = self.folder / files.PROGRESS
        if not path.is_file():
            return None
        try:
            progress = RunProgress.model_validate_json(read_received(path))
        except ValidationError as error:
            raise ConfigError(f"{path} is not the progress of a run: {first_problem(error)}") from None
        if "epoch" not in progress.model_fields_set:  # its default would start the run again
            raise ConfigError(f"{path} is damaged: epoch is missing")
        if problem := format_problem({"format": progress.format}):
            raise ConfigError(f"{path} {problem}")
        return progress

    def history(self, progress: RunProgress) -> dict[int, EpochState]:
        """The state after each complete epoch, from 0, as far as it was recorded; that after the last one always is."""
        path, end = self.folder / files.PROGRESS_HISTORY, progress.sizes.get(files.PROGRESS_HISTORY, 0)
        states: dict[int, EpochState] = {}
        for line in AppendedLines(path).read(end):  # those after it are of an epoch that is not complete
            record = read_line(path, line.number, line.content)
            if "format" in record:
                continue
            try:
                state = EpochState.model_validate(record)
            except ValidationError as error:
                problem = f"{path}, line {line.number} is not the state of an epoch: {first_problem(error)}"
                raise InsituError(problem) from None
            states[state.epoch] = state  # a warm-up comes after the first line of epoch 0
        return {progress.epoch: EpochState.of(progress)} | states

    def sampled_versions(self, states: Mapping[int, EpochState], epoch: int, staleness: int | None = None) -> set[int]:
        """The policy versions from which the epochs after `epoch` are sampled; `staleness`: by default the run's."""
        settings = self.settings()
        recorded = 0 if settings.get("versions") == "latest" else settings.get("staleness", 0)
        ages = range((recorded if staleness is None else staleness) + 1)
        found = (states.get(max(epoch - age, 0)) for age in ages)
        return {state.policy_version for state in found if state is not None and state.policy_version is not None}

    def journal(self, epoch: int) -> list[Episode]:
        """The finished episodes of an epoch, and of later ones, whose groups may be incomplete."""
        records = self.records(files.JOURNAL)
        return [restore_journaled(record) for record in records if record.get("episode", {}).get("epoch", 0) >= epoch]

    def readable(self, name: str, problems: Problems) -> list[dict[str, Any]]:
        """The records of a small file of lines, without those that are damaged, which are noted as one problem."""
        path = self.folder / name
        records, damaged = [], []
        lines: list[Line] = problems.attempt(lambda: [*AppendedLines(path).read()], [])
        for line in lines:
            try:
                records.append(self._record(name, line.number, line.content))
            except InsituError as error:
                damaged.append(str(error))
        if damaged:
            problems.note(damaged[0] + f" (and {len(damaged) - 1} more damaged lines)" * (len(damaged) > 1))
        return [record for record in records if record.keys() != {"format"}]

    def _record(self, name: str, number: int, line: bytes) -> dict[str, Any]:
        """A line of a file, which is a record or `{"format": 2}`."""
        record = read_line(path := self.folder / name, number, line)
        return record if record.keys() == {"format"} else checked(f"{path}, line {number}", name, record)

    def check_episodes(self) -> "RunReader":
        """Returns itself. Raises ConfigError unless the run has recorded episodes."""
        if (self.folder / files.EPISODES).is_file():
            return self
        if (self.folder / WORKFLOW_OUTPUT).is_file():
            raise ConfigError(
                f"{self.where} is the directory of an evaluation, which records answers but no model calls; "
                "give the directory of a finetuning run"
            )
        raise ConfigError(
            f"{self.where} is not a run directory: {files.EPISODES} is missing (it is written to "
            "finetuning.output_dir when the first group completes)"
        )

    def groups(self) -> Iterator[StoredGroup]:
        """The groups in the order they were written.

        Those at the end whose other lines were lost in a crash are left out and reported.
        """
        sizes = {name: file_size(self.folder / name) for name in files.BLOCKS}
        for record in self.records(files.GROUPS):
            blocks = {name: Block(*record["blocks"][name]) for name in files.BLOCKS}
            for name, block in blocks.items():
                if block.end > sizes[name]:
                    missing = shorter_than_written(self.folder / name, sizes[name], block.end)
                    row_id, epoch = record["row_id"], record["epoch"]
                    logger.warning("%s; skipped the groups from row %r of epoch %d on", missing, row_id, epoch)
                    return
            epoch, row_id, size = record["epoch"], record["row_id"], record["num_episodes"]
            rows = record.get("rows", [row_id])
            yield StoredGroup(epoch, row_id, size, blocks[files.EPISODES], blocks[files.CALLS], rows)

    def episode_records(self, groups: Iterable[StoredGroup]) -> Iterator[dict[str, Any]]:
        """The lines of `episodes.jsonl.gz` of groups."""
        for group in groups:
            yield from read_block(self.folder / files.EPISODES, group.episodes)

    def calls(self, group: StoredGroup) -> dict[str, list[ModelCall]]:
        """The calls of a group's episodes that have any, by episode."""
        records = read_block(self.folder / files.CALLS, group.calls)
        of_episode = groupby(records, lambda record: str(record["episode"]))
        return {episode: restore_calls(lines) for episode, lines in of_episode}

    def rescores(self, evaluator: str | None = None, containing: str = "") -> dict[tuple[str, str], Any]:
        """The latest scores of `insitu trajectories rescore`, by episode and evaluator."""
        records = self.records(files.RESCORES, containing)
        return {(r["episode"], r["evaluator"]): r for r in records if evaluator in (None, r["evaluator"])}

    @property
    def own_backend(self) -> bool:
        """Whether the run has started its backend, which keeps the checkpoints in the run's directory."""
        return (self.folder / files.BACKEND_FOLDER / files.STARTED_FILE).is_file()

    def checkpoints(self) -> list[tuple[Path, TrainingRecord]]:
        """The folders of the checkpoints that are complete, oldest first, and their records."""
        return saved_checkpoints(self.folder / files.CHECKPOINTS)

    def versions(self) -> set[int]:
        """The versions above 0 that the run's backend can serve: from a checkpoint, or by training logged jobs."""
        logged = saved_checkpoints(self.folder / files.LOGGED_JOBS)
        return {record.version for _, record in [*self.checkpoints(), *logged]}

    def tokenizer(self) -> Path | None:
        """The folder of a tokenizer: one that the run's backend has written, or that of the model it started from.

        None if the backend was not a child process of the run, or started from a model of the Hub.
        """
        written = next((self.folder / files.CHECKPOINTS).glob("*/tokenizer.json"), None)
        if written is not None:
            return written.parent
        model = self.starting_model()
        return model if model is not None and (model / "tokenizer.json").is_file() else None

    def starting_model(self) -> Path | None:
        """The model that the run's backend started from, a folder or a name of the Hub; None if there is none."""
        try:
            return Path(self.started_from())
        except InsituError:
            return None

    def started_from(self) -> str:
        """The model that the run's backend started from. Raises InsituError if that is not recorded."""
        record = self.object(f"{files.BACKEND_FOLDER}/{files.STARTED_FILE}")
        if record is None:
            raise InsituError(f"{self.folder / files.BACKEND_FOLDER / files.STARTED_FILE} is missing")
        return str(record["model"])

    def jobs(self) -> dict[Path, int | None]:
        """The records of the backend's jobs, and the version that each has made."""
        paths = (self.folder / files.JOBS).glob("job-*.json")
        return {path: checked(path, files.JOBS, read_object(path)).get("policy_version") for path in paths}

    def records(self, name: str, containing: str = "") -> Iterator[dict[str, Any]]:
        """The records of a file of lines, or only those with this text in one of their texts."""
        path, part = self.folder / name, orjson.dumps(containing)[1:-1]
        for number, line in whole_lines(path):
            if number > 1 or name in files.PLAIN_LINES:
                if part in line:
                    yield self._record(name, number, line)
            elif problem := format_problem(read_line(path, number, line)):
                raise ConfigError(f"{self.where}/{name} {problem}")
