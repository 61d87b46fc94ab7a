"""The serverless protocol (`art.ServerlessBackend`): models with ids, jobs that are polled by their events."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from insitu.backend.art.answers import answering, body_of
from insitu.backend.art.jobs import ArtJobs, Ask, Run
from insitu.backend.art.messages import optional, present, read_groups, read_model
from insitu.backend.art.models import ArtModels, Registered
from insitu.errors import RequestRefused

BASE = "/v1/preview"


def serverless_routes(models: ArtModels, jobs: ArtJobs) -> list[Route]:
    """Its endpoints below `/v1`, which is what clients are given as base_url."""
    protocol = _Serverless(models, jobs)
    model = f"{BASE}/models/{{id}}"
    return [
        Route(f"{BASE}/models", answering(protocol.create), methods=["POST"]),
        Route(model, answering(protocol.delete), methods=["DELETE"]),
        Route(f"{model}/checkpoints", answering(protocol.checkpoints), methods=["GET"]),
        Route(f"{model}/checkpoints", answering(protocol.delete_checkpoints), methods=["DELETE"]),
        Route(f"{model}/log", answering(protocol.log), methods=["POST"]),
        Route(f"{BASE}/training-jobs", answering(protocol.train), methods=["POST"]),
        Route(f"{BASE}/training-jobs/{{id}}/events", answering(protocol.events), methods=["GET"]),
        Route(f"{BASE}/sft-training-jobs", answering(protocol.train_sft), methods=["POST"]),
    ]


class _Serverless:
    """A method an endpoint; each returns what its answer says."""

    def __init__(self, models: ArtModels, jobs: ArtJobs) -> None:
        self._models = models
        self._jobs = jobs

    async def create(self, request: Request) -> dict[str, Any]:
        data, _ = await body_of(request)
        registered = await self._models.open(read_model(data, "the body"))
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
        if self._jobs.busy(registered.model):
            raise RequestRefused(f"{registered.model.key} is being trained", status=409, code="model_busy")
        await self._models.delete(registered)

    async def checkpoints(self, request: Request) -> dict[str, Any]:
        registered = self._model(request)
        steps = sorted(registered.learner.versions, reverse=request.query_params.get("order") == "desc")
        page = [
            {"id": f"{registered.id}-{step}", "step": step, "metrics": registered.history.metrics(step)}
            for step in steps
        ]
        return _page(page, request)

    async def delete_checkpoints(self, request: Request) -> dict[str, Any]:
        data, _ = await body_of(request)
        registered = self._model(request)
        steps = set(optional(data, "steps", list) or [])
        deleted = await self._models.delete_steps(registered, steps)
        return {"deleted_count": len(deleted), "not_found_steps": sorted(steps - set(deleted))}

    async def log(self, request: Request) -> None:
        data, _ = await body_of(request)
        registered = self._model(request)
        groups = await asyncio.to_thread(read_groups, data.get("trajectory_groups"))
        registered.history.log(registered.step, optional(data, "split", str) or "val", groups)

    async def train(self, request: Request) -> dict[str, str]:
        data, digest = await body_of(request)
        registered = self._models.get(str(data.get("model_id")))
        ask = Ask(
            replace(registered.model, generation="B"),  # whose defaults the service has
            data.get("trajectory_groups"),
            {},
            present(optional(data, "experimental_config", dict) or {}),
            request.headers.get("idempotency-key"),
            digest,
        )
        return {"id": (await self._jobs.start(ask)).job.state.id}

    async def events(self, request: Request) -> dict[str, Any]:
        """All so far behind `after`; the client asks for the same again until it has seen a gradient step."""
        run = self._jobs.get(request.path_params["id"])
        events = _events(run)
        run.delivered = run.delivered or events[-1]["type"] == "training_ended"
        return _page(events, request)

    async def train_sft(self, request: Request) -> None:
        raise RequestRefused(
            "supervised training is not supported here: its data would lie at W&B", status=501, code="unsupported"
        )

    def _model(self, request: Request) -> Registered:
        return self._models.get(request.path_params["id"])


def _events(run: Run) -> list[dict[str, Any]]:
    """Numbered from 0, which is always the start: the client takes the number of gradient steps from it."""
    told: list[tuple[str, dict[str, Any]]] = [("training_started", {"num_sequences": run.steps})]
    told += [("gradient_step", line) for line in run.lines_so_far()]
    state = run.job.state
    if state.status == "completed":
        told.append(("training_ended", {}))
    elif run.job.ended:
        told.append(("training_failed", {"error_message": f"job {state.id}: {state.message}"}))
    return [{"id": str(number), "type": kind, "data": data} for number, (kind, data) in enumerate(told)]


def _page(entries: Sequence[dict[str, Any]], request: Request) -> dict[str, Any]:
    """What comes behind the entry `after`, as much of it as `limit` says."""
    ids = [entry["id"] for entry in entries]
    after = request.query_params.get("after")
    if after is not None and after not in ids:
        raise RequestRefused(f"after is {after!r}, which is no id of this list", param="after")
    rest = list(entries[ids.index(after) + 1 :] if after is not None else entries)
    limit = request.query_params.get("limit")
    if limit is not None and not limit.isdecimal():
        raise RequestRefused(f"limit is {limit!r}; allowed: a number", param="limit")
    page = rest[: int(limit)] if limit else rest
    return {"data": page, "has_more": len(page) < len(rest)}
