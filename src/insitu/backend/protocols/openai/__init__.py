"""The OpenAI-compatible endpoints: completions of chats and of texts, and the list of models.

completions  the endpoint of both kinds: a request in, the sampler's outputs out, streamed or not
chat, text   the two kinds: request, prompt, and format of the response; base: what both share
"""

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from insitu.backend.http import JSON, ApiRoute
from insitu.backend.protocols import Services
from insitu.backend.protocols.openai.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from insitu.backend.protocols.openai.completions import CompletionEndpoint, SampleLog
from insitu.backend.protocols.openai.text import TextCompletion, TextRequest

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

    async def list_models(request: Request) -> Response:
        return JSON({"object": "list", "data": [{"id": name, **_MODEL} for name in models.names()]})

    async def get_model(request: Request) -> Response:
        name = request.path_params["model"]
        return JSON({"id": name, **_MODEL, "policy_version": models.find(name).version})

    return [
        ApiRoute("GET", "/v1/models", list_models, "Names of the model and its versions", response=ModelList),
        ApiRoute("GET", "/v1/models/{model:path}", get_model, "One model", response=ModelEntry),
        ApiRoute(
            "POST",
            "/v1/chat/completions",
            CompletionEndpoint(ChatRequest, sampler, models, log),
            "Chat completion; with `stream`, events that end with [DONE]",
            request=[ChatRequest],
            response=ChatCompletion,
            events=ChatCompletionChunk,
        ),
        ApiRoute(
            "POST",
            "/v1/completions",
            CompletionEndpoint(TextRequest, sampler, models, log),
            "Text completion; with `stream`, events that end with [DONE]",
            request=[TextRequest],
            response=TextCompletion,
            events=TextCompletion,
        ),
    ]
