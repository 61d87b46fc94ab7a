"""Open jobs: their rows come in parts, each of which is computed when it has arrived."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from insitu.backend.http import ApiRoute
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.jobs import TrainingJob, TrainingQueue
from insitu.backend.learner.parts import PartedRows
from insitu.backend.protocols.native.uploads import Limits, check_rows, read_part
from insitu.errors import RequestRefused
from insitu.schemas.episodes import TrainingRow
from insitu.schemas.training_jobs import JobState, Retention
from insitu.wire.http_server import body_chunks, model_response, parse_json, read_body

logger = logging.getLogger(__name__)

MAX_SETTINGS_BYTES = 1 << 20


def open_job_routes(jobs: TrainingQueue, limits: Limits, tokenizer: ChatTokenizer, base: str) -> list[ApiRoute]:
    """Routes of open jobs: to add a part, and to close them."""

    async def add_part(request: web.Request) -> web.Response:
        job, number = _get(jobs, request.match_info["id"]), request.match_info["number"]
        if not number.isdecimal() or int(number) >= job.rows.count:
            problem = f"part {number!r} does not exist; allowed: 0 to {job.rows.count - 1}"
            raise RequestRefused(problem, param="number", code="part_not_found", status=404)
        encoding = request.headers.get("Content-Encoding", "")
        chunks = _heard(body_chunks(request), job.rows)
        rows, lines, size = await read_part(chunks, encoding, job, int(number), limits, tokenizer)
        job = _get(jobs, job.state.id)
        if not job.rows.add(int(number), rows, lines, size):
            raise RequestRefused(f"part {number} of job {job.state.id} has other rows", status=409, code="part_differs")
        _resume(jobs, job)
        return model_response(job.state)

    async def close(request: web.Request) -> web.Response:
        body = await read_body(request, MAX_SETTINGS_BYTES)
        retention = Retention.model_validate(parse_json(body)) if body.strip() else None
        return model_response(close_job(jobs, request.match_info["id"], retention).state)

    part = "Add a part of the rows, numbered from 0, to an open job; sent again, it changes nothing"
    lines: dict[str, Any] = {"request": [TrainingRow], "request_type": "application/x-ndjson"}
    closing = "Close an open job that has all its parts; its retention policy may be given"
    return [
        ApiRoute("POST", f"{base}/{{id}}/parts/{{number}}", add_part, part, response=JobState, **lines),
        ApiRoute("POST", f"{base}/{{id}}/close", close, closing, request=[Retention], response=JobState),
    ]


async def _heard(chunks: AsyncIterator[bytes], rows: PartedRows) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        rows.heard_at = time.monotonic()
        yield chunk


def _get(jobs: TrainingQueue, job_id: str) -> TrainingJob:
    """An open job, whose client is heard of. Raises RequestRefused if it is not open."""
    if not (job := jobs.get(job_id)).is_open:
        state = "closed" if job.state.status in ("pending", "running") else job.state.status
        raise RequestRefused(f"job {job_id} is {state}: it takes no rows", status=409, code="job_not_open")
    job.rows.heard_at = time.monotonic()
    return job


def close_job(jobs: TrainingQueue, job_id: str, keep: Retention | None) -> TrainingJob:
    """Ends the upload of an open job, which becomes one like others. Raises RequestRefused if parts are missing."""
    if (job := jobs.get(job_id)).was_closed:
        return job
    job = _get(jobs, job_id)
    if missing := job.rows.missing:
        raise RequestRefused(f"job {job_id} lacks the parts {missing[:20]}", status=409, code="parts_missing")
    check_rows(job.rows, "no part has a row with")
    job.keep = keep or job.keep
    jobs.apply_keep(job)
    job.was_closed = True
    job.rows.close()
    job.update(emit=False, open=False, metrics=job.state.metrics | {"rows": len(job.rows)})
    _resume(jobs, job)
    return job


async def expire(jobs: TrainingQueue, job: TrainingJob) -> None:
    """Cancels an open job whose client is gone."""
    while job.is_open:
        left = job.rows.heard_at + jobs.open_seconds - time.monotonic()
        if left <= 0:
            job.reason = f"its client has not been heard of for {jobs.open_seconds:g} s"
            logger.warning("job %s is canceled: %s", job.state.id, job.reason)
            await jobs.cancel(job.state.id)
            return
        await asyncio.sleep(left)


def _resume(jobs: TrainingQueue, job: TrainingJob) -> None:
    if job.steps is not None:
        jobs.compute.resume(job.steps)
