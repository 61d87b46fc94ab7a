"""HTTP formats used on both sides of the wire: URLs, server-sent events, OpenAI error bodies, tokens of a choice.

data: {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}                       an event of a stream
{"error": {"message": "...", "type": "not_found_error", "param": null, "code": null}}        an error body
{"token_ids": [7], "logprobs": {"content": [{"token": "token_id:7", "logprob": -0.1}]}}  tokens of a choice
"""

import base64
import gc
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson

DONE = b"[DONE]"
"""Data of the last event of a streamed completion."""
MALFORMED = (LookupError, TypeError, AttributeError, ValueError)
"""Exceptions raised by reading JSON of an unexpected shape, and by `orjson.loads`."""

_TOKEN_ID = "token_id:"
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def url_host(host: str) -> str:
    """Formats a host for a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def http_url(host: str, port: int) -> str:
    return f"http://{url_host(host)}:{port}"


def split_userinfo(url: str) -> tuple[str, str | None]:
    """A URL without `user:password@`, which aiohttp refuses beside an Authorization header, and `user:password`."""
    parts = urlsplit(url)
    userinfo, found, host = parts.netloc.rpartition("@")
    return (parts._replace(netloc=host).geturl(), unquote(userinfo)) if found else (url, None)


def authorization(userinfo: str | None, key: str) -> str:
    """The header for a server: the credentials of its URL, or else its key."""
    return f"Bearer {key}" if userinfo is None else f"Basic {base64.b64encode(userinfo.encode()).decode()}"


def format_event(data: bytes, event: str | None = None) -> bytes:
    """One server-sent event; `data` must not contain line breaks."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def event_data(line: bytes) -> bytes | None:
    """The payload of a `data:` line of an event stream; None for any other line."""
    return line[5:].strip() if line.startswith(b"data:") else None


def parse_events(buffer: bytes) -> tuple[list[Any], bytes]:
    """Splits a stream into the JSON of its complete events, one line of data each, and the incomplete rest."""
    *lines, rest = buffer.split(b"\n")
    payloads = (event_data(line) for line in lines)
    return [orjson.loads(data) for data in payloads if data is not None and data != DONE], rest


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's API reports it."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_message(body: Any) -> str | None:
    """The message of an error body, or of an event that reports an error; None if there is no `error`."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error) if error else None


def error_param(content: bytes) -> str | None:
    """The key of the request that an error body blames; None if it names none."""
    try:
        param = orjson.loads(content)["error"]["param"]
    except MALFORMED:
        return None
    return param if isinstance(param, str) and param else None


def parse_lenient_json(data: bytes) -> Any:
    """Accepts NaN and Infinity, which servers in Python may write; raises ValueError if it is not JSON."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def format_token_id(token_id: int) -> str:
    """A token in logprobs, as vLLM writes it with `return_tokens_as_token_ids`."""
    return f"{_TOKEN_ID}{token_id}"


def parse_token_ids(tokens: Iterable[Any]) -> list[int] | None:
    """The ids of tokens written as `token_id:N`; None if there are no tokens, or one of them is text."""
    ids = []
    for token in tokens:
        before, _, number = str(token).partition(_TOKEN_ID)
        if before or not number.isdecimal():
            return None
        ids.append(int(number))
    return ids or None


def chat_logprobs(tokens: Iterable[str], logprobs: Iterable[float]) -> dict[str, Any]:
    """`logprobs` of a choice of a chat, as OpenAI's API returns them."""
    entries = zip(tokens, logprobs, strict=True)
    content: list[dict[str, Any]] = [
        {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []} for token, logprob in entries
    ]
    return {"content": content, "refusal": None}


def sampled_tokens(logprobs: Any) -> tuple[list[Any], list[float] | None]:
    """The tokens and their logprobs in `logprobs` of a choice: of a chat (`content`) or of a text (`tokens`)."""
    if not isinstance(logprobs, dict):
        return [], None
    entries = logprobs.get("content")
    tokens = [entry.get("token") for entry in entries] if entries is not None else logprobs.get("tokens") or []
    return tokens, _logprobs(logprobs)


def _logprobs(logprobs: dict[str, Any]) -> list[float] | None:
    entries = logprobs.get("content")
    return logprobs.get("token_logprobs") if entries is None else [entry["logprob"] for entry in entries]


def choice_token_ids(choice: dict[str, Any]) -> list[int] | None:
    """The sampled token ids: `token_ids`, or else those written in the logprobs."""
    ids: list[int] | None = choice.get("token_ids")
    return ids if ids is not None else parse_token_ids(sampled_tokens(choice.get("logprobs"))[0])


def choice_logprobs(choice: dict[str, Any]) -> list[float] | None:
    """The logprobs of the sampled tokens; empty for a completion without tokens, whose `logprobs` may be null."""
    fields = choice.get("logprobs")
    logprobs = _logprobs(fields) if isinstance(fields, dict) else None
    return [] if logprobs is None and choice.get("token_ids") == [] else logprobs


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector while a large body is parsed or built, which is six times faster.

    The collector belongs to the process: keep the block short.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
