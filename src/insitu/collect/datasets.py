"""Loads datasets: each row becomes an item with its id, input, expected answer and all columns.

Rows come from a file, or from a package, such as the tasks of an environment:

    @register_dataset_loader(config_type=TasksConfig)        # class TasksConfig(DatasetConfig, name="tasks")
    def tasks(block: TasksConfig, config: Config) -> Iterator[dict]: ...
"""

import codecs
import csv
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from insitu.config import Config, Moved
from insitu.disk.files import read_rows
from insitu.errors import ConfigError, needing, not_found
from insitu.registry import register_dataset_loader, registry
from insitu.schemas.components import WORKFLOW, DatasetBaseConfig, FunctionBaseConfig
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.kinds import DATASET, FUNCTION
from insitu.schemas.steps import IntermediateStep, read_step
from insitu.wire.json_values import has_lone_surrogate, json_form

Rows = Iterator[dict[str, Any]]


class StructureConfig(BaseModel):
    """The column names of a dataset."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    question_key: str = "question"
    """The workflow's input."""
    answer_key: str = "answer"
    """The expected answer, for evaluators; optional."""
    expected_trajectory_key: str = "expected_intermediate_steps"
    """The expected steps, for evaluators; optional."""
    generated_answer_key: str = "generated_answer"
    """An existing answer of the workflow, used with `--skip_workflow` and `--skip_completed_entries`."""
    trajectory_key: str = "intermediate_steps"
    """The steps of the existing answer."""


class ColumnValuesConfig(BaseModel):
    """Rows, by values of their columns."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    field: dict[str, list[Any]] = Field(default_factory=dict)
    """For each of these columns, values; compared as text."""

    def check(self, columns: Iterable[str], where: str) -> None:
        for column in self.field:
            if column not in columns:
                raise ConfigError(not_found(f"{where}: the column", column, columns))

    def matches(self, row: dict[str, Any]) -> list[bool]:
        """For each column, whether the row has one of the values."""
        return [str(row.get(column)) in map(str, values) for column, values in self.field.items()]


class RowFilterConfig(BaseModel):
    """Which rows of a dataset are used."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    allowlist: ColumnValuesConfig = Field(default_factory=ColumnValuesConfig)
    """Only rows with one of the values in each of these columns."""
    denylist: ColumnValuesConfig = Field(default_factory=ColumnValuesConfig)
    """No rows with one of the values in any of these columns."""

    def allows(self, row: dict[str, Any]) -> bool:
        return all(self.allowlist.matches(row)) and not any(self.denylist.matches(row))


class DatasetConfig(DatasetBaseConfig):
    """Rows, and the names of their columns."""

    id_key: str = "id"
    """Column with the row id; rows without it are numbered from 0."""
    structure: StructureConfig = Field(default_factory=StructureConfig)
    """Column names."""
    filter: RowFilterConfig | None = None
    """Which rows are used, of this dataset and not of others that take its place."""

    def origin(self, config: Config) -> dict[str, Any]:
        """Where rows that are in no file come from, for `run.json`: names, and versions of packages."""
        return {}


class FileDatasetConfig(DatasetConfig):
    """A file of rows."""

    file_path: Path
    """Path relative to the working directory or, if it does not exist there, to the folder of the YAML file."""

    @property
    def rows_file(self) -> Path:
        return self.file_path


def loads(data: bytes) -> Any:
    """Parses JSON in UTF-8: integers of any size, also with a byte order mark or lone surrogates.

    Raises ValueError for what is no JSON, and for what a row would lose: a number that is not finite, a key twice.
    """
    text = data.decode("utf-8-sig", errors="strict")
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {next(key for key in keys if keys.count(key) > 1)!r:.80} twice")
    return values


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.80} is not a finite number")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
_UTF16 = dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16")
_NOT_UTF8 = {b"\x1f\x8b": "compressed by gzip: decompress it", **_UTF16}
"""How files begin that are not the text that their names promise."""


def _check_text(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(2)
    if (kind := _NOT_UTF8.get(start)) is not None:
        advice = ": write it in UTF-8" if kind == "UTF-16" else ""
        raise ConfigError(f"dataset {path} is {kind}{advice}")


def _json_rows(path: Path) -> Rows:
    _check_text(path)
    try:
        data = loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"dataset {path} cannot be read: {error}") from error
    if not isinstance(data, list):
        raise ConfigError(f"dataset {path} must hold a list of rows, not {type(data).__name__}")
    yield from data


def _jsonl_rows(path: Path) -> Rows:
    _check_text(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield loads(line)
                except ValueError as error:
                    said = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                    raise ConfigError(f"dataset {path}, line {number} is not valid JSON: {said}") from error


def _csv_rows(path: Path) -> Rows:
    _check_text(path)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = [*(reader.fieldnames or ())]
        if twice := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
            raise ConfigError(f"dataset {path} has the column {twice[0]!r:.80} twice")
        for number, row in enumerate(reader, 1):
            if None in row or None in row.values():
                raise ConfigError(f"dataset {path}, row {number} has a different number of fields than the header")
            yield row


def _table_rows(path: Path, reader: str) -> Rows:
    try:
        with needing("tables", f"dataset {path}"):
            import polars

            table = getattr(polars, reader)(path)
    except ConfigError:
        raise
    except Exception as error:  # polars, fastexcel and the readers below them have no common base class
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"dataset {path} cannot be read: {reason}") from error
    for number, row in enumerate(table.iter_rows(named=True), 1):
        for column, value in row.items():
            if not _is_finite(value):
                raise ConfigError(
                    f"dataset {path}, row {number}: {column} has a number that is not finite, such as NaN"
                )
        yield row


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


for _name, _reader in (
    ("json", _json_rows),
    ("jsonl", _jsonl_rows),
    ("csv", _csv_rows),
    ("parquet", partial(_table_rows, reader="read_parquet")),
    ("xls", partial(_table_rows, reader="read_excel")),
):
    _config = type(f"{_name.capitalize()}DatasetConfig", (FileDatasetConfig,), {"__module__": __name__}, name=_name)
    register_dataset_loader(config_type=_config)(_reader)

_BY_SUFFIX = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet", ".xls": "xls", ".xlsx": "xls"}


def file_format(file: Path) -> str:
    """The `_type` of a dataset by the suffix of its file; raises ConfigError if there is none."""
    if file.suffix.lower() not in _BY_SUFFIX:
        raise ConfigError(not_found(f"dataset {file}: the file format", file.suffix, _BY_SUFFIX))
    return _BY_SUFFIX[file.suffix.lower()]


@dataclass(frozen=True)
class Dataset:
    """Where rows come from: a file in the format `kind`, or the package that the block of this `_type` names."""

    config: Config
    block: DatasetConfig
    kind: str
    file: Path | None

    def __str__(self) -> str:
        return str(self.file) if self.file is not None else f"_type: {self.kind}"

    @property
    def label(self) -> str:
        """The name as tables show it: a file relative to the working directory."""
        return str(self) if self.file is None else os.path.relpath(self.file)

    def rows(self) -> Rows:
        """Raises ConfigError for an unknown format, and for a file or package that cannot be read."""
        registration = registry.find(DATASET, self.kind)
        if registration is None:
            raise ConfigError(registry.unknown(DATASET, "eval.general.dataset: _type", self.kind))
        if self.file is not None:
            read_rows.add(self.file.resolve())
        try:
            yield from registration.factory(*((self.block, self.config) if self.file is None else (self.file,)))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"dataset {self} cannot be read: {error}") from error

    def record(self) -> dict[str, Any]:
        """The dataset as `run.json` names it, with the digest of the file or of the rows."""
        if self.file is not None:
            with self.file.open("rb") as opened:
                return {"file": str(self.file), "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
        digest = hashlib.sha256()
        for row in self.rows():
            digest.update(json.dumps(row, sort_keys=True, default=json_form).encode() + b"\n")
        return {"source": self.kind, **self.block.origin(self.config), "sha256": digest.hexdigest()}


def find_dataset(config: Config, path: str | Path | None = None, moved: Moved | None = None) -> Dataset:
    """The configured dataset, or the file at `path`, whose format follows from its suffix."""
    block = dataset_config(config)
    if path is not None:
        return Dataset(config, block, file_format(Path(path)), config.find_path(path, "dataset", moved))
    if config.eval.dataset is None:
        raise ConfigError(f"{config.source}: eval.general.dataset is missing, and no dataset was given")
    file = block.rows_file
    if file is not None:
        file = config.find_path(file, "eval.general.dataset.file_path", moved)
    return Dataset(config, block, block.type, file)


def load_dataset(
    config: Config, path: str | Path | None = None, answered: bool = False, moved: Moved | None = None
) -> list[EvalInputItem]:
    """The rows of the configured dataset, or of `path` in the format of its suffix, in their order there.

    `answered`: also reads precomputed answers, steps and repetitions, as in `workflow_output.json`. Raises ConfigError
    naming the dataset and row for a missing key, a row that is not a mapping, invalid steps, or a duplicate id.
    """
    dataset = find_dataset(config, path, moved)
    items = _items(dataset, answered)
    if items and path is None and (rows := dataset.block.filter) is not None:
        columns = dict.fromkeys(column for item in items for column in item.full_dataset_entry)
        for key in ("allowlist", "denylist"):
            getattr(rows, key).check(columns, f"eval.general.dataset.filter.{key}")
        items = [item for item in items if rows.allows(item.full_dataset_entry)]
        if not items:
            raise ConfigError(f"eval.general.dataset.filter: dataset {dataset} has no row that it allows")
    if not items:
        raise ConfigError(f"dataset {dataset} has no rows")
    columns = dict.fromkeys(column for item in items for column in item.full_dataset_entry)
    for (section, name), block in () if answered else config.blocks.items():
        if isinstance(block, FunctionBaseConfig):
            try:
                block.check_columns(columns)
            except ValueError as error:
                where = "workflow" if name == WORKFLOW else f"{section}.{name}"
                raise ConfigError(f"dataset {dataset} does not fit {where}.{error}") from None
    return items


def dataset_config(config: Config) -> DatasetConfig:
    """The configured dataset, whose column names apply to other files too; the defaults without one."""
    return DatasetConfig() if config.eval.dataset is None else config.eval.dataset


def question_columns(config: Config) -> Iterator[str]:
    """The columns that may have the workflow's input; the first that a row has does."""
    yield (named := dataset_config(config).structure.question_key)
    workflow = config.blocks.get((FUNCTION.section, WORKFLOW))
    if named == StructureConfig().question_key and isinstance(workflow, FunctionBaseConfig):
        yield from filter(None, [workflow.question_column(config.folder)])


def question_key(config: Config, row: Mapping[str, Any]) -> str:
    """The column of a row that has the workflow's input, or should have."""
    named = dataset_config(config).structure.question_key
    return next((each for each in question_columns(config) if each in row), named)


def _items(dataset: Dataset, answered: bool) -> list[EvalInputItem]:
    shape, keys = dataset.block, dataset.block.structure
    is_table = dataset.kind == "csv"
    items: list[EvalInputItem] = []
    seen: dict[tuple[str, int], int] = {}
    for number, row in enumerate(dataset.rows(), 1):
        where = f"dataset {dataset}, row {number}"
        if not isinstance(row, dict):
            raise ConfigError(f"{where} must be a mapping of columns, not {row!r:.80}")
        if (question := question_key(dataset.config, row)) not in row:
            problem = not_found(f"{where}: the question key", question, row)
            raise ConfigError(f"{problem}; eval.general.dataset.structure.question_key names the column")
        item = EvalInputItem(
            id=row.get(shape.id_key, number - 1),
            input_obj=row[question],
            expected_output_obj=row.get(keys.answer_key),
            expected_trajectory=_steps(row, keys.expected_trajectory_key, where),
            full_dataset_entry=row,
        )
        if answered:
            answer = row.get(keys.generated_answer_key)
            item.output_obj = None if answer == "" and is_table else answer  # an empty cell
            item.trajectory = _steps(row, keys.trajectory_key, where)
            item.rep = row["rep"] if isinstance(row.get("rep"), int) else 0
        if has_lone_surrogate(str(item.id)):
            raise ConfigError(f"{where}: the id {item.id!r} has a lone surrogate, which no file can hold")
        earlier = seen.setdefault((str(item.id), item.rep), number)
        if earlier != number:
            raise ConfigError(f"dataset {dataset}: rows {earlier} and {number} have the same id {item.id!r}")
        items.append(item)
    return items


def _steps(row: dict[str, Any], key: str, where: str) -> list[IntermediateStep]:
    steps = row.get(key)
    try:
        if isinstance(steps, str):  # a table's cell
            steps = orjson.loads(steps or "[]")
        return [read_step(record) for record in steps or []]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {key} must be a list of intermediate steps: {error}") from error


def equal_rows(rows: Iterable[EvalInputItem]) -> dict[str, str]:
    """For each row, by id, the id of the first with the same question and answer.

    Without a question the task is elsewhere in the row: such a row is equal to no other.
    """
    first: dict[str, str] = {}
    group_of = {}
    for row in rows:
        name, content = str(row.id), [row.input_obj, row.expected_output_obj]
        text = json.dumps(content, sort_keys=True, default=str) if _has_text_keys(content) else repr(content)
        group_of[name] = first.setdefault(f"id {name}" if row.input_obj in (None, "", {}, []) else text, name)
    return group_of


def _has_text_keys(value: Any) -> bool:
    """Whether all keys of mappings are text, as those of files are."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and _has_text_keys([*value.values()])
    return all(map(_has_text_keys, value)) if isinstance(value, list | tuple) else True
