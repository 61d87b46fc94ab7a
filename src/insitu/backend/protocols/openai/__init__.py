"""The OpenAI-compatible endpoints: completions of chats and of texts, and the list of models.

In: a request, in this API or in one of `formats.dialects`. Out: what the sampler has completed, streamed or not. `chat`
and `text` are the two kinds of request, with their prompts and the format of the response; `text` also has what both
share. `tokens` gives the token ids of their prompts.
"""

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from insitu.backend.http import ApiRoute
from insitu.backend.inference.sampler import GenerationRequest, WeightVersion
from insitu.backend.protocols import Services
from insitu.backend.protocols.openai.chat import ChatRequest
from insitu.backend.protocols.openai.text import RequestModel, ResponseFormatter, SamplingRequest, TextRequest
from insitu.backend.protocols.openai.tokens import MAX_BODY, token_routes
from insitu.errors import RequestRefused
from insitu.formats.dialects import Dialect, Translation, dialects, translate
from insitu.wire.http_format import CHAT, COMPACT, DONE, JSON, TEXT, accepts_compact, error_body, format_event
from insitu.wire.http_server import json_response, parse_body, parse_json, read_body


class DialectRequest(RequestModel):
    """A request in another API; its translation checks the rest."""

    model: str


Job = tuple[SamplingRequest, list[GenerationRequest], WeightVersion]


@dataclass(frozen=True)
class CompletionEndpoint:
    """Completions of one kind of request, in a dialect; they are aborted if the client disconnects."""

    kind: type[SamplingRequest]
    services: Services
    dialect: Dialect

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, MAX_BODY)
        if self.dialect.verbatim:
            return await self._answer(request, body, None)
        try:
            translation = await parse_body(self._translate, body)
            completion = translation.completion_request({}, translation.request["model"])
            return await self._answer(request, orjson.dumps(completion), translation)
        except RequestRefused as error:
            problem = self.dialect.error(str(error), error.status, error.param, error.code)
            return json_response(problem, status=error.status)

    def _translate(self, body: bytes) -> Translation:
        data = parse_json(body)
        DialectRequest.model_validate(data)
        return translate(self.dialect, data, {})

    async def _answer(self, request: web.Request, body: bytes, translation: Translation | None) -> web.StreamResponse:
        # a chat template is a program of the model's author, which may loop
        job = await parse_body(self._parse, body, may_loop=self.kind is ChatRequest)
        formatter = self.kind.formatter(job[0], [each.prompt for each in job[1]], self.services.sampler.tokenizer)
        formatter.says_processed = self.services.options.sampler == "embedded"
        formatter.compact = job[0].may_be_compact and accepts_compact(request.headers)
        formatter.weights_of = lambda version: self.services.weights_digest(job[2]._replace(version=version))
        if job[0].stream:
            return await self._stream(request, job, formatter, translation)
        return await self._complete(job, formatter, translation)

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
                reason = f" ({sampler.length_limit})" if sampler.length_limit else ""
                raise RequestRefused(problem + reason, param=key, code="context_length_exceeded")
        limits = max_length, vocab_size, len(sampler.tokenizer.eos_token_ids)
        return request, request.generation_requests(prompts, *limits), model.weights

    async def _complete(self, job: Job, formatter: ResponseFormatter, translation: Translation | None) -> web.Response:
        request, requests, weights = job
        outputs = await self.services.sampler.complete(requests, weights)
        response = formatter.response(outputs)
        version = outputs[0].version
        if request.wants_prompt_logprobs:
            scores = await self._prompt_logprobs([each.prompt for each in requests], weights._replace(version=version))
            for choice, logprobs in zip(response["choices"], scores, strict=True):
                choice["prompt_logprobs"] = logprobs
        response = response if translation is None else translation.response(response)
        kind = COMPACT if formatter.compact else JSON
        return json_response(response, headers={"X-Policy-Version": str(version)}, content_type=kind)

    async def _prompt_logprobs(
        self, prompts: Sequence[list[int]], weights: WeightVersion
    ) -> list[list[dict[str, dict[str, float]] | None]]:
        """Logprobs of the prompt of each choice, in vLLM's form; equal prompts are computed once."""
        by_prompt: dict[tuple[int, ...], list[dict[str, dict[str, float]] | None]] = {}
        for prompt in dict.fromkeys(map(tuple, prompts)):
            logprobs = await self.services.sampler.prompt_logprobs(prompt, weights)
            tokens = zip(prompt[1:], logprobs, strict=True)
            by_prompt[prompt] = [None, *({str(token): {"logprob": logprob}} for token, logprob in tokens)]
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    async def _stream(
        self, request: web.Request, job: Job, formatter: ResponseFormatter, translation: Translation | None
    ) -> web.StreamResponse:
        """Sends a server-sent event per delta; an error after the first event is sent as an event."""
        events = _own_events if translation is None else translation.events
        end = _own_end if translation is None else translation.end
        options, requests, weights = job
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        try:
            async with aclosing(self.services.sampler.stream(requests, weights)) as outputs:
                async for index, delta in outputs:
                    if not response.prepared:
                        response.headers["X-Policy-Version"] = str(delta.version)
                        await response.prepare(request)
                    await response.write(b"".join(events(formatter.chunk(index, delta))))
            if options.stream_options is not None and options.stream_options.include_usage:
                await response.write(b"".join(events(formatter.usage_chunk(delta.version))))
            await response.write(b"".join(end(None)))
        except ConnectionError:  # the client has left
            raise
        except Exception as error:  # the response has started, so an error can only be sent as an event
            if not response.prepared:
                raise
            await response.write(b"".join(end(str(error))))
        return response


def _own_events(chunk: dict[str, Any]) -> Iterator[bytes]:
    yield format_event(orjson.dumps(chunk))


def _own_end(failure: str | None) -> Iterator[bytes]:
    yield format_event(DONE if failure is None else orjson.dumps(error_body(failure, 500)))


_STREAMED = "completion; with `stream`, events that end with [DONE]"
_OWN: dict[str, tuple[type[RequestModel], str]] = {
    CHAT: (ChatRequest, f"Chat {_STREAMED}"),
    TEXT: (TextRequest, f"Text {_STREAMED}"),
}
"""By route, the body of a request in our own API, and what the route does."""
_MODEL = {"object": "model", "created": 0, "owned_by": "insitu"}


def routes(services: Services) -> list[ApiRoute]:
    models = services.models

    def completions(route: str, dialect: Dialect) -> ApiRoute:
        body, summary = _OWN.get(route, (DialectRequest, f"A chat completion by the API of {route}"))
        endpoint = CompletionEndpoint(TextRequest if route == TEXT else ChatRequest, services, dialect).complete
        return ApiRoute("POST", f"/v1/{route}", endpoint, summary, request=[body], streamed=True)

    async def list_models(request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [{"id": name, **_MODEL} for name in models.names()]})

    async def get_model(request: web.Request) -> web.Response:
        name = request.match_info["model"]
        return json_response({"id": name, **_MODEL, "policy_version": models.find(name).version})

    return [
        ApiRoute("GET", "/v1/models", list_models, "Names of the model and its versions"),
        ApiRoute("GET", "/v1/models/{model:.+}", get_model, "One model"),
        *(completions(*each) for each in dialects().items()),
        *token_routes(services),
    ]
