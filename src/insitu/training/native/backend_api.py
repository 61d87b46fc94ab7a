"""Requests and responses of the backend: its state, jobs as lines, the open job of an epoch, checkpoints to write."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import orjson
from pydantic import BaseModel, Field

from insitu.disk.json_files import gzip_lines
from insitu.errors import BackendError, BackendUnavailable, InsituError, RequestRefused
from insitu.schemas.episodes import TrainingRow
from insitu.schemas.training_jobs import JobState, Retention, TrainingOptions

logger = logging.getLogger(__name__)

JOBS = "/v1/train/jobs"
HEADERS = {"Content-Encoding": "gzip", "Content-Type": "application/x-ndjson"}
"""Headers of an upload of rows."""
JSON = {"Content-Type": "application/json"}


class Health(BaseModel):
    policy_version: int
    vocab_size: int | None = None
    max_length: int | None = None
    weights: str | None = None
    logprob_tolerance: float | None = None
    sampler: str = "embedded"
    dtype: str | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None


class Model(BaseModel):
    id: str


class Models(BaseModel):
    data: list[Model] = Field(min_length=1)


def steps_obstacle(options: TrainingOptions, episodes: int) -> str | None:
    """Why nothing of a job can be computed ahead that has several optimizer steps; None if something can."""
    uses_fixed = options.method == "grpo" and (options.old_logprobs == "recomputed" or options.kl.beta > 0)
    if options.may_be_one_step(episodes) or uses_fixed:
        return None
    return "several optimizer steps, whose loss needs no log-probabilities under fixed weights"


class OpenJob:
    """A job of the backend that takes parts. Once a request for it has failed, it is left to its end: `close` returns
    None, and the job is to be sent whole. `request` sends one that is retried.
    """

    def __init__(self, key: str, num_parts: int, request: Callable[..., Awaitable[JobState]]) -> None:
        self.key = key
        self._sizes: list[int | None] = [None] * num_parts
        self._request = request
        self._path: str | None = None
        self._has_failed = False

    async def open(self, settings: dict[str, Any], *, logprobs_ahead: bool) -> None:
        first = {"settings": settings, "num_parts": len(self._sizes), "logprobs_ahead": logprobs_ahead}
        body = gzip_lines(first, [])
        state = await self._ask("POST", JOBS, body, HEADERS | {"Idempotency-Key": self.key})
        # of one that is not open, an earlier process has submitted it
        self._path = f"{JOBS}/{state.id}" if state is not None and state.open else None

    async def add(self, number: int, rows: Sequence[TrainingRow]) -> None:
        path = self._path
        if path is not None:
            lines = await asyncio.to_thread(gzip_lines, None, rows)
            await self._ask("POST", f"{path}/parts/{number}", lines, HEADERS)
        self._sizes[number] = len(rows)

    async def close(self, key: str, sizes: Sequence[int], keep: Retention) -> JobState | None:
        """Closes the job of `key` if it has these parts; returns its state, None if it must be sent whole."""
        if self._path is None or self.key != key or self._sizes != [*sizes]:
            await self.cancel()
            return None
        body = keep.model_dump_json(exclude_none=True).encode()
        return await self._ask("POST", f"{self._path}/close", body, JSON)

    async def cancel(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            try:
                await self._request("POST", f"{path}/cancel", JobState.model_validate_json, b"", {}, retried=False)
            except InsituError as error:  # the backend cancels a job whose client is gone
                logger.info("%s is not canceled: %s", path, error)

    async def keep_alive(self) -> None:
        if self._path is not None:
            await self._ask("GET", self._path)

    async def _ask(self, method: str, path: str, *content: Any) -> JobState | None:
        """The state of the job; None, after which it is given up, if the request fails."""
        try:
            return await self._request(method, path, JobState.model_validate_json, *content)
        except BackendError as error:
            if not self._has_failed:
                logger.warning("the epoch is sent whole once it is collected: %s", error)
            self._has_failed, self._path = True, None
        return None


class Checkpoints:
    """Has the backend write versions of which it has only logged the jobs; a failure is only reported."""

    def __init__(self, request: Callable[..., Awaitable[Any]]) -> None:
        self._request = request
        self._writing: dict[int, Future[bool]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """From now on the running event loop sends the requests."""
        self._loop = asyncio.get_running_loop()

    def begin(self, version: int | None) -> None:
        """Once for each version, from any thread; None and 0 need none."""
        if version and version not in self._writing and self._loop is not None:
            self._writing[version] = asyncio.run_coroutine_threadsafe(self._write(version), self._loop)

    async def finish(self, latest: int | None) -> None:
        """Returns once these, and the latest version with its optimizer state, are written; at once if it is away."""
        if not latest or await self._write(latest, "?complete=true", retried=False):
            await asyncio.gather(*map(asyncio.wrap_future, self._writing.values()))
            return
        for version, writing in self._writing.items():
            if writing.cancel():
                logger.warning("version %d may have no checkpoint: the backend is away", version)

    async def _write(self, version: int, query: str = "", **options: Any) -> bool:
        """Whether the backend has answered."""
        try:
            await self._request("POST", f"/v1/train/versions/{version}/write{query}", orjson.loads, b"", {}, **options)
        except RequestRefused as error:  # the version was deleted, or a server that writes all
            logger.info("%s", error)
        except BackendError as error:
            logger.warning("version %d may have no checkpoint: %s", version, error)
            return not isinstance(error, BackendUnavailable)
        return True
