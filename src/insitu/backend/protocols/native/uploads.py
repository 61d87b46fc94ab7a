"""Reads an uploaded job line by line, in bounded memory."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.batches import Row
from insitu.backend.protocols.native.rows import RowLimits, RowLine, RowReader, refused
from insitu.schemas.training_jobs import Retention, TrainingSettings

MAX_BYTES = 1 << 30
"""Maximum size of a job, decompressed."""
MAX_ROWS = 1 << 18
"""Maximum number of rows; short ones take more memory as arrays than as text."""
CHUNK_BYTES = 1 << 18
"""Bytes decompressed before other tasks of the event loop run."""
_INSTEAD = {
    **dict.fromkeys(("kl_beta", "kl_coef", "kl_penalty_coef"), "kl.beta, the coefficient of the KL penalty"),
    "beta": "kl.beta, the coefficient of the KL penalty (dpo.beta and kto.beta with these methods)",
}
"""What sets here what other trainers call by these names."""
M = TypeVar("M", bound=BaseModel)


class Limits(RowLimits):
    """Limits of an uploaded job."""

    max_bytes: int = MAX_BYTES

    @property
    def line(self) -> int:
        """Maximum bytes of a line: about 100 per token (id, mask, logprob, advantage) and 1 MiB for the rest."""
        return 100 * self.max_length + (1 << 20)


class JobHeader(BaseModel):
    """The first line of a job; without `keep` the backend's own retention policy applies."""

    model_config = ConfigDict(extra="forbid")

    settings: TrainingSettings
    num_rows: int = Field(ge=0, le=MAX_ROWS)
    keep: Retention | None = None


async def read_job(
    chunks: AsyncIterator[bytes], encoding: str, limits: Limits, tokenizer: ChatTokenizer
) -> tuple[JobHeader, list[Row]]:
    """Returns the header and the rows with trained tokens. Raises RequestRefused naming line and field."""
    header: JobHeader | None = None
    reader: RowReader | None = None
    rows: list[Row] = []
    number = 0
    async for line in _lines(_decoded(chunks, encoding, limits), limits):
        if header is None or reader is None:
            header = _parse_line(JobHeader, line, "line 1 (settings)")
            reader = RowReader(header.settings.method, limits, tokenizer)
            continue
        number += 1
        if number > header.num_rows:
            raise refused(f"num_rows is {header.num_rows}, but the upload has more rows", "num_rows")
        rows += await reader.read(_parse_line(RowLine, line, f"row {number}"), number)
    if header is None or reader is None:
        raise refused("the job is empty; its first line holds settings and num_rows", "settings")
    if number < header.num_rows:
        raise refused(f"the upload ends after {number} of {header.num_rows} rows (num_rows)", "num_rows", "truncated")
    reader.check()
    if not rows:
        raise refused(f"none of the {number} rows has a trained token (loss_mask 1)", "loss_mask", "empty_job")
    return header, rows


async def _decoded(chunks: AsyncIterator[bytes], encoding: str, limits: Limits) -> AsyncIterator[bytes]:
    """The decompressed body in chunks of bounded size."""
    if encoding not in ("", "identity", "gzip"):
        raise refused(f"Content-Encoding is {encoding!r}; allowed: gzip, identity", "Content-Encoding", status=415)
    total = 0
    unzip = zlib.decompressobj(wbits=31)
    async for chunk in chunks:
        while chunk:
            if encoding == "gzip":
                try:
                    part = unzip.decompress(chunk, CHUNK_BYTES)
                except zlib.error as error:
                    problem = f"Content-Encoding is gzip, but the body is not: {error}"
                    raise refused(problem, "Content-Encoding") from None
                chunk = unzip.unconsumed_tail
                if unzip.unused_data:
                    raise refused("there is data after the end of the gzip stream", "Content-Encoding")
            else:
                part, chunk = chunk[:CHUNK_BYTES], chunk[CHUNK_BYTES:]
            total += len(part)
            if total > limits.max_bytes:
                raise refused(f"the job is longer than {limits.max_bytes} bytes; send fewer rows", status=413)
            yield part
            await asyncio.sleep(0)
    if encoding == "gzip" and not unzip.eof:
        raise refused("the gzip stream ends early; the upload was cut off", code="truncated")


async def _lines(chunks: AsyncIterator[bytes], limits: Limits) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > limits.line:
            raise refused(f"a line is longer than {limits.line} bytes", status=413)
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
    raise refused(f"{where}: {key + ': ' if key else ''}{problem}", key or None)
