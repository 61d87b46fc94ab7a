"""Formats used on both sides of the wire: headers, events, OpenAI's error bodies, token ids, and metrics.

{"error": {"message": "...", "type": "not_found_error", "param": null, "code": null}}        an error body
{"token": "token_id:7", "logprob": -0.1}                                                     a token id in logprobs
{"token_ids": [7, 2], "logprobs": {"token_logprobs": [-0.1, -0.7]}}                          a compact choice
"""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import orjson

DONE = b"[DONE]"
"""Data of the last event of a streamed completion."""
JSON = "application/json"
COMPACT = "application/vnd.insitu.completion+json"
"""Content type of completions whose logprobs are one list of numbers for each choice; `Accept` asks for it."""
IDEMPOTENCY_KEY = "Idempotency-Key"
BODY_DIFFERS = "Body-Differs"
"""Header of a response about the job of an idempotency key, if another body was sent with the key at first."""
CHAT, TEXT = "chat/completions", "completions"
"""Routes of OpenAI's API, below `/v1`."""
MALFORMED = (LookupError, TypeError, AttributeError, ValueError)
"""Exceptions raised by reading JSON of an unexpected shape, and by `orjson.loads`."""

_TOKEN_ID = "token_id:"
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class Sample(NamedTuple):
    """A value of a metric, of which there is one for each combination of labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def metrics_text(samples: Iterable[Sample], about: Mapping[str, str]) -> str:
    """Samples in the text format of Prometheus, which wants those of a metric together, below what it is about.

    A metric called `..._total` is a counter, any other a gauge.
    """
    lines: dict[str, list[str]] = {}
    for name, labels, value in samples:
        kind = "counter" if name.endswith("_total") else "gauge"
        pairs = ",".join(f'{key}="{text.translate(_ESCAPED)}"' for key, text in labels.items())
        of_name = lines.setdefault(name, [f"# HELP {name} {about[name]}\n", f"# TYPE {name} {kind}\n"])
        of_name.append(f"{name}{{{pairs}}} {value}\n" if pairs else f"{name} {value}\n")
    text = "".join(line for of_name in lines.values() for line in of_name)
    return text.encode(errors="backslashreplace").decode()  # the name of a folder may not be UTF-8


_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
"""What a label's value has in that format."""


def accepts_compact(headers: Mapping[str, str]) -> bool:
    return COMPACT in (part.partition(";")[0].strip().lower() for part in headers.get("Accept", "").split(","))


def format_event(data: bytes, event: str | None = None) -> bytes:
    """One server-sent event; `data` must not contain line breaks."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's API reports it; lone surrogates, of a request's key say, are escaped."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, blamed = (text.encode(errors="backslashreplace").decode() for text in (message, param or ""))
    return {"error": {"message": message, "type": kind, "param": blamed or None, "code": code}}


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


def retry_header(status: int, retried: Collection[int] | None) -> dict[str, str]:
    """What the clients of OpenAI and Anthropic look at first when they decide whether to repeat a request.

    `retried` are the statuses after which they are to do so; None: they decide themselves.
    """
    if status < 400 or retried is None:
        return {}
    return {"x-should-retry": "true" if status in retried else "false"}


_DIGITS = 19
"""Python refuses to read integers of more than 4,300 digits, and databases those beyond 64 bits."""
format_token_id = f"{_TOKEN_ID}{{}}".format
"""Writes a token in logprobs as vLLM does with `return_tokens_as_token_ids`."""


def parse_count(text: str) -> int | None:
    """A version or token id in a text; None for another text, and for more digits than one has."""
    return int(text) if text.isdecimal() and len(text) < _DIGITS else None


def parse_token_ids(tokens: Iterable[Any]) -> list[int] | None:
    """The ids of tokens written as `token_id:N`; None if there are no tokens, or one of them is text."""
    ids = []
    for token in tokens:
        before, _, number = str(token).partition(_TOKEN_ID)
        if before or (parsed := parse_count(number)) is None:
            return None
        ids.append(parsed)
    return ids or None


def load_json(data: bytes) -> Any:
    """Parses JSON, also with a byte order mark, lone surrogates, NaN or Infinity. Raises ValueError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
