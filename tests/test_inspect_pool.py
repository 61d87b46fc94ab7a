"""Workers of inspect that answer what cannot be read; those that run tasks are in with_environments."""

import asyncio
import sys
from pathlib import Path

import pytest
from waiting import turns

from insitu.errors import BackendUnavailable
from insitu.integrations.environments.inspect.pool import WorkerPool

WORKER = """
import json, socket, sys
connection = socket.socket(fileno=0)
connection.sendall(b'{"ready": true}\\n')
for line in connection.makefile("rb"):
    request = json.loads(line)
    if "answer" in request:
        connection.sendall(eval(request["answer"]) + b"\\n")
    elif "id" in request:
        connection.sendall(json.dumps({"number": request["number"]}).encode() + b"\\n")
"""


@pytest.mark.parametrize("answer", ["b'no JSON'", "b'{}'", "b'0' * (2**26 + 1)"])
async def test_a_worker_that_answers_what_cannot_be_read_is_replaced(tmp_path: Path, answer: str) -> None:
    """Its episodes fail, and wait no longer."""
    async with WorkerPool([sys.executable, "-c", WORKER], 1, tmp_path) as pool, asyncio.timeout(60):
        waits = asyncio.create_task(pool.evaluate({}))
        await turns(1)
        with pytest.raises(BackendUnavailable, match="a worker of inspect has sent a result that cannot be read"):
            await pool.evaluate({"answer": answer})
        with pytest.raises(BackendUnavailable, match="has sent a result"):
            await waits
        assert (await pool.evaluate({"id": "a"}))["number"]
