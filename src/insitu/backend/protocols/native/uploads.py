"""Reads an uploaded job line by line, in bounded memory, and validates it."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Annotated, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu.backend.http import StopAtFirstError
from insitu.backend.training.batches import Row
from insitu.errors import RequestRefused
from insitu.schemas.training_jobs import TrainingSettings

MAX_BYTES = 1 << 30
"""Maximum size of a job, decompressed."""
MAX_ROWS = 1 << 18
"""Maximum number of rows; short ones take more memory as arrays than as text."""
CHUNK_BYTES = 1 << 18
"""Bytes decompressed before other tasks of the event loop run."""
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_INSTEAD = dict.fromkeys(
    ("beta", "kl_beta", "kl_coef", "kl_penalty_coef"), "kl.beta, the coefficient of the KL penalty"
)
"""What sets here what other trainers call by these names."""
M = TypeVar("M", bound=BaseModel)


class Limits(BaseModel):
    """Limits of an uploaded job."""

    vocab_size: int
    max_length: int
    max_bytes: int = MAX_BYTES

    @property
    def line(self) -> int:
        """Maximum bytes of a line: about 100 per token (id, mask, logprob, advantage) and 1 MiB for the rest."""
        return 100 * self.max_length + (1 << 20)


class JobHeader(BaseModel):
    """The first line of a job."""

    model_config = ConfigDict(extra="forbid")

    settings: TrainingSettings
    num_rows: int = Field(ge=0, le=MAX_ROWS)


class _RowLine(BaseModel):
    """A TrainingRow as uploaded; null is allowed where JSON writers emit it for NaN."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: Annotated[list[int], StopAtFirstError()]
    loss_mask: Annotated[list[int], StopAtFirstError()]
    logprobs: Annotated[list[float | None], StopAtFirstError()]
    advantages: float | Annotated[list[float | None], StopAtFirstError()] | None = 0.0
    episode: str = ""
    calls: Annotated[list[int], StopAtFirstError()] = []


async def read_job(chunks: AsyncIterator[bytes], encoding: str, limits: Limits) -> tuple[TrainingSettings, list[Row]]:
    """Returns the settings and the rows with trained tokens. Raises RequestRefused naming line and field."""
    header: JobHeader | None = None
    rows: list[Row] = []
    number = 0
    async for line in _lines(_decoded(chunks, encoding, limits), limits):
        if header is None:
            header = _parse_line(JobHeader, line, "line 1 (settings)")
            continue
        number += 1
        if number > header.num_rows:
            raise _refused(f"num_rows is {header.num_rows}, but the upload has more rows", "num_rows")
        row = _row(line, number, limits)
        if row is not None:
            rows.append(row)
    if header is None:
        raise _refused("the job is empty; its first line holds settings and num_rows", "settings")
    if number < header.num_rows:
        raise _refused(f"the upload ends after {number} of {header.num_rows} rows (num_rows)", "num_rows", "truncated")
    if not rows:
        raise _refused(f"none of the {number} rows has a trained token (loss_mask 1)", "loss_mask", "empty_job")
    return header.settings, rows


async def _decoded(chunks: AsyncIterator[bytes], encoding: str, limits: Limits) -> AsyncIterator[bytes]:
    """The decompressed body in chunks of bounded size."""
    if encoding not in ("", "identity", "gzip"):
        raise _refused(f"Content-Encoding is {encoding!r}; allowed: gzip, identity", "Content-Encoding", status=415)
    total = 0
    unzip = zlib.decompressobj(wbits=31)
    async for chunk in chunks:
        while chunk:
            if encoding == "gzip":
                try:
                    part = unzip.decompress(chunk, CHUNK_BYTES)
                except zlib.error as error:
                    problem = f"Content-Encoding is gzip, but the body is not: {error}"
                    raise _refused(problem, "Content-Encoding") from None
                chunk = unzip.unconsumed_tail
                if unzip.unused_data:
                    raise _refused("there is data after the end of the gzip stream", "Content-Encoding")
            else:
                part, chunk = chunk[:CHUNK_BYTES], chunk[CHUNK_BYTES:]
            total += len(part)
            if total > limits.max_bytes:
                raise _refused(f"the job is longer than {limits.max_bytes} bytes; send fewer rows", status=413)
            yield part
            await asyncio.sleep(0)
    if encoding == "gzip" and not unzip.eof:
        raise _refused("the gzip stream ends early; the upload was cut off", code="truncated")


async def _lines(chunks: AsyncIterator[bytes], limits: Limits) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > limits.line:
            raise _refused(f"a line is longer than {limits.line} bytes", status=413)
        for line in lines:
            if line.strip():
                yield line
    if rest.strip():
        yield rest


def _parse_line(model: type[M], line: bytes, where: str) -> M:
    """Raises RequestRefused with pydantic's first error: the key and its value, or the allowed keys."""
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    problem = first["msg"]
    if first["type"] == "extra_forbidden":
        is_setting = len(first["loc"]) == 2 and first["loc"][0] == "settings"
        instead = _INSTEAD.get(str(first["loc"][-1]))
        hint = f"use {instead}" if instead else f"available: {', '.join(sorted(TrainingSettings.model_fields))}"
        problem = "unknown key" + (f"; {hint}" if is_setting else "")
    elif first["type"] == "json_invalid":
        problem = f"not JSON: {first['ctx']['error']}"
    elif isinstance(first["input"], str | int | float | bool | None):
        problem += f", not {first['input']!r}"
    raise _refused(f"{where}: {key + ': ' if key else ''}{problem}", key or None)


def _row(line: bytes, number: int, limits: Limits) -> Row | None:
    """Returns None for a row without trained tokens."""
    where = f"row {number}"
    sent = _parse_line(_RowLine, line, where)
    length = len(sent.token_ids)
    for name in ("loss_mask", "logprobs", "advantages"):
        values = getattr(sent, name)
        if isinstance(values, list) and len(values) != length:
            raise _refused(f"{where}: {name} has {len(values)} entries, token_ids has {length}", name)
    if length > limits.max_length:
        raise _refused(f"{where}: token_ids has {length} entries; the model takes {limits.max_length}", "token_ids")
    for index, token in enumerate(sent.token_ids):
        if not 0 <= token < limits.vocab_size:
            problem = f"token_ids[{index}] is {token}; the vocabulary ends at {limits.vocab_size - 1}"
            raise _refused(f"{where}: {problem}", "token_ids")
    for index, bit in enumerate(sent.loss_mask):
        if bit not in (0, 1):
            raise _refused(f"{where}: loss_mask[{index}] is {bit}; allowed: 0, 1", "loss_mask")
    if sent.loss_mask and sent.loss_mask[0]:
        problem = "loss_mask[0] is 1, but the first token has no context to predict it from"
        raise _refused(f"{where}: {problem}", "loss_mask")
    positions = [index for index, bit in enumerate(sent.loss_mask) if bit]
    if not positions:
        return None
    weights = sent.advantages if isinstance(sent.advantages, list) else [sent.advantages] * length
    return Row(
        token_ids=np.array(sent.token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        rollout_logprobs=_finite(where, "logprobs", sent.logprobs, positions),
        advantages=_finite(where, "advantages", weights, positions),
        episode=sent.episode,
    )


def _finite(where: str, name: str, values: list[float | None], positions: list[int]) -> np.ndarray:
    """Values of the trained tokens. Raises RequestRefused unless each is finite in float32."""
    for index in positions:
        value = values[index]
        if value is None or not abs(value) <= _MAX_FLOAT32:
            raise _refused(f"{where}: {name}[{index}] is {value}, but that token is trained (loss_mask 1)", name)
    return np.array([values[index] for index in positions], dtype=np.float32)


def _refused(message: str, param: str | None = None, code: str = "invalid_job", *, status: int = 400) -> RequestRefused:
    return RequestRefused(message, status=status, param=param, code=code)
