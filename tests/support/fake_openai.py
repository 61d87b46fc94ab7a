"""A small server that speaks the OpenAI dialect with token ids: `with FakeOpenAI() as server: server.base_url`.

A real HTTP server in its own thread. The text of the last message, or the prompt of a text completion, decides
what it answers. Token ids are those of characters; a text completion has its prompt's ids in each choice, as with vLLM:

    "slow 0.5"       after half a second                  "fail 2"        500 for the first two attempts with this text
    "status 400"     that status                          "tool"          a tool call
    "hang up"        closes the connection                "stall"         streams one piece, then nothing
    "gzip"           compressed                           "seeded"        "echo: " and the seed of the request
    "linger"         streams an answer, but no [DONE]     "nothing"       only the token that ends a completion
    anything else    "echo: " and that text, one token a character
"""

import asyncio
import json
import threading
from collections import Counter
from typing import Any, Self

from aiohttp import web
from waiting import hang


class FakeOpenAI:
    """`requests` are the bodies received, in order. `token_ids`, `logprobs` False: a server that cannot give them.

    `tokens_as_ids`: the tokens of its logprobs are `token_id:N`, as ART's servers write them. A request with one of the
    keys `refuses` is a 400, as OpenAI's API answers it.
    """

    def __init__(
        self,
        *,
        token_ids: bool = True,
        logprobs: bool = True,
        policy_version: int | None = 3,
        tokens_as_ids: bool = False,
        refuses: tuple[str, ...] = (),
    ) -> None:
        self.refuses = refuses
        self.tokens_as_ids = tokens_as_ids
        self.token_ids, self.logprobs, self.policy_version = token_ids, logprobs, policy_version
        self.requests: list[dict[str, Any]] = []
        self.latest: web.Request | None = None
        self.connections: set[Any] = set()
        self._failed: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.base_url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def abort(self, connections: set[Any]) -> None:
        """Cuts these connections, as a server does that is killed."""
        for transport in connections:
            self._loop.call_soon_threadsafe(transport.abort)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**24)
        self.add_routes(app.router)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        host, port = runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        left = asyncio.all_tasks(self._loop)  # answers that were still being stalled
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self._complete)
        router.add_post("/v1/completions", self._complete)
        router.add_get("/v1/models", self._models)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.latest = request
        self.connections.add(request.transport)
        for key in self.refuses:
            if body.get(key):
                message = f"Unrecognized request argument supplied: {key}"
                error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
                return web.json_response({"error": error}, status=400)
        text = texts_of(body)[0]
        word, _, number = text.partition(" ")
        if word == "slow":
            await asyncio.sleep(float(number))
        if word == "fail" and self._failed[text] < int(number):
            self._failed[text] += 1
            return web.json_response({"error": {"message": "try again"}}, status=500)
        if word == "status":
            return web.json_response({"error": {"message": f"refused: {text}"}}, status=int(number))
        if text == "hang up":
            request.transport.close()
        if body.get("stream"):
            return await self._stream(request, body)
        choices = [self._choice(body, text, *place) for *place, text in places_of(body)]
        reply = {**self._head(body, "chat.completion"), "choices": choices, "usage": _usage(body, choices)}
        response = web.json_response(reply)
        if text == "gzip":
            response.enable_compression(web.ContentCoding.gzip)
        return response

    def _head(self, body: dict[str, Any], kind: str) -> dict[str, Any]:
        kind = kind if "messages" in body else "text_completion"
        head = {"id": "c1", "object": kind, "created": 1, "model": body["model"]}
        if self.policy_version is not None:
            head["policy_version"] = self.policy_version
        if body.get("return_token_ids") and self.token_ids and "messages" in body:
            head["prompt_token_ids"] = encode(str(body["messages"]))
        return head

    def _choice(self, body: dict[str, Any], text: str, index: int, number: int) -> dict[str, Any]:
        said = str(body.get("seed")) if text == "seeded" else text
        answer = f"echo: {said}" if number == 0 else f"echo {number}: {said}"
        if "prompt" in body:
            choice = {"index": index, "text": answer, "finish_reason": "stop", "logprobs": None}
            self._add_tokens(body, choice, answer)
            self._add_prompt(body, choice, text)
            return choice
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        reason = "stop"
        if text == "tool":
            message = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
            reason = "tool_calls"
        if text == "nothing":
            message["content"], answer = "", END
        choice = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
        self._add_tokens(body, choice, answer)
        return choice

    def _add_prompt(self, body: dict[str, Any], choice: dict[str, Any], text: str) -> None:
        if body.get("return_token_ids") and self.token_ids:
            choice["prompt_token_ids"] = encode(text)

    def _add_tokens(self, body: dict[str, Any], choice: dict[str, Any], text: str) -> None:
        if body.get("return_token_ids") and self.token_ids:
            choice["token_ids"] = encode(text)
        template = "token_id:{}" if self.tokens_as_ids else "{1}"
        tokens = [template.format(token, c) for token, c in zip(encode(text), text, strict=True)]
        if "prompt" in body and body.get("logprobs") is not None and self.logprobs:
            logprobs = [logprob(c) for c in text]
            top = [{token: value} for token, value in zip(tokens, logprobs, strict=True)]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": []}
        elif body.get("logprobs") and self.logprobs:
            entries = [
                {"token": t, "logprob": logprob(c), "bytes": [ord(c)], "top_logprobs": []}
                for t, c in zip(tokens, text, strict=True)
            ]
            choice["logprobs"] = {"content": entries}

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head = self._head(body, "chat.completion.chunk")

        async def send(choices: list[dict[str, Any]], **others: Any) -> None:
            await response.write(b"data: " + json.dumps({**head, "choices": choices, **others}).encode() + b"\n\n")
            head.pop("prompt_token_ids", None)

        is_chat = "messages" in body
        for index, *_ in places_of(body) if is_chat else ():
            await send([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for index, number, text in places_of(body):
            for place, (delta, tokens) in enumerate(_deltas(text, number)):
                grown = {"delta": delta} if is_chat else {"text": delta["content"]}
                choice = {"index": index, **grown, "finish_reason": None, "logprobs": None}
                self._add_tokens(body, choice, tokens)
                if not is_chat and place == 0:
                    self._add_prompt(body, choice, text)
                await send([choice])
                if text == "stall":
                    await hang()
            reason = "tool_calls" if text == "tool" else "stop"
            await send([{"index": index, **({"delta": {}} if is_chat else {"text": ""}), "finish_reason": reason}])
            if text == "linger":
                await hang()
        if (body.get("stream_options") or {}).get("include_usage"):
            await send([], usage={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3})
        await response.write(b"data: [DONE]\n\n")
        return response


END = "\x03"
"""The token that ends a completion without text."""
TOOL_CALL = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}


def texts_of(body: dict[str, Any]) -> list[str]:
    """What is to be answered: the last message, or the texts to be completed."""
    if "messages" in body:
        return [str(body["messages"][-1].get("content"))]
    prompt = body["prompt"]
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [text if isinstance(text, str) else "".join(map(chr, text)) for text in several]


def places_of(body: dict[str, Any]) -> list[tuple[int, int, str]]:
    """Index, number among choices of the same text, and text of each choice."""
    n = body.get("n") or 1
    return [(place * n + k, k, text) for place, text in enumerate(texts_of(body)) for k in range(n)]


def _deltas(text: str, index: int) -> list[tuple[dict[str, Any], str]]:
    if text == "tool":
        first = {"index": 0, **TOOL_CALL, "function": {"name": "look", "arguments": '{"at"'}}
        second = {"index": 0, "function": {"arguments": ': "sky"}'}}
        return [({"tool_calls": [first]}, "ab"), ({"tool_calls": [second]}, "c")]
    if text == "nothing":
        return [({"content": ""}, END)]
    answer = f"echo: {text}" if index == 0 else f"echo {index}: {text}"
    return [({"content": part}, part) for part in (answer[:3], answer[3:6], answer[6:]) if part]


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def logprob(character: str) -> float:
    return -(ord(character) % 7) / 8


def _usage(body: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, int]:
    sampled = sum(len(str(c["text"] if "text" in c else c["message"]["content"])) for c in choices)
    prompt = len(str(body.get("messages") or body["prompt"]))
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
