"""The endpoints `/tokenize` and `/detokenize`, as vLLM has them: prompts of completions and texts as token ids."""

from aiohttp import web
from pydantic import BaseModel

from insitu.backend.http import ApiRoute
from insitu.backend.protocols import Services
from insitu.backend.protocols.openai.chat import ChatRequest
from insitu.backend.protocols.openai.text import RequestModel, TextRequest, TokenIds
from insitu.errors import RequestRefused
from insitu.wire.http_server import json_response, parse_body, parse_json, read_body

MAX_BODY = 16 * 2**20


class DetokenizeRequest(RequestModel):
    """The body of `POST /detokenize`."""

    model: str
    tokens: TokenIds


class TokenizeResponse(BaseModel):
    """The token ids of a prompt; a prompt and its completion may have `max_model_len` tokens together."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(BaseModel):
    """The text of tokens, special ones included."""

    prompt: str


def token_routes(services: Services) -> list[ApiRoute]:
    sampler = services.sampler

    def prompt_of(body: bytes) -> list[int]:
        data = parse_json(body)
        kind = ChatRequest if isinstance(data, dict) and "messages" in data else TextRequest
        request = kind.parse(body)
        services.models.find(request.model)
        prompts = request.prompts(sampler.tokenizer)
        if len(prompts) != 1:
            raise RequestRefused(f"prompt holds {len(prompts)} prompts; allowed: one", param="prompt")
        return prompts[0]

    def text_of(body: bytes) -> str:
        request = DetokenizeRequest.model_validate(parse_json(body))
        services.models.find(request.model)
        if (highest := max(request.tokens, default=0)) >= sampler.vocab_size:
            problem = f"tokens has the token {highest}; the vocabulary ends at {sampler.vocab_size - 1}"
            raise RequestRefused(problem, param="tokens")
        return sampler.tokenizer.decode(request.tokens, skip_special_tokens=False)

    async def tokenize(request: web.Request) -> web.Response:
        # a chat template is a program of the model's author, which may loop
        tokens = await parse_body(prompt_of, await read_body(request, MAX_BODY), may_loop=True)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": sampler.max_length})

    async def detokenize(request: web.Request) -> web.Response:
        return json_response({"prompt": await parse_body(text_of, await read_body(request, MAX_BODY), may_loop=False)})

    ids, text = "The token ids of the prompt of a completion", "The text of token ids"
    return [
        ApiRoute("POST", "/tokenize", tokenize, ids, request=[TextRequest, ChatRequest], response=TokenizeResponse),
        ApiRoute("POST", "/detokenize", detokenize, text, request=[DetokenizeRequest], response=DetokenizeResponse),
    ]
