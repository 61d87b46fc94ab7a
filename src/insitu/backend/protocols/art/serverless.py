"""The serverless protocol (`art.ServerlessBackend`): models with ids, and jobs polled by their events."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from insitu.backend.http import ApiRoute
from insitu.backend.protocols.art.jobs import ArtJob, ArtJobs, TrainRequest
from insitu.backend.protocols.art.models import ArtModels, RegisteredModel
from insitu.backend.protocols.art.responses import json_endpoint, read_json
from insitu.backend.protocols.art.trajectories import drop_nulls, optional, parse_groups, parse_model
from insitu.errors import RequestRefused

BASE = "/v1/preview"


def serverless_routes(models: ArtModels, jobs: ArtJobs) -> list[ApiRoute]:
    """The endpoints, below the `/v1` that clients have as base_url."""
    endpoints = _Endpoints(models, jobs)

    def route(method: str, path: str, handler: Any, summary: str, headers: tuple[str, ...] = ()) -> ApiRoute:
        return ApiRoute(method, BASE + path, json_endpoint(handler), f"ART serverless: {summary}", headers=headers)

    return [
        route("POST", "/models", endpoints.create, "create a model, or return the existing one"),
        route("DELETE", "/models/{id}", endpoints.delete, "delete a model"),
        route("GET", "/models/{id}/checkpoints", endpoints.checkpoints, "a model's steps with their metrics"),
        route("DELETE", "/models/{id}/checkpoints", endpoints.delete_checkpoints, "delete some of a model's steps"),
        route("POST", "/models/{id}/log", endpoints.log, "as /_log"),
        route("POST", "/training-jobs", endpoints.train, "train", ("Idempotency-Key",)),
        route("GET", "/training-jobs/{id}/events", endpoints.events, "a job's events so far"),
        route("POST", "/sft-training-jobs", endpoints.train_sft, "refused"),
    ]


class _Endpoints:
    """One method per endpoint; each returns the response's JSON."""

    def __init__(self, models: ArtModels, jobs: ArtJobs) -> None:
        self._models = models
        self._jobs = jobs

    async def create(self, request: Request) -> dict[str, Any]:
        data, _ = await read_json(request)
        registered = await self._models.open(parse_model(data, "the body"))
        model = registered.model
        return {
            "id": registered.id,
            "entity": model.entity,
            "project": model.project,
            "name": model.name,
            "base_model": model.base_model,
            "run_id": None,
        }

    async def delete(self, request: Request) -> None:
        registered = self._model(request)
        if self._jobs.is_training(registered.model):
            raise RequestRefused(f"{registered.model.key} is being trained", status=409, code="model_busy")
        await self._models.delete(registered)

    async def checkpoints(self, request: Request) -> dict[str, Any]:
        registered = self._model(request)
        steps = sorted(registered.learner.versions, reverse=request.query_params.get("order") == "desc")
        entries = [
            {"id": f"{registered.id}-{step}", "step": step, "metrics": registered.metrics_log.metrics(step)}
            for step in steps
        ]
        return _page(entries, request)

    async def delete_checkpoints(self, request: Request) -> dict[str, Any]:
        data, _ = await read_json(request)
        registered = self._model(request)
        steps = set(optional(data, "steps", list) or [])
        deleted = await self._models.delete_steps(registered, steps)
        return {"deleted_count": len(deleted), "not_found_steps": sorted(steps - set(deleted))}

    async def log(self, request: Request) -> None:
        data, _ = await read_json(request)
        registered = self._model(request)
        groups = await asyncio.to_thread(parse_groups, data.get("trajectory_groups"))
        registered.metrics_log.log(registered.step, optional(data, "split", str) or "val", groups)

    async def train(self, request: Request) -> dict[str, str]:
        data, digest = await read_json(request)
        registered = self._models.get(str(data.get("model_id")))
        train_request = TrainRequest(
            replace(registered.model, generation="B"),  # the service has the defaults of that generation
            data.get("trajectory_groups"),
            {},
            drop_nulls(optional(data, "experimental_config", dict) or {}),
            request.headers.get("idempotency-key"),
            digest,
        )
        return {"id": (await self._jobs.start(train_request)).job.state.id}

    async def events(self, request: Request) -> dict[str, Any]:
        """The events after `after`; clients repeat a request until they have seen a gradient step."""
        job = self._jobs.get(request.path_params["id"])
        events = _events(job)
        job.delivered = job.delivered or events[-1]["type"] == "training_ended"
        return _page(events, request)

    async def train_sft(self, request: Request) -> None:
        raise RequestRefused(
            "supervised training is not supported here: its data would be stored at W&B", status=501, code="unsupported"
        )

    def _model(self, request: Request) -> RegisteredModel:
        return self._models.get(request.path_params["id"])


def _events(job: ArtJob) -> list[dict[str, Any]]:
    """Numbered from 0; the first is always the start, from which clients take the number of gradient steps."""
    events: list[tuple[str, dict[str, Any]]] = [("training_started", {"num_sequences": job.steps})]
    events += [("gradient_step", line) for line in job.lines_so_far()]
    state = job.job.state
    if state.status == "completed":
        events.append(("training_ended", {}))
    elif job.job.ended:
        events.append(("training_failed", {"error_message": f"job {state.id}: {state.message}"}))
    return [{"id": str(number), "type": kind, "data": data} for number, (kind, data) in enumerate(events)]


def _page(entries: Sequence[dict[str, Any]], request: Request) -> dict[str, Any]:
    """At most `limit` of the entries after the id `after`."""
    ids = [entry["id"] for entry in entries]
    after = request.query_params.get("after")
    if after is not None and after not in ids:
        raise RequestRefused(f"after is {after!r}, which is not an id of this list", param="after")
    rest = list(entries[ids.index(after) + 1 :] if after is not None else entries)
    limit = request.query_params.get("limit")
    if limit is not None and not limit.isdecimal():
        raise RequestRefused(f"limit is {limit!r}; allowed: a number", param="limit")
    page = rest[: int(limit)] if limit else rest
    return {"data": page, "has_more": len(page) < len(rest)}
