"""The OpenAI-compatible endpoints: completions of chats and of texts, and the list of models.

completions  the endpoint of both kinds: a request in, the sampler's outputs out, streamed or not
chat, text   the two kinds: request, prompt, and format of the response; base: what both share
"""

from aiohttp import web
from pydantic import BaseModel

from insitu.backend.http import ApiRoute
from insitu.backend.protocols import Services
from insitu.backend.protocols.openai.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from insitu.backend.protocols.openai.completions import CompletionEndpoint, SampleLog
from insitu.backend.protocols.openai.text import TextCompletion, TextRequest
from insitu.wire.http_server import json_response

_MODEL = {"object": "model", "created": 0, "owned_by": "insitu"}


class ModelEntry(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    policy_version: int | None = None


class ModelList(BaseModel):
    object: str
    data: list[ModelEntry]


def routes(services: Services) -> list[ApiRoute]:
    sampler, models = services.sampler, services.models
    log = SampleLog(services.options.log_samples) if services.options.log_samples else None

    async def list_models(request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [{"id": name, **_MODEL} for name in models.names()]})

    async def get_model(request: web.Request) -> web.Response:
        name = request.match_info["model"]
        return json_response({"id": name, **_MODEL, "policy_version": models.find(name).version})

    return [
        ApiRoute("GET", "/v1/models", list_models, "Names of the model and its versions", response=ModelList),
        ApiRoute("GET", "/v1/models/{model:.+}", get_model, "One model", response=ModelEntry),
        ApiRoute(
            "POST",
            "/v1/chat/completions",
            CompletionEndpoint(ChatRequest, sampler, models, log).complete,
            "Chat completion; with `stream`, events that end with [DONE]",
            request=[ChatRequest],
            response=ChatCompletion,
            events=ChatCompletionChunk,
        ),
        ApiRoute(
            "POST",
            "/v1/completions",
            CompletionEndpoint(TextRequest, sampler, models, log).complete,
            "Text completion; with `stream`, events that end with [DONE]",
            request=[TextRequest],
            response=TextCompletion,
            events=TextCompletion,
        ),
    ]
