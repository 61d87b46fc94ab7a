"""The native protocol: training jobs under /v1/train/jobs, uploaded as JSON lines and followed by events."""

import time
from collections.abc import AsyncIterator

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from insitu.backend.http import ApiRoute, body_chunks, read_body, validation_refusal
from insitu.backend.inference.sampler import Sampler
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.jobs import TrainingJob, TrainingQueue
from insitu.backend.protocols import Services
from insitu.backend.protocols.native.uploads import JobHeader, Limits, read_job
from insitu.schemas.episodes import TrainingRow
from insitu.schemas.training_jobs import JobState, Retention, TrainingSettings
from insitu.wire.http_format import format_event
from insitu.wire.http_limits import parse_json

BASE = "/v1/train/jobs"
MAX_SETTINGS_BYTES = 1 << 20


def routes(services: Services) -> list[ApiRoute]:
    loaded = services.loaded
    limits = Limits(vocab_size=loaded.vocab_size, max_length=loaded.max_length)
    jobs = job_routes(services.jobs, limits, services.sampler.tokenizer, services.options.keep)
    return [*jobs, _metrics_route(services.sampler)]


def _metrics_route(sampler: Sampler) -> ApiRoute:
    started = time.time()

    async def metrics(request: Request) -> Response:
        running, waiting = sampler.num_requests
        values = {
            "vllm:num_requests_running": running,
            "vllm:num_requests_waiting": waiting,
            "vllm:request_success_total": sampler.num_completed,
            "process_start_time_seconds": started,
        }
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in values.items()))

    summary = "Running, waiting and finished completions, under the metric names of vLLM and Prometheus"
    return ApiRoute("GET", "/metrics", metrics, summary)


def job_routes(
    jobs: TrainingQueue, limits: Limits, tokenizer: ChatTokenizer, keep: Retention | None = None
) -> list[ApiRoute]:
    """`keep` is the retention policy of jobs that name none."""

    async def submit(request: Request) -> Response:
        key = request.headers.get("idempotency-key")
        if job := jobs.find_by_idempotency_key(key):
            async for _ in body_chunks(request.receive):  # the client reads the response only after sending its body
                pass
        else:
            encoding = request.headers.get("content-encoding", "").lower()
            jobs.check_room()
            header, rows = await read_job(body_chunks(request.receive), encoding, limits, tokenizer)
            job = jobs.submit(key, header.settings, rows, keep=header.keep or keep)
        return _state_response(job)

    async def check(request: Request) -> Response:
        try:
            settings = TrainingSettings.model_validate(parse_json(await read_body(request.receive, MAX_SETTINGS_BYTES)))
        except ValidationError as error:
            raise validation_refusal(error) from None
        await jobs.check(settings)
        return Response(settings.model_dump_json(), media_type="application/json")

    async def state(request: Request) -> Response:
        return _state_response(jobs.get(request.path_params["id"]))

    async def events(request: Request) -> Response:
        stream = _event_stream(jobs.get(request.path_params["id"]))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def cancel(request: Request) -> Response:
        return _state_response(await jobs.cancel(request.path_params["id"]))

    return [
        ApiRoute(
            "POST",
            BASE,
            submit,
            "Submit a training job: gzipped JSON lines, the settings, then the rows",
            request=[JobHeader, TrainingRow],
            request_type="application/x-ndjson",
            response=JobState,
            headers=["Idempotency-Key"],
        ),
        ApiRoute(
            "POST",
            "/v1/train/check",
            check,
            "Check whether jobs with these settings can be trained; returns them with all defaults",
            request=[TrainingSettings],
            response=TrainingSettings,
        ),
        ApiRoute("GET", f"{BASE}/{{id}}", state, "State of a job", response=JobState),
        ApiRoute("GET", f"{BASE}/{{id}}/events", events, "States of a job as they change", events=JobState),
        ApiRoute("POST", f"{BASE}/{{id}}/cancel", cancel, "Cancel a job", response=JobState),
    ]


async def _event_stream(job: TrainingJob) -> AsyncIterator[bytes]:
    async for state in job.events():
        yield b": keep-alive\n\n" if state is None else format_event(state.model_dump_json().encode(), state.status)


def _state_response(job: TrainingJob) -> Response:
    return Response(job.state.model_dump_json(), media_type="application/json")
