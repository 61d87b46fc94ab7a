"""The body of a training job, and the responses of the backend."""

import gzip
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson
from pydantic import BaseModel, Field

from insitu.errors import BackendError, BackendUnavailable, RequestRefused
from insitu.schemas.episodes import TrainingRow
from insitu.wire.connection import is_transient, retry_after
from insitu.wire.http_format import error_message


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
    records = [header, *(_set_fields(row) if not row.__pydantic_extra__ else row.model_dump() for row in rows)]
    return gzip.compress(b"\n".join(map(orjson.dumps, records)) + b"\n", compresslevel=1)


def _set_fields(row: BaseModel) -> dict[str, Any]:
    return {key: value for key, value in row.__dict__.items() if key in row.model_fields_set}


def error_from_response(response: aiohttp.ClientResponse, content: bytes) -> BackendError:
    text = content.decode(errors="replace")
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    fields = error if isinstance(error, dict) else {}
    message = error_message(body) or text[:500] or "no reason given"
    message = f"{response.method} {response.url.path}: {message}"
    if is_transient(response.status):
        return BackendUnavailable(f"{message} (status {response.status})", retry_after=retry_after(response.headers))
    return RequestRefused(message, status=response.status, param=fields.get("param"), code=fields.get("code"))
