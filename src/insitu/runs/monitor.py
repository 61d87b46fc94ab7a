"""Runs as monitoring sees them: `GET /health`, and `GET /metrics` in the text format of Prometheus, from their files.

with MonitorPort("127.0.0.1", 9100, folder) as port:  # binds it, so that a port in use is known at the start
    async with port.serving():
        ...
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from insitu.disk.json_files import AppendedLines, FileReplaced, read_line
from insitu.errors import ConfigError
from insitu.runs import files
from insitu.runs.reader import Problems, RunReader
from insitu.runs.summary import read_summary
from insitu.wire.addresses import http_url, url_host
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_format import Sample
from insitu.wire.http_server import guard, json_response, listening, metrics_response

KEY = "general.metrics_port"
TOKEN_VARIABLE = "INSITU_METRICS_TOKEN"
_ABOUT = {
    "insitu_status": "1 for the status of the run.",
    "insitu_epoch": "The last complete epoch.",
    "insitu_epochs": "How many epochs the run has.",
    "insitu_episodes_total": "Episodes of all groups that are complete.",
    "insitu_seconds_since_last_episode": "Seconds since an episode was recorded.",
    "insitu_reward": "Mean reward of the last epoch.",
    "insitu_held_out_score": "Score of the last validation.",
    "insitu_best_held_out_score": "Score of the best validation.",
    "insitu_dropped_episodes_total": "Episodes that are not trained, by reason.",
}


class _Collected:
    """The episodes of a run, and those dropped while they were collected, by epoch; each line is read once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / files.GROUPS
        self._lines = AppendedLines(self._path)
        self.episodes = 0
        self.dropped: dict[int, Counter[str]] = {}

    def updated(self) -> "_Collected":
        """Itself, or a new one if the run has gone back to an earlier epoch."""
        try:
            for line in self._lines.read():
                record = read_line(self._path, line.number, line.content)
                if "epoch" in record:
                    self.episodes += record["num_episodes"]
                    self.dropped.setdefault(record["epoch"], Counter()).update(record["dropped"])
        except FileReplaced:
            return _Collected(self._path.parent).updated()
        return self


class Monitor:
    """Answers `/health` and `/metrics` about runs, which `runs` returns by name."""

    def __init__(self, runs: Callable[[], Mapping[str, Path]]) -> None:
        self._runs = runs
        self._collected: dict[Path, _Collected] = {}
        self._lock = threading.Lock()

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return metrics_response(await asyncio.to_thread(self._samples), _ABOUT)

    def _samples(self) -> list[Sample]:
        with self._lock:
            runs = self._runs()
            self._collected = {path: self._collected.get(path) or _Collected(path) for path in runs.values()}
            samples: list[Sample] = []
            for name, path in runs.items():
                samples += Problems().attempt(partial(self._samples_of, name, path), [])
            return samples

    def _samples_of(self, name: str, path: Path) -> list[Sample]:
        summary, reader = read_summary(path), RunReader(path)
        problems, epochs = summary.problems, reader.readable(files.METRICS, summary.problems)
        self._collected[path] = collected = problems.attempt(self._collected[path].updated, self._collected[path])
        validations: list[dict[str, Any]] = problems.attempt(reader.validations, [])
        values = {
            "epoch": summary.epoch,
            "epochs": summary.epochs,
            "episodes_total": collected.episodes,
            "seconds_since_last_episode": _seconds_since(path),
            "reward": _latest(epochs),
            "held_out_score": _latest(validations),
            "best_held_out_score": summary.best_score,
        }
        samples = [Sample("insitu_status", {"run": name, "status": summary.status}, 1)]
        samples += [Sample(f"insitu_{k}", {"run": name}, v) for k, v in values.items() if isinstance(v, int | float)]
        recorded = {line["epoch"]: Counter(line["dropped"]) for line in epochs}  # also what was dropped later
        dropped = sum((collected.dropped | recorded).values(), Counter[str]())
        labels = ({"run": name, "reason": reason} for reason in sorted(dropped))
        return samples + [Sample("insitu_dropped_episodes_total", each, dropped[each["reason"]]) for each in labels]


def _latest(records: list[dict[str, Any]]) -> float | None:
    rewards = [record["avg_reward"] for record in records if record.get("avg_reward") is not None]
    return rewards[-1] if rewards else None


def _seconds_since(run: Path) -> float | None:
    """Seconds since an episode was recorded; None before the first. The journal is emptied after each epoch."""
    times = []
    for name in (files.EPISODES, files.JOURNAL):
        with contextlib.suppress(OSError):
            status = (run / name).stat()
            times += [status.st_mtime] if status.st_size else []
    return max(0.0, time.time() - max(times)) if times else None


class MonitorPort(contextlib.AbstractContextManager["MonitorPort"]):
    """The port on which the run in a folder can be monitored, if there is one.

    Raises ConfigError if it cannot be bound.
    """

    def __init__(self, host: str, port: int | None, folder: Path) -> None:
        self._runs = {str(folder): folder.absolute()}  # now: the workflow may change the working directory
        self._socket: socket.socket | None = None
        if port is None:
            return
        token = os.environ.get(TOKEN_VARIABLE)
        self._access = AccessPolicy.of(host, token, variable=TOKEN_VARIABLE, key="general.metrics_host")
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"{KEY}: {url_host(host)}:{port} cannot be bound: {error.strerror}") from error

    def __exit__(self, *exc_info: object) -> None:
        if self._socket is not None:
            self._socket.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str | None]:
        """Serves while the context is open; yields the URL, None without a port."""
        if self._socket is None:
            yield None
            return
        app = web.Application(middlewares=[guard(self._access, lambda path: path == "/health")])
        Monitor(lambda: self._runs).add_routes(app)
        async with listening(app, self._socket) as address:
            yield http_url(*address)
