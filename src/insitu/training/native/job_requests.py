"""The body of a training job, and the responses of the backend."""

import gzip
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import BaseModel, Field

from insitu.schemas.episodes import TrainingRow


class Health(BaseModel):
    policy_version: int
    vocab_size: int | None = None
    max_length: int | None = None


class Model(BaseModel):
    id: str


class Models(BaseModel):
    data: list[Model] = Field(min_length=1)


JOB_HEADERS = {"Content-Encoding": "gzip", "Content-Type": "application/x-ndjson"}


def gzip_job(header: dict[str, Any], rows: Sequence[TrainingRow]) -> bytes:
    """The job as gzipped JSON lines. Compression level 1 pays off even on loopback."""
    # model_dump() is much slower, and only needed for extra fields
    records = [header, *[_set_fields(row) if not row.__pydantic_extra__ else row.model_dump() for row in rows]]
    return gzip.compress(b"\n".join(map(orjson.dumps, records)) + b"\n", compresslevel=1)


def _set_fields(row: BaseModel) -> dict[str, Any]:
    return {key: value for key, value in row.__dict__.items() if key in row.model_fields_set}
