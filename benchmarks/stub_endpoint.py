"""An endpoint that costs next to nothing: a fixed chat completion after a fixed time, for measuring its clients.

    python benchmarks/stub_endpoint.py --latency 0.02        prints its address, serves until its stdin closes

Token ids and logprobs are in the answer when they are asked for. `GET /stats` gives the number of calls and when the
first one came and the last one was answered, and starts counting anew.
"""

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import uvloop

PROMPT_TOKENS, COMPLETION_TOKENS = 48, 16


def answer(*, token_ids: bool, logprobs: bool) -> bytes:
    text = " move" * COMPLETION_TOKENS
    entry = {"token": " move", "logprob": -0.25, "bytes": list(b" move"), "top_logprobs": []}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", "logprobs": None}
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "stub",
        "choices": [choice],
    }
    body["usage"] = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS}
    body["usage"]["total_tokens"] = PROMPT_TOKENS + COMPLETION_TOKENS
    body["policy_version"] = 1
    if token_ids:
        body["prompt_token_ids"] = list(range(PROMPT_TOKENS))
        choice["token_ids"] = list(range(COMPLETION_TOKENS))
    if logprobs:
        choice["logprobs"] = {"content": [entry] * COMPLETION_TOKENS}
    return json.dumps(body).encode()


def framed(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


ANSWERS = {(t, p): framed(answer(token_ids=t, logprobs=p)) for t in (False, True) for p in (False, True)}


class Stub(asyncio.Protocol):
    """One connection; pipelining is not expected."""

    stats: dict[str, float]
    latency: float

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return
        length = next((line for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), b":0")
        if len(body) < int(length.partition(b":")[2]):
            return
        self.received = b""
        if head.startswith(b"GET /stats"):
            self.write(framed(json.dumps(self.stats).encode()))
            self.stats.update(calls=0, first=0.0, last=0.0)
            return
        self.stats["first"] = self.stats["first"] or time.time()
        asked = (b'"return_token_ids":true' in body, b'"logprobs":true' in body)
        asyncio.get_running_loop().call_later(self.latency, self.reply, ANSWERS[asked])

    def reply(self, data: bytes) -> None:
        self.stats["calls"] += 1
        self.stats["last"] = time.time()
        self.write(data)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)


async def serve(latency: float) -> None:
    Stub.latency, Stub.stats = latency, {"calls": 0, "first": 0.0, "last": 0.0}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stub, "127.0.0.1", 0, backlog=1024)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}/v1", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds")
    uvloop.run(serve(parser.parse_args().latency))
