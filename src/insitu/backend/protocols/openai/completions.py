"""The endpoint of chat and text completions: a request in, the sampler's outputs out."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from insitu.backend.http import read_body, refused_response, wait_for_disconnect
from insitu.backend.inference.model_names import ModelRegistry
from insitu.backend.inference.sampler import OutputDelta, Sampler, WeightVersion
from insitu.backend.inference.sampling import GenerationRequest
from insitu.backend.protocols.openai.base import ResponseFormatter, SamplingRequest, parse_request
from insitu.errors import BackendError, RequestRefused
from insitu.wire.http_format import DONE, error_body, format_event
from insitu.wire.http_limits import parse_body

MAX_BODY = 16 * 2**20
WATCH_DELAY = 0.5
"""Seconds before the endpoint watches for a disconnect; most completions have finished by then."""

logger = logging.getLogger(__name__)

T = TypeVar("T")
Job = tuple[SamplingRequest, list[GenerationRequest], WeightVersion]


class SampleLog:
    """Appends a JSON line per completed choice to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise BackendError(f"log_samples is {path}, which cannot be written: {error.strerror}") from error

    def write(self, requests: Sequence[GenerationRequest], outputs: Sequence[OutputDelta], streamed: bool) -> None:
        lines = []
        for (prompt, params), output in zip(requests, outputs, strict=True):
            line = {
                "prompt_token_ids": prompt,
                "token_ids": [token.id for token in output.tokens],
                "logprobs": [token.logprob for token in output.tokens],
                "version": output.version,
                "seed": params.seed,
                "finish_reason": output.finish_reason,
                "streamed": streamed,
            }
            lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        try:
            if not self._file.closed:
                self._file.write(b"".join(lines))
        except OSError as error:  # e.g. a full disk: completions do not depend on their log
            self._file.close()
            logger.error("%s cannot be written, no more samples are logged: %s", self._path, error.strerror)


class CompletionEndpoint:
    """A plain ASGI application, because every sampled token passes through it."""

    def __init__(
        self, kind: type[SamplingRequest], sampler: Sampler, models: ModelRegistry, log: SampleLog | None = None
    ) -> None:
        self._kind = kind
        self._sampler = sampler
        self._models = models
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request, requests, weights = await parse_body(self._parse, await read_body(receive, MAX_BODY))
            formatter = request.formatter([each.prompt for each in requests], self._sampler.tokenizer)
            respond = self._stream if request.stream else self._complete
            await respond((request, requests, weights), formatter, receive, send)
        except RequestRefused as error:
            await refused_response(error)(scope, receive, send)

    def _parse(self, body: bytes) -> Job:
        request = parse_request(self._kind, body)
        model = self._models.find(request.model)
        if model.returns_token_ids:
            request.enable_token_ids()
        prompts, key = request.prompts(self._sampler.tokenizer), request.prompt_key
        vocab_size, max_length = self._sampler.vocab_size, self._sampler.max_length
        for prompt in prompts:
            if not prompt:
                raise RequestRefused(f"{key} gives a prompt without tokens", param=key)
            if max(prompt) >= vocab_size:  # on a GPU an index out of range would end the process
                problem = f"a prompt with token {max(prompt)}; the vocabulary ends at {vocab_size - 1}"
                raise RequestRefused(f"{key} gives {problem}", param=key)
            if len(prompt) >= max_length:
                problem = f"the prompt has {len(prompt)} tokens; prompt and completion together may have {max_length}"
                raise RequestRefused(problem, param=key, code="context_length_exceeded")
        return request, request.generation_requests(prompts, max_length), model.weights

    async def _complete(self, job: Job, formatter: ResponseFormatter, receive: Receive, send: Send) -> None:
        request, requests, weights = job
        outputs = await _cancel_on_disconnect(self._sampler.complete(requests, weights), receive)
        if outputs is None:
            return
        if self._log is not None:
            self._log.write(requests, outputs, streamed=False)
        response = formatter.response(outputs)
        if request.wants_prompt_logprobs:
            weights = weights._replace(version=outputs[0].version)
            scoring = self._prompt_logprobs([each.prompt for each in requests], weights)
            found = await _cancel_on_disconnect(scoring, receive)
            if found is None:
                return
            for choice, logprobs in zip(response["choices"], found, strict=True):
                choice["prompt_logprobs"] = logprobs
        body = orjson.dumps(response)
        length = (b"content-length", str(len(body)).encode())
        await send(_response_start(outputs[0].version, b"application/json", length))
        await send({"type": "http.response.body", "body": body})

    async def _prompt_logprobs(
        self, prompts: Sequence[list[int]], weights: WeightVersion
    ) -> list[list[dict[str, dict[str, float]] | None]]:
        """Of the prompt of each choice, in vLLM's form; equal prompts are computed once."""
        known: dict[tuple[int, ...], list[dict[str, dict[str, float]] | None]] = {}
        for prompt in map(tuple, prompts):
            if prompt not in known:
                logprobs = await self._sampler.prompt_logprobs(prompt, weights)
                tokens = zip(prompt[1:], logprobs, strict=True)
                known[prompt] = [None, *({str(token): {"logprob": logprob}} for token, logprob in tokens)]
        return [known[tuple(prompt)] for prompt in prompts]

    async def _stream(self, job: Job, formatter: ResponseFormatter, receive: Receive, send: Send) -> None:
        """Sends a server-sent event per delta; an error after the first event is sent as an event."""
        request, requests, weights = job
        deltas: list[list[OutputDelta]] = [[] for _ in requests]
        handler = asyncio.current_task()
        assert handler is not None

        def cancel(_: asyncio.Task[None]) -> None:
            handler.cancel()

        watcher = asyncio.create_task(wait_for_disconnect(receive))
        watcher.add_done_callback(cancel)
        try:
            async for index, delta in self._sampler.stream(requests, weights):
                if not any(deltas):
                    no_cache = (b"cache-control", b"no-cache")
                    await send(_response_start(delta.version, b"text/event-stream; charset=utf-8", no_cache))
                deltas[index].append(delta)
                await send(_event(orjson.dumps(formatter.chunk(index, delta))))
            if request.include_usage:
                await send(_event(orjson.dumps(formatter.usage_chunk(deltas[0][0].version))))
            await send(_event(DONE, last=True))
        except asyncio.CancelledError:
            if not watcher.done():
                raise
            return
        except Exception as error:  # the response has started, so an error can only be sent as an event
            if isinstance(error, RequestRefused) or not any(deltas):
                raise
            await send(_event(orjson.dumps(error_body(str(error), 500)), last=True))
        finally:
            watcher.remove_done_callback(cancel)
            watcher.cancel()
        if self._log is not None:
            self._log.write(requests, [_join(each) for each in deltas], streamed=True)


async def _cancel_on_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`; if the client disconnects first, cancels it and returns None."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=WATCH_DELAY)
        if not done:
            watcher = asyncio.ensure_future(wait_for_disconnect(receive))
            await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
            watcher.cancel()
        return await task if task.done() else None
    finally:
        task.cancel()


def _response_start(version: int, content_type: bytes, header: tuple[bytes, bytes]) -> dict[str, Any]:
    headers = [(b"content-type", content_type), header, (b"x-policy-version", str(version).encode())]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _event(data: bytes, last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": format_event(data), "more_body": not last}


def _join(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """The deltas of one choice as a single output."""
    tokens = [token for delta in deltas for token in delta.tokens]
    text = "".join(delta.text for delta in deltas)
    return OutputDelta(deltas[0].version, text, tokens, deltas[-1].finish_reason)
