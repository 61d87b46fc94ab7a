"""The OpenAI-compatible endpoints: completions of chats and of texts, and the list of models.

In: a request. Out: what the sampler has completed, streamed or not. `chat` and `text` are the two kinds of request,
with their prompts and the format of the response; `text` also has what both share.
"""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import orjson
from aiohttp import web

from insitu.backend.http import ApiRoute
from insitu.backend.inference.sampler import GenerationRequest, OutputDelta, WeightVersion
from insitu.backend.protocols import Services
from insitu.backend.protocols.openai.chat import ChatRequest
from insitu.backend.protocols.openai.text import ResponseFormatter, SamplingRequest, TextRequest
from insitu.errors import BackendError, RequestRefused
from insitu.wire.http_format import DONE, error_body, format_event
from insitu.wire.http_server import json_response, parse_body, read_body

MAX_BODY = 16 * 2**20

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class CompletionEndpoint:
    """Completions of one kind of request; they are aborted if the client disconnects."""

    kind: type[SamplingRequest]
    services: Services
    log: SampleLog | None = None

    async def complete(self, request: web.Request) -> web.StreamResponse:
        job = await parse_body(self._parse, await read_body(request, MAX_BODY))
        formatter = self.kind.formatter(job[0], [each.prompt for each in job[1]], self.services.sampler.tokenizer)
        return await (self._stream(request, job, formatter) if job[0].stream else self._complete(job, formatter))

    def _parse(self, body: bytes) -> Job:
        request = self.kind.parse(body)
        model = self.services.models.find(request.model)
        if model.returns_token_ids:
            request.enable_token_ids()
        prompts, key = request.prompts(self.services.sampler.tokenizer), request.prompt_key
        sampler = self.services.sampler
        vocab_size, max_length = sampler.vocab_size, sampler.max_length
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

    async def _complete(self, job: Job, formatter: ResponseFormatter) -> web.Response:
        request, requests, weights = job
        outputs = await self.services.sampler.complete(requests, weights)
        if self.log is not None:
            self.log.write(requests, outputs, streamed=False)
        response = formatter.response(outputs)
        version = outputs[0].version
        if request.wants_prompt_logprobs:
            prompts = [each.prompt for each in requests]
            scores = await self._prompt_logprobs(prompts, weights._replace(version=version))
            for choice, logprobs in zip(response["choices"], scores, strict=True):
                choice["prompt_logprobs"] = logprobs
        return json_response(response, headers={"X-Policy-Version": str(version)})

    async def _prompt_logprobs(
        self, prompts: Sequence[list[int]], weights: WeightVersion
    ) -> list[list[dict[str, dict[str, float]] | None]]:
        """Logprobs of the prompt of each choice, in vLLM's form; equal prompts are computed once."""
        known: dict[tuple[int, ...], list[dict[str, dict[str, float]] | None]] = {}
        for prompt in map(tuple, prompts):
            if prompt not in known:
                logprobs = await self.services.sampler.prompt_logprobs(prompt, weights)
                tokens = zip(prompt[1:], logprobs, strict=True)
                known[prompt] = [None, *({str(token): {"logprob": logprob}} for token, logprob in tokens)]
        return [known[tuple(prompt)] for prompt in prompts]

    async def _stream(self, request: web.Request, job: Job, formatter: ResponseFormatter) -> web.StreamResponse:
        """Sends a server-sent event per delta; an error after the first event is sent as an event."""
        options, requests, weights = job
        deltas: list[list[OutputDelta]] = [[] for _ in requests]
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        try:
            async with aclosing(self.services.sampler.stream(requests, weights)) as outputs:
                async for index, delta in outputs:
                    if not response.prepared:
                        response.headers["X-Policy-Version"] = str(delta.version)
                        await response.prepare(request)
                    deltas[index].append(delta)
                    await response.write(format_event(orjson.dumps(formatter.chunk(index, delta))))
            if options.include_usage:
                await response.write(format_event(orjson.dumps(formatter.usage_chunk(deltas[0][0].version))))
            await response.write(format_event(DONE))
        except ConnectionError:  # the client has left
            raise
        except Exception as error:  # the response has started, so an error can only be sent as an event
            if not response.prepared:
                raise
            await response.write(format_event(orjson.dumps(error_body(str(error), 500))))
            return response
        if self.log is not None:
            self.log.write(requests, [_join(each) for each in deltas], streamed=True)
        return response


def _join(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """The deltas of one choice as a single output."""
    tokens = [token for delta in deltas for token in delta.tokens]
    text = "".join(delta.text for delta in deltas)
    return OutputDelta(deltas[0].version, text, tokens, deltas[-1].finish_reason)


_MODEL = {"object": "model", "created": 0, "owned_by": "insitu"}


def routes(services: Services) -> list[ApiRoute]:
    models = services.models
    log = SampleLog(services.options.log_samples) if services.options.log_samples else None

    def completions(path: str, kind: type[SamplingRequest], what: str) -> ApiRoute:
        summary = f"{what} completion; with `stream`, events that end with [DONE]"
        endpoint = CompletionEndpoint(kind, services, log).complete
        return ApiRoute("POST", path, endpoint, summary, request=[kind], streamed=True)

    async def list_models(request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [{"id": name, **_MODEL} for name in models.names()]})

    async def get_model(request: web.Request) -> web.Response:
        name = request.match_info["model"]
        return json_response({"id": name, **_MODEL, "policy_version": models.find(name).version})

    return [
        ApiRoute("GET", "/v1/models", list_models, "Names of the model and its versions"),
        ApiRoute("GET", "/v1/models/{model:.+}", get_model, "One model"),
        completions("/v1/chat/completions", ChatRequest, "Chat"),
        completions("/v1/completions", TextRequest, "Text"),
    ]
