"""Rows of a dataset of the Hugging Face Hub, or of a local folder that `datasets.load_dataset` reads."""

import itertools
import math
import os
from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from insitu.collect.datasets import DatasetConfig
from insitu.config import Config
from insitu.disk.files import read_rows
from insitu.errors import ConfigError, needing, not_found
from insitu.registry import register_dataset_loader

_KEY = "eval.general.dataset"


class HuggingFaceDatasetConfig(DatasetConfig, name="huggingface"):
    """A split of a dataset of the Hugging Face Hub."""

    path: str
    """The dataset's name, such as `openai/gsm8k`, or a folder, found like a `file_path`."""
    name: str | None = None
    """The name of its configuration, such as `main`."""
    split: str = "train"
    """The split; with a slice if all of it is to be downloaded: `train[:100]`."""
    revision: str | None = None
    """A branch, tag or commit of the dataset's repository; none: the newest."""
    columns: dict[str, str] = Field(default_factory=dict)
    """For columns of a row, such as `question` and `answer`, what they are called there."""
    limit: int | None = Field(default=None, ge=1)
    """How many rows are read, from the first; the others are not downloaded."""

    def place(self, config: Config) -> str:
        """The folder, or the name on the Hub."""
        candidates = (Path(self.path), config.folder / self.path)
        return next((str(folder.resolve()) for folder in candidates if folder.is_dir()), self.path)

    def origin(self, config: Config) -> dict[str, Any]:
        place = self.place(config)
        chosen = {"path": place, "name": self.name, "split": self.split, "revision": self.revision}
        return chosen | ({} if os.path.isdir(place) else {"commit": _commit(place, self.revision)})


@register_dataset_loader(config_type=HuggingFaceDatasetConfig)
def huggingface_rows(block: HuggingFaceDatasetConfig, config: Config) -> Iterator[dict[str, Any]]:
    """Raises ConfigError for what cannot be read, and for a column that is missing."""
    place = block.place(config)
    if os.path.isdir(place):
        read_rows.add(Path(place))
    for number, row in enumerate(_rows(place, block.name, block.split, block.revision, block.limit), 1):
        for column, there in block.columns.items():
            if there not in row:
                raise ConfigError(not_found(f"{_KEY}.columns.{column}: the column", there, row))
        given = {column: row[there] for column, there in block.columns.items()}
        others = {key: value for key, value in row.items() if key not in (*given, *block.columns.values())}
        try:
            yield _plain(given | others)
        except TypeError as error:
            raise ConfigError(f"dataset {place}, row {number} cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    """A value as JSON has it. Raises TypeError for numbers that are not finite, images and other objects."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError(f"it has {value!r:.80}")
    return value


@lru_cache(maxsize=8)
def _rows(place: str, name: str | None, split: str, revision: str | None, limit: int | None) -> list[dict[str, Any]]:
    """The rows of a split, which a run reads several times."""
    with needing("datasets", f"{_KEY}: _type huggingface"):
        import datasets
    try:
        found = datasets.load_dataset(place, name, split=split, revision=revision, streaming=limit is not None)
        return [*itertools.islice(found, limit)]
    except Exception as error:  # datasets, its readers and the Hub's client have no common base class
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{_KEY}: {place} cannot be read: {type(error).__name__}: {reason}") from error


@lru_cache(maxsize=8)
def _commit(place: str, revision: str | None) -> str | None:
    """The commit of the dataset's repository that was read; None if the Hub does not say."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(place, revision=revision, timeout=3).sha
    except Exception:  # it is only recorded, and the Hub may have gone since
        return None
