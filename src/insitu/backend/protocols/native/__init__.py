"""The native protocol: the server's state, and training jobs, uploaded as JSON lines and followed by events."""

import asyncio
import time
from typing import Any

import torch
from aiohttp import web
from pydantic import BaseModel

from insitu.backend.http import ApiRoute
from insitu.backend.inference.sampler import WeightVersion
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.jobs import TrainingJob, TrainingQueue
from insitu.backend.protocols import Services
from insitu.backend.protocols.native.open_jobs import MAX_SETTINGS_BYTES, expire, open_job_routes
from insitu.backend.protocols.native.uploads import JobHeader, Limits, read_job
from insitu.errors import RequestRefused
from insitu.schemas.episodes import TrainingRow
from insitu.schemas.training_jobs import JobState, Retention, TrainingSettings
from insitu.wire.http_format import IDEMPOTENCY_KEY, Sample, format_event, parse_count
from insitu.wire.http_server import (
    body_chunks,
    idempotency_key,
    metrics_response,
    model_response,
    parse_json,
    read_body,
)

BASE = "/v1/train/jobs"
LOGPROB_TOLERANCES = {torch.float32: 0.005}
LOGPROB_TOLERANCE = 0.1
"""Mean difference in nats for 16-bit weights, whose rounding depends on the kernels."""
_METRICS = {
    "vllm:num_requests_running": "Completions that are sampled.",
    "vllm:num_requests_waiting": "Completions that wait for room.",
    "vllm:request_success_total": "Completions that were finished.",
    "process_start_time_seconds": "Start of the backend, in seconds since 1970.",
}


def routes(services: Services) -> list[ApiRoute]:
    loaded = services.loaded
    limits = Limits(vocab_size=loaded.vocab_size, max_length=loaded.max_length)
    jobs = job_routes(services.jobs, limits, services.sampler.tokenizer, services.options.keep)
    return [*state_routes(services), *jobs]


class Health(BaseModel):
    """The server is up; `policy_version` is that of the latest weights, `vocab_size` the number of token ids.

    A prompt and its completion may have `max_length` tokens together. `weights` is a digest of the latest weights, None
    if unknown. A `logprob_gap` above `logprob_tolerance` is more than rounding. `sampler` is what samples, `dtype` that
    of the weights. `tool_format` is how the model writes tool calls, None if that is unknown, and `reasoning_format`
    how it writes reasoning.
    """

    status: str
    policy_version: int
    vocab_size: int
    max_length: int
    weights: str | None
    logprob_tolerance: float
    sampler: str
    dtype: str
    tool_format: str | None
    reasoning_format: str


class WrittenVersion(BaseModel):
    """The folder of a version's weights."""

    version: int
    checkpoint: str


def state_routes(services: Services) -> list[ApiRoute]:
    started, sampler = time.time(), services.sampler

    async def health(request: web.Request) -> web.Response:
        services.compute.check_alive()
        limits: dict[str, Any] = {"vocab_size": sampler.vocab_size, "max_length": sampler.max_length}
        limits["logprob_tolerance"] = LOGPROB_TOLERANCES.get(services.loaded.dtype, LOGPROB_TOLERANCE)
        version = sampler.version
        weights = services.weights_digest(WeightVersion(version))
        limits |= {"sampler": services.options.sampler, "dtype": str(services.loaded.dtype).removeprefix("torch.")}
        limits["tool_format"], limits["reasoning_format"] = sampler.tokenizer.formats[:2]
        return model_response(Health(status="ok", policy_version=version, weights=weights, **limits))

    async def metrics(request: web.Request) -> web.Response:
        running, waiting = sampler.num_requests
        values = (running, waiting, sampler.num_completed, started)
        samples = (Sample(name, {}, value) for name, value in zip(_METRICS, values, strict=True))
        return metrics_response(samples, _METRICS)

    summary = "Running, waiting and finished completions, under the metric names of vLLM and Prometheus"
    return [
        ApiRoute("GET", "/health", health, "Health check", response=Health, public=True),
        ApiRoute("GET", "/metrics", metrics, summary),
    ]


def job_routes(
    jobs: TrainingQueue, limits: Limits, tokenizer: ChatTokenizer, keep: Retention | None = None
) -> list[ApiRoute]:
    """`keep` is the retention policy of jobs that name none."""

    async def submit(request: web.Request) -> web.Response:
        key = idempotency_key(request)
        if jobs.find_by_idempotency_key(key) is None:
            jobs.check_room()
        encoding = request.headers.get("Content-Encoding", "")
        header, rows, digest = await read_job(body_chunks(request), encoding, limits, tokenizer)
        earlier = jobs.find_by_idempotency_key(key)
        if earlier is not None and earlier.is_open:  # its client has begun anew
            await jobs.cancel(earlier.state.id)
        job = jobs.submit(key, header.settings, rows, keep=header.keep or keep, digest=digest or None)
        if job.is_open and job.expiry is None:
            job.expiry = asyncio.create_task(expire(jobs, job), name=f"expiry of {job.state.id}")
        return model_response(job.state.model_copy(update={"body_differs": bool(digest) and job.differs_from(digest)}))

    async def check(request: web.Request) -> web.Response:
        settings = TrainingSettings.model_validate(parse_json(await read_body(request, MAX_SETTINGS_BYTES)))
        await jobs.check(settings)
        if (versions := parse_count(request.query.get("versions", ""))) is not None:
            await jobs.check_memory(settings, versions)
        return model_response(settings)

    async def state(request: web.Request) -> web.Response:
        job = jobs.get(request.match_info["id"])
        job.rows.heard_at = time.monotonic()
        return model_response(job.state)

    async def events(request: web.Request) -> web.StreamResponse:
        return await _stream_states(request, jobs.get(request.match_info["id"]))

    async def cancel(request: web.Request) -> web.Response:
        return model_response((await jobs.cancel(request.match_info["id"])).state)

    submission = "Submit a training job: gzipped JSON lines, the settings, then the rows"
    lines: dict[str, Any] = {"request": [JobHeader, TrainingRow], "request_type": "application/x-ndjson"}
    checking = (
        "Check whether jobs with these settings can be trained, and so many versions be served side by side; returns "
        "the settings with all defaults"
    )
    return [
        ApiRoute("POST", BASE, submit, submission, response=JobState, headers=[IDEMPOTENCY_KEY], **lines),
        ApiRoute(
            *("POST", "/v1/train/check", check, checking),
            request=[TrainingSettings],
            response=TrainingSettings,
            query=["versions"],
        ),
        ApiRoute("GET", f"{BASE}/{{id}}", state, "State of a job", response=JobState),
        ApiRoute("GET", f"{BASE}/{{id}}/events", events, "States of a job as they change", events=JobState),
        *open_job_routes(jobs, limits, tokenizer, BASE),
        ApiRoute("POST", f"{BASE}/{{id}}/cancel", cancel, "Cancel a job", response=JobState),
        writing_route(jobs),
    ]


def writing_route(jobs: TrainingQueue) -> ApiRoute:
    async def write(request: web.Request) -> web.Response:
        if (version := parse_count(request.match_info["version"])) is None:
            raise RequestRefused("a version is a number", param="version", code="model_not_found", status=404)
        await jobs.write_version(version, complete=request.query.get("complete") == "true")
        return model_response(WrittenVersion(version=version, checkpoint=str(jobs.learner.folder(version))))

    summary = (
        "Write the checkpoint of a version of which only the job is logged, unless it is there; returns once it is. "
        "`complete=true`: with optimizer state, if it is the latest and no job is in progress"
    )
    path = "/v1/train/versions/{version}/write"
    return ApiRoute("POST", path, write, summary, response=WrittenVersion, query=["complete"])


async def _stream_states(request: web.Request, job: TrainingJob) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    async for state in job.events():
        event = state and format_event(state.model_dump_json().encode(), state.status)
        await response.write(event or b": keep-alive\n\n")
    return response
