"""Datasets: files of rows become items with an id, an input, an expected answer, and the whole row."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from insitu.config import Config
from insitu.errors import ConfigError
from insitu.registry import DATASET, not_found, register_dataset_loader, registry
from insitu.schemas.components import DatasetBaseConfig
from insitu.schemas.evaluation import EvalInputItem

Rows = Iterator[dict[str, Any]]


class StructureConfig(BaseModel):
    """Which columns of a row mean what."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    question_key: str = "question"
    """The workflow's input."""
    answer_key: str = "answer"
    """What evaluators compare with; a row may lack it."""


class FileDatasetConfig(DatasetBaseConfig):
    """A file of rows."""

    file_path: Path
    """From the working directory, or else from the folder of the YAML file."""
    id_key: str = "id"
    """The column that identifies a row; rows without it are numbered from 0."""
    structure: StructureConfig = Field(default_factory=StructureConfig)
    """The columns' names, where they are others."""


def _json_rows(path: Path) -> Rows:
    data = orjson.loads(path.read_bytes())
    if not isinstance(data, list):
        raise ConfigError(f"dataset {path} must hold a list of rows, not {type(data).__name__}")
    yield from data


def _jsonl_rows(path: Path) -> Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise ConfigError(f"dataset {path}, line {number} is not valid JSON: {error}") from error


def _csv_rows(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file), 1):
            if None in row or None in row.values():
                raise ConfigError(f"dataset {path}, row {number} has not as many fields as the header names")
            yield row


def _parquet_rows(path: Path) -> Rows:
    return _table_rows(path, "read_parquet")


def _excel_rows(path: Path) -> Rows:
    return _table_rows(path, "read_excel")


def _table_rows(path: Path, reader: str) -> Rows:
    try:
        import polars
    except ModuleNotFoundError as error:
        raise ConfigError(f"dataset {path} needs the package polars: pip install 'insitu[tables]'") from error
    try:
        table = getattr(polars, reader)(path)
    except ModuleNotFoundError as error:
        raise ConfigError(f"dataset {path} needs the package {error.name}: pip install {error.name}") from error
    except polars.exceptions.PolarsError as error:
        raise ConfigError(f"dataset {path} cannot be read: {error}") from error
    yield from table.iter_rows(named=True)


for _name, _reader in (
    ("json", _json_rows),
    ("jsonl", _jsonl_rows),
    ("csv", _csv_rows),
    ("parquet", _parquet_rows),
    ("xls", _excel_rows),
):
    _config = type(f"{_name.capitalize()}DatasetConfig", (FileDatasetConfig,), {"__module__": __name__}, name=_name)
    register_dataset_loader(config_type=_config)(_reader)

_BY_SUFFIX = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet", ".xls": "xls", ".xlsx": "xls"}


def load_dataset(config: Config, path: str | Path | None = None) -> list[EvalInputItem]:
    """The rows of the configured dataset, or of `path` (any format, told by its suffix), in file order.

    ConfigError names the file and the row for a missing key, a row that is no mapping, or an id that stands twice.
    """
    block = config.eval.dataset
    if path is None and block is None:
        raise ConfigError(f"{config.source}: eval.general.dataset is missing, and no dataset was given")
    if path is None:
        file, kind, where = Path(block.file_path), block.type, "eval.general.dataset.file_path"
    else:
        file, where = Path(path), "dataset"
        if file.suffix.lower() not in _BY_SUFFIX:
            raise ConfigError(not_found(f"dataset {file}: the file format", file.suffix, _BY_SUFFIX))
        kind = _BY_SUFFIX[file.suffix.lower()]
    shape = FileDatasetConfig(file_path=file) if block is None else block
    return _items(shape, config.find_path(file, where), kind)


def _items(shape: FileDatasetConfig, file: Path, kind: str) -> list[EvalInputItem]:
    registration = registry.find(DATASET, kind)
    if registration is None:
        raise ConfigError(registry.unknown(DATASET, "eval.general.dataset: _type", kind))
    question_key, answer_key = shape.structure.question_key, shape.structure.answer_key
    items: list[EvalInputItem] = []
    seen: dict[str, int] = {}
    try:
        for number, row in enumerate(registration.factory(file), 1):
            if not isinstance(row, dict):
                raise ConfigError(f"dataset {file}, row {number} must be a mapping of columns, not {row!r:.80}")
            if question_key not in row:
                raise ConfigError(not_found(f"dataset {file}, row {number}: the question key", question_key, row))
            row_id = row.get(shape.id_key, number - 1)
            if str(row_id) in seen:
                raise ConfigError(f"dataset {file}: rows {seen[str(row_id)]} and {number} have the same id {row_id!r}")
            seen[str(row_id)] = number
            items.append(
                EvalInputItem(
                    id=row_id,
                    input_obj=row[question_key],
                    expected_output_obj=row.get(answer_key),
                    full_dataset_entry=row,
                )
            )
    except (OSError, UnicodeDecodeError, orjson.JSONDecodeError, csv.Error) as error:
        raise ConfigError(f"dataset {file} cannot be read: {error}") from error
    if not items:
        raise ConfigError(f"dataset {file} has no rows")
    return items
