"""Requests as attackers and broken clients send them, from a seed, and how a server takes them.

    requests = hostile_requests(random.Random(seed), ROUTES["openai"])
    statuses = await send_all(address, requests, count)     # fails on a 5xx and on a server that hangs

Each starts as a good request of a route. A few stay good; of the others the JSON, the bytes, the headers, the path or
the connection is spoilt.
"""

import asyncio
import copy
import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from processes import HANGS

CONNECTIONS = 8
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**25, 0.5, -0.0, 1e308, -1e308, 1e-320),
    *(
        float("nan"),
        float("inf"),
        "",
        " ",
        "\0",
        "\ud800",
        "\udfff\ud800",
        "../../etc/passwd",
        "x" * 300,
        "é" * 5000,
        "💥",
    ),
    *("{{7*7}}", "{% for x in range(10**9) %}", "policy@999", "policy@-1", "http://169.254.169.254/", "\r\nX: y"),
    *([], {}, [[]], [{}], {"": None}, {"\ud800": 1}, [None] * 100, {"a": {"b": [1, 2.5, "c"]}}, [[1, 2], [3, "x"]]),
]
HEADERS = [
    *(
        "Host: evil.example",
        "Host: [::1",
        "Host: \xff",
        "Origin: http://evil.example",
        "Origin: null",
        "Expect: 100-continue",
    ),
    *("Authorization: Basic !", "Authorization: Bearer wrong", "Authorization: ", "Content-Type: text/plain"),
    *(
        "Content-Type: application/json; charset=\xff",
        "Content-Encoding: gzip",
        "Content-Encoding: br",
        "X: " + "y" * 9000,
    ),
    *(
        "Content-Encoding: gzip, gzip",
        "Connection: Upgrade\r\nUpgrade: websocket",
        "Connection: close",
        "Idempotency-Key: \xe9",
    ),
    *(
        "Idempotency-Key: again",
        "anthropic-version: 2023-06-01",
        "Transfer-Encoding: chunked",
        "Content-Length: -1",
        ": x",
    ),
    *(
        "Content-Length: 99999999999",
        "Content-Length: 5",
        "Range: bytes=0-1",
        "Cookie: a=\0b",
        "Accept: text/html",
        "no colon",
    ),
]
PATHS = [
    *(
        "/%00",
        "/%ff%fe",
        "/..",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//",
        "?x=%ff&limit=-1&after=%00",
        "?limit=10&after=x",
        "/[",
        "/%",
    ),
    *("?benchmark_smoothing=nan", "/" + "a" * 5000, "/\xe9", " /", "#x", "/e/x/v1", ";a=b", "/%F0%9F%92%A5"),
]


class Route(NamedTuple):
    """A request that a server answers; `lines`: its body is JSON lines."""

    method: str
    path: str
    body: Any = None
    lines: bool = False


class Sent(NamedTuple):
    """The bytes of a request. `complete`: it is HTTP, and whole, so that there must be an answer."""

    data: bytes
    complete: bool


def hostile_requests(rng: random.Random, routes: list[Route], headers: str = "") -> Iterator[Sent]:
    """`headers` belong to good requests: lines that end with CRLF."""
    while True:
        route = rng.choice(routes)
        body = copy.deepcopy(route.body)
        kind = rng.choices(
            ("good", "json", "bytes", "header", "path", "method", "connection", "bomb"), (10, 45, 12, 12, 8, 4, 7, 2)
        )[0]
        if kind in ("json", "good") and body is not None:
            for _ in range(rng.choice((1, 1, 1, 2, 4)) if kind == "json" else 0):
                body = _spoil(rng, body)
        data = b"" if body is None else _encode(rng, body, route.lines)
        method, path, added = route.method, route.path, headers
        if kind == "bytes":
            data = _garble(rng, data)
        elif kind == "header":
            added += rng.choice(HEADERS) + "\r\n"
        elif kind == "path":
            path += rng.choice(PATHS)
        elif kind == "method":
            method = rng.choice(
                ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "BREW", "post", "")
            )
        elif kind == "bomb":
            data, more = _bomb(rng, data)
            added += more
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{added}"
        if kind == "connection":
            yield _cut(rng, head, data)
        elif "Transfer-Encoding" in added:
            yield Sent(
                f"{head}\r\n".encode("latin-1") + rng.choice((b"5\r\nabc", b"zz\r\n", b"0\r\n\r\n", data)), False
            )
        else:
            length = "" if "Content-Length" in added else f"Content-Length: {len(data)}\r\n"
            sent = f"{head}{length}\r\n".encode("latin-1") + data
            is_whole = kind in ("good", "json", "bytes", "bomb") or (kind == "header" and "Content-Length" not in added)
            yield Sent(sent, is_whole)


def _encode(rng: random.Random, body: Any, lines: bool) -> bytes:
    records = body if lines and isinstance(body, list) else [body]
    is_ascii = rng.random() < 0.9
    try:
        return "\n".join(json.dumps(record, ensure_ascii=is_ascii) for record in records).encode(errors="replace")
    except RecursionError:
        return b"[" * 900 + b"]" * 900


def _nasty(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(NASTY))


def _spoil(rng: random.Random, body: Any) -> Any:
    """Replaces, removes, repeats or wraps a value somewhere in the body."""
    places: list[tuple[Any, Any]] = []
    found = [body]
    while found:
        value = found.pop()
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        places += [(value, key) for key in keys]
        found += [value[key] for key in keys]
    if not places or rng.random() < 0.03:
        return _nasty(rng)
    where, key = rng.choice(places)
    match rng.choice(("replace", "replace", "replace", "remove", "repeat", "wrap", "add")):
        case "replace":
            where[key] = _nasty(rng)
        case "remove":
            del where[key]
        case "repeat":
            where[key] = [where[key]] * rng.choice((2, 200))
        case "wrap":
            for _ in range(rng.choice((1, 60, 200, 900))):
                where[key] = [where[key]] if rng.random() < 0.5 else {"a": where[key]}
        case "add" if isinstance(where, dict):
            where[rng.choice(("x", "", "seed", "n", "stream", "model", "tools", "\ud800", "a" * 500))] = _nasty(rng)
    return body


def _garble(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return rng.choice(
        (
            data[:at],
            data[:at] + rng.randbytes(rng.choice((1, 9, 999))) + data[at:],
            rng.randbytes(200),
            b"[" * rng.choice((100, 1000, 100_000)),
            b'{"a":' * 500 + b"1" + b"}" * 500,
            data + data,
            data.replace(b'"', b"'"),
            b"\xef\xbb\xbf" + data,
            gzip.compress(data)[: rng.choice((-1, -9, 9**9))],
            b'"\\ud83d"',
            b"",
        )
    )


def _bomb(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A body that takes little to send and much to parse, and its headers."""
    bombs: list[tuple[bytes, str]] = [
        (b"[" + b"[]," * rng.choice((10**5, 10**6)) + b"1]", ""),
        (b'{"messages": [' + b"{}," * 10**5 + b'1], "model": "policy"}', ""),
        (b'{"model": "policy", "prompt": "' + b"a" * rng.choice((10**5, 4 * 10**6)) + b'"}', ""),
        (b'{"input": "' + b"\\n" * 10**6 + b'"}', ""),
        (gzip.compress(b'{"a": "' + b"a" * 5 * 10**7 + b'"}', 1), "Content-Encoding: gzip\r\n"),
        (gzip.compress(data + b"\n" * 10**7, 1), "Content-Encoding: gzip\r\n"),
        (b"1" * 10**5, ""),
        (b'{"' + b"k" * 10**6 + b'": 1}', ""),
    ]
    return rng.choice(bombs)


def _cut(rng: random.Random, head: str, data: bytes) -> Sent:
    whole = f"{head}Content-Length: {len(data) + rng.choice((0, 0, 1000))}\r\n\r\n".encode("latin-1") + data
    noise = (
        rng.randbytes(100),
        b"\r\n" * 9,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"/" * 99999,
        b"\x16\x03\x01\x02\x00",
    )
    return Sent(rng.choice((whole[: rng.randrange(len(whole))], whole, whole * 3, rng.choice(noise))), False)


async def send_all(address: str, requests: Iterator[Sent], count: int) -> Counter[int]:
    """How often each status was answered, 0 for none. Fails on a 5xx, and if a whole request gets no answer."""
    where = urlsplit(address)
    taken = enumerate(islice(requests, count))
    statuses: Counter[int] = Counter()

    async def work() -> None:
        for number, sent in taken:
            status, answer = await _send(where.hostname or "", where.port or 0, sent)
            statuses[status] += 1
            shown = f"request {number}: {sent.data[:3000]!r}\n-> {answer[:2000]!r}"
            assert status < 500, shown
            assert status or not sent.complete, f"no answer to {shown}"

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(work())
    return statuses


async def _send(host: str, port: int, sent: Sent) -> tuple[int, bytes]:
    """Status and start of the answer; the client leaves without waiting for one if its request is incomplete."""
    reader, writer = await asyncio.open_connection(host, port)
    answer = b""
    try:
        async with asyncio.timeout(HANGS):
            try:
                writer.write(sent.data)
                await writer.drain()
            except ConnectionError:  # refused before it was read
                pass
            if not sent.complete:
                await asyncio.sleep(0.002)
                writer.write_eof()
            while chunk := await reader.read(2**16):
                answer += chunk[: max(0, 2**16 - len(answer))]
                if sent.complete and _is_whole(answer):
                    break
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise AssertionError(f"the server hangs: {sent.data[:3000]!r} -> {answer[:2000]!r}") from None
    finally:
        writer.transport.abort()
    words = answer.split(None, 2)
    return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), answer


def _is_whole(answer: bytes) -> bool:
    """Whether a response with a length or in chunks has arrived, as far as its start shows."""
    head, found, rest = answer.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if not found or b"transfer-encoding" in fields:
        return bool(found) and rest.endswith(b"0\r\n\r\n")
    return len(rest) >= min(int(fields.get(b"content-length", b"0")), 2**16 - len(head) - 4)
