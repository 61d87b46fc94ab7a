"""Workers of inspect that fail in every way; those that run tasks are in with_environments."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from marks import slow_but_at
from waiting import turns, until

from insitu.errors import BackendUnavailable, ConfigError
from insitu.integrations.environments.inspect.pool import WorkerPool

WORKER = """
import json, os, socket, sys, time
connection = socket.socket(fileno=0)
if os.path.exists("first"):
    connection.sendall(eval(open("first", "rb").read()))
else:
    connection.sendall(b'{"number": 0}\\n')
unanswered = 0
for line in connection.makefile("rb"):
    request = json.loads(line)
    if "last" in request and not unanswered:
        break
    if "answer" in request:
        connection.sendall(eval(request["answer"]) + b"\\n")
    elif "id" in request:
        connection.sendall(json.dumps({"number": request["number"]}).encode() + b"\\n")
    else:
        unanswered += 1
"""


@asynccontextmanager
async def workers(folder: Path, **options: Any) -> AsyncIterator[WorkerPool]:
    """A worker, which reads in the folder what its next one says first."""
    (folder / "worker.py").write_text(f"import os; os.chdir({str(folder)!r})\n{WORKER}")
    async with WorkerPool([sys.executable, str(folder / "worker.py")], 1, folder, **options).open() as pool:
        async with asyncio.timeout(60):
            yield pool


@pytest.mark.parametrize(
    "answer",
    slow_but_at({0, 3, 6}, ["no JSON", "{}", "0", "null", '{"number": []}', "[" * 10**6, "0" * (2**26 + 1)]),
    ids=lambda answer: answer[:20],
)
async def test_a_worker_that_answers_what_cannot_be_read_is_replaced(tmp_path: Path, answer: str) -> None:
    """Its episodes fail, and wait no longer."""
    sent = repr(answer.encode()) if len(answer) < 100 else f"b'{answer[0]}' * {len(answer)}"
    async with workers(tmp_path) as pool:
        waits = asyncio.create_task(pool.evaluate({}))
        await turns(1)
        with pytest.raises(BackendUnavailable, match="a worker of inspect has sent a result that cannot be read"):
            await pool.evaluate({"answer": sent})
        with pytest.raises(BackendUnavailable, match="has sent a result"):
            await waits
        assert (await pool.evaluate({"id": "a"}))["number"]


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ("os._exit(3)", (BackendUnavailable, "a worker of inspect ended with exit code 3")),
        (
            """connection.sendall(b'{"number": 0}\\n') or os._exit(3)""",
            (BackendUnavailable, "a worker of inspect ended with exit code 3"),
        ),
        ("b'hello\\n'", (BackendUnavailable, "has sent a result that cannot be read")),
        ('b\'{"number": 0, "problem": "no task"}\\n\'', (ConfigError, "no task")),
    ],
)
async def test_a_worker_that_cannot_be_started_again_fails_its_episode(
    tmp_path: Path, first: str, problem: tuple[type[Exception], str]
) -> None:
    """The next one tries again."""
    async with workers(tmp_path) as pool:
        (tmp_path / "first").write_text(first)
        with pytest.raises(BackendUnavailable, match="exit code 4"):
            await pool.evaluate({"answer": "os._exit(4)"})
        with pytest.raises(problem[0], match=problem[1]):
            await pool.evaluate({"id": "a"})
        (tmp_path / "first").unlink()
        await until(lambda: succeeds(pool))


async def succeeds(pool: WorkerPool) -> bool:
    try:
        return bool((await pool.evaluate({"id": "a"}))["number"])
    except ConfigError:  # of the worker before, which has not ended yet
        return False


async def test_a_start_goes_on_without_the_episode_that_needed_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    async with workers(tmp_path) as pool:
        (tmp_path / "first").write_text("""open("go").read() and b'{"number": 0}\\n'""")
        with pytest.raises(BackendUnavailable, match="exit code 4"):
            await pool.evaluate({"answer": "os._exit(4)"})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.evaluate({"id": "a"}), 0.2)
        (tmp_path / "go").write_text("go")
        assert (await pool.evaluate({"id": "a"}))["number"]


async def test_a_retired_worker_ends_with_the_pool(tmp_path: Path) -> None:
    """Before that, unless its sample does not end."""
    others = psutil.Process().children()
    async with workers(tmp_path, most_samples=1) as pool:
        for id in ("a", "b", "c"):
            assert (await pool.evaluate({"id": id}))["number"]
        await until(lambda: len([child for child in psutil.Process().children() if child not in others]) == 1)
    async with workers(tmp_path, most_samples=1) as pool:
        waits = asyncio.create_task(pool.evaluate({}))
        await turns(1)
        assert (await pool.evaluate({"id": "a"}))["number"]
        children = [child for child in psutil.Process().children() if child not in others]
        assert len(children) == 2
    with pytest.raises(BackendUnavailable):
        await waits
    assert not any(child.is_running() for child in children)
