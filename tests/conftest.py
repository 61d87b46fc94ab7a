"""Fixtures that several test files use."""

import asyncio
import contextlib
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import yaml
from fake_openai import FakeOpenAI
from processes import ONE_THREAD, fork_server, forked_python

from insitu.backend import configure_math_libraries

os.environ.update(ONE_THREAD)
configure_math_libraries()  # before torch is loaded, as `insitu backend` does
# No server of a test has a certificate. Each HTTP client would read those of the system, for a twentieth of a second.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# No test depends on how fast the machine is. Each run draws other examples.
hypothesis.settings.register_profile(
    "insitu",
    max_examples=int(os.environ.get("EXAMPLES", "20")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("insitu")

if TYPE_CHECKING:
    from tiny_backend import Served

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of `tmp_path`: text as it is, a list as JSON lines, a mapping as YAML; gives its path."""

    def to_file(data: Any, name: str = "config.yml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, str):
            path.write_text(data)
        elif isinstance(data, list):
            path.write_text("".join(json.dumps(row) + "\n" for row in data))
        else:
            path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return to_file


@pytest.fixture
async def pauses() -> AsyncIterator[list[float]]:
    """Requests that are retried do not wait between attempts; the seconds that they would have waited."""
    from insitu.wire.connection import pause

    seconds: list[float] = []

    async def note(duration: float) -> None:
        seconds.append(duration)
        await asyncio.sleep(min(duration, 0.001))

    token = pause.set(note)
    yield seconds
    pause.reset(token)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    from tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeOpenAI]:
    """A small server of the OpenAI API, the same for all tests of a file."""
    with FakeOpenAI() as server:
        yield server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Served"]:
    """A backend with a tiny model, the same for all tests of a file: training in one is seen by the next."""
    from tiny_backend import tiny_backend

    with tiny_backend(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def forked_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends that this process starts are forked."""
    monkeypatch.setattr(sys, "executable", forked_python())


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[None]:
    """One fork server for all workers."""
    with contextlib.nullcontext() if hasattr(config, "workerinput") else fork_server():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """The workers are forked, too: each would import for a quarter of a minute."""
    if getattr(session.config.option, "tx", None):
        session.config.option.tx = [f"popen//python={forked_python()}"] * len(session.config.option.tx)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What collection makes is there until the end: no collection of garbage looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Each worker begins a folder with another file: the first to import one writes its bytecode, which takes longest,
    for all."""
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and isinstance(collector, pytest.Directory):
        modules = [found for found in report.result if isinstance(found, pytest.Module)]
        first = int(worker["workerid"].removeprefix("gw")) * len(modules) // worker["workercount"]
        for module in modules[first:] + modules[:first]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # its collection says so
                module.obj  # noqa: B018
    return report
