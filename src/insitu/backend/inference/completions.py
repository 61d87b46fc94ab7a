"""The routes of completions and `GET /v1/models`: requests in, the engine's completions out."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from insitu.backend.http import JSON, error_body, read_body, refused_response
from insitu.backend.inference.answers import Answer
from insitu.backend.inference.engine import NEWEST, Engine, Weights
from insitu.backend.inference.lane import Piece
from insitu.backend.inference.requests import SamplingRequest, parse_request
from insitu.backend.inference.sampling import Ask
from insitu.errors import BackendError, RequestRefused

MAX_BODY = 16 * 2**20
LONG_BODY = 2**16
"""Bytes from which a request is read in a thread of its own, and does not hold up the answers of others."""
PATIENCE = 0.5
"""Seconds a completion may take before its client is watched for leaving; most are over by then."""

T = TypeVar("T")
Sink = Callable[[Sequence[Ask], Sequence[Piece], bool], None]


class SampleLog:
    """Appends every completed choice to a file, one JSON line each."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise BackendError(f"log_samples is {path}, which cannot be written: {error.strerror}") from error

    def __call__(self, asks: Sequence[Ask], pieces: Sequence[Piece], streamed: bool) -> None:
        for (prompt, params), piece in zip(asks, pieces, strict=True):
            line = {
                "prompt_token_ids": prompt,
                "token_ids": [token.id for token in piece.tokens],
                "logprobs": [token.logprob for token in piece.tokens],
                "version": piece.version,
                "seed": params.seed,
                "finish_reason": piece.finish_reason,
                "streamed": streamed,
            }
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()


class Served(NamedTuple):
    """What a name stands for; `version` is that of the weights it gives now.

    Choices of a model that `takes_back` its answers to train on them carry all it needs for that: log-probabilities,
    the sampled ids (as `token_id:N`) and the prompt's.
    """

    weights: Weights
    version: int
    takes_back: bool = False


class Names(Protocol):
    """Some of the names a server answers to."""

    def find(self, model: str) -> Served | None: ...

    def all(self) -> list[str]: ...


class PolicyNames:
    """`NAME` for the newest weights, `NAME@K` for those of version K."""

    def __init__(self, name: str, versions: Callable[[], Sequence[int]]) -> None:
        self._name = name
        self._versions = versions

    def find(self, model: str) -> Served | None:
        if model == self._name:
            return Served(NEWEST, self._versions()[-1])
        name, _, number = model.rpartition("@")
        if name == self._name and number.isdecimal() and int(number) in self._versions():
            return Served(Weights(int(number)), int(number))
        return None

    def all(self) -> list[str]:
        return [self._name, *(f"{self._name}@{version}" for version in self._versions())]


class Models:
    """All the names this server answers to."""

    def __init__(self, *families: Names) -> None:
        self._families = families

    def find(self, model: str) -> Served:
        """Raises RequestRefused (404) listing what exists."""
        for family in self._families:
            if served := family.find(model):
                return served
        raise RequestRefused(
            f"there is no model {model!r}; existing: {', '.join(self.names())}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def names(self) -> list[str]:
        return [name for family in self._families for name in family.all()]

    async def list(self, request: Request) -> Response:
        """GET /v1/models"""
        model = {"object": "model", "created": 0, "owned_by": "insitu"}
        return JSON({"object": "list", "data": [{"id": name, **model} for name in self.names()]})

    async def get(self, request: Request) -> Response:
        """GET /v1/models/{model}"""
        model = request.path_params["model"]
        about = {"object": "model", "created": 0, "owned_by": "insitu"}
        return JSON({"id": model, **about, "policy_version": self.find(model).version})


class Call(NamedTuple):
    """What the engine is asked for."""

    asks: list[Ask]
    weights: Weights


class Completions:
    """The endpoint of one kind of request, as a plain ASGI application: it is the path every sampled token takes."""

    def __init__(self, kind: type[SamplingRequest], engine: Engine, models: Models, log: Sink | None = None) -> None:
        self._kind = kind
        self._engine = engine
        self._models = models
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, MAX_BODY)
            if len(body) < LONG_BODY:
                request, call = self._understand(body)
            else:
                request, call = await asyncio.to_thread(self._understand, body)
            if request.stream:
                await self._stream(request, call, receive, send)
            else:
                await self._whole(request, call, receive, send)
        except RequestRefused as error:
            await refused_response(error)(scope, receive, send)

    async def _whole(self, request: SamplingRequest, call: Call, receive: Receive, send: Send) -> None:
        pieces = await _unless_gone(self._engine.complete(*call), receive)
        if pieces is None:
            return
        self._record(call, pieces, streamed=False)
        body = orjson.dumps(self._answer(request, call).whole(pieces))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-policy-version", str(pieces[0].version).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, request: SamplingRequest, call: Call) -> Answer:
        return request.answer([ask.prompt for ask in call.asks], self._engine.tokens)

    def _record(self, call: Call, pieces: Sequence[Piece], streamed: bool) -> None:
        if self._log is not None:
            self._log(call.asks, pieces, streamed)

    def _understand(self, body: bytes) -> tuple[SamplingRequest, Call]:
        request = parse_request(self._kind, body)
        served = self._models.find(request.model)
        if served.takes_back:
            request.ask_for_ids()
        prompts = request.prompts(self._engine.tokens)
        for prompt in prompts:
            self._check(prompt, request.prompt_key)
        return request, Call(request.asks(prompts, self._engine.options.max_length), served.weights)

    def _check(self, prompt: list[int], key: str) -> None:
        """Raises RequestRefused where there is no room behind a prompt, or no prompt."""
        longest = self._engine.options.max_length
        if not prompt:
            raise RequestRefused(f"{key} makes a prompt without tokens", param=key)
        if max(prompt) >= self._engine.vocabulary:  # an index out of range, which on a GPU ends the process
            raise RequestRefused(
                f"{key} makes a prompt with the token {max(prompt)}, but the model's vocabulary ends at "
                f"{self._engine.vocabulary - 1}",
                param=key,
            )
        if len(prompt) >= longest:
            raise RequestRefused(
                f"the prompt has {len(prompt)} tokens; prompt and completion together may have {longest}",
                param=key,
                code="context_length_exceeded",
            )

    async def _stream(self, request: SamplingRequest, call: Call, receive: Receive, send: Send) -> None:
        """Server-sent events, one for each piece; a failure after the first becomes an event itself."""
        answer = self._answer(request, call)
        parts: list[list[Piece]] = [[] for _ in call.asks]
        handler = asyncio.current_task()
        assert handler is not None

        def leave(_: asyncio.Task[None]) -> None:
            handler.cancel()

        watcher = asyncio.create_task(_gone(receive))
        watcher.add_done_callback(leave)
        try:
            async for index, piece in self._engine.stream(*call):
                if not any(parts):
                    await send(_event_stream(piece.version))
                parts[index].append(piece)
                await send(_event(orjson.dumps(answer.chunk(index, piece))))
            if request.wants_usage:
                await send(_event(orjson.dumps(answer.usage_chunk(parts[0][0].version))))
            await send(_event(b"[DONE]", last=True))
        except asyncio.CancelledError:
            if not watcher.done():
                raise
            return
        except Exception as error:  # the answer has begun, so its failure can only be told inside it
            if isinstance(error, RequestRefused) or not any(parts):
                raise
            await send(_event(orjson.dumps(error_body(str(error), 500)), last=True))
        finally:
            watcher.remove_done_callback(leave)
            watcher.cancel()
        self._record(call, [_joined(pieces) for pieces in parts], streamed=True)


async def _gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`, or none, the work cancelled, if the client leaves first."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        if not done:
            watcher = asyncio.ensure_future(_gone(receive))
            await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
            watcher.cancel()
        return await task if task.done() else None
    finally:
        task.cancel()


def _event_stream(version: int) -> dict[str, Any]:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-policy-version", str(version).encode()),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _event(data: bytes, last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": not last}


def _joined(pieces: Sequence[Piece]) -> Piece:
    """The pieces of one choice as the single piece it is where nothing is streamed."""
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece(pieces[0].version, "".join(piece.text for piece in pieces), tokens, pieces[-1].finish_reason)
