"""Formats used on both sides of the wire: URLs, OpenAI's error bodies, token ids, and JSON of any value.

{"error": {"message": "...", "type": "not_found_error", "param": null, "code": null}}        an error body
{"token": "token_id:7", "logprob": -0.1}                                                     a token id in logprobs
{"token_ids": [7, 2], "logprobs": {"token_logprobs": [-0.1, -0.7]}}                          a compact choice
"""

import base64
import gc
import gzip
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import orjson
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from insitu.errors import ConfigError, WorkflowError

if TYPE_CHECKING:
    from jsonpath import JSONPath

DONE = b"[DONE]"
"""Data of the last event of a streamed completion."""
JSON = "application/json"
COMPACT = "application/vnd.insitu.completion+json"
"""Content type of completions whose logprobs are one list of numbers for each choice; `Accept` asks for it."""
IDEMPOTENCY_KEY = "Idempotency-Key"
BODY_DIFFERS = "Body-Differs"
"""Header of a response about the job of an idempotency key, if another body was sent with the key at first."""
MALFORMED = (LookupError, TypeError, AttributeError, ValueError)
"""Exceptions raised by reading JSON of an unexpected shape, and by `orjson.loads`."""

_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "::")
_TOKEN_ID = "token_id:"
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def url_host(host: str) -> str:
    """Formats a host for a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def http_url(host: str, port: int) -> str:
    return f"http://{url_host(host)}:{port}"


def is_same_server(url: str | None, other: str) -> bool:
    """Whether two URLs have the same host and port."""
    return url is not None and _address(url) == _address(other)


def _address(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return "localhost" if host in _LOCAL else host, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def split_userinfo(url: str) -> tuple[str, str | None]:
    """A URL without `user:password@`, which aiohttp refuses beside an Authorization header, and `user:password`."""
    parts = urlsplit(url)
    userinfo, found, host = parts.netloc.rpartition("@")
    return (parts._replace(netloc=host).geturl(), unquote(userinfo)) if found else (url, None)


def authorized(base_url: str, key: str) -> tuple[str, str]:
    """A server's URL without its credentials, and the Authorization header: with them, or else with its key."""
    address, userinfo = split_userinfo(base_url)
    basic = base64.b64encode((userinfo or "").encode()).decode()
    return address.rstrip("/"), f"Bearer {key}" if userinfo is None else f"Basic {basic}"


class Sample(NamedTuple):
    """A value of a metric, of which there is one for each combination of labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def metrics_text(samples: Iterable[Sample]) -> str:
    """Samples in the text format of Prometheus, which wants those of a metric together."""
    lines: dict[str, list[str]] = {}
    for name, labels, value in samples:
        pairs = ",".join(f'{key}="{text.translate(_ESCAPED)}"' for key, text in labels.items())
        lines.setdefault(name, []).append(f"{name}{{{pairs}}} {value}\n" if pairs else f"{name} {value}\n")
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


def json_form(value: Any) -> Any:
    """A JSON form for other objects: numbers and lists for those of numpy and torch, else text."""
    try:
        return value.tolist() if hasattr(value, "tolist") else str(value)
    except Exception:  # a workflow's object may raise anything
        return f"<{type(value).__name__} object>"


JSON_OPTIONS: dict[str, Any] = {"fallback": json_form, "bytes_mode": "base64", "serialize_as_any": True}
"""serialize_as_any keeps fields that a subclass adds to the declared model, such as LangChain's tool calls."""


def to_jsonable(value: Any) -> Any:
    """Converts a value to plain JSON types; objects without a JSON form become text."""
    return to_jsonable_python(value, **JSON_OPTIONS)


def encode(value: Any) -> bytes:
    """JSON of any value a workflow may return; raises ValueError if it is nested too deeply."""
    try:
        return to_json(value, inf_nan_mode="constants", **JSON_OPTIONS)
    except (PydanticSerializationError, UnicodeEncodeError):  # lone surrogates are escaped
        try:
            return json.dumps(to_jsonable(value)).encode()
        except UnicodeEncodeError:  # in a key
            return json.dumps(value, default=json_form).encode()


def decode(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError:  # lone surrogates again, or not JSON
        return json.loads(text)


@cache
def json_path(text: str, key: str) -> "JSONPath | None":
    """A JSONPath (RFC 9535); None for `$`, the whole value. Raises ConfigError naming `key` if it is invalid."""
    if text == "$":
        return None
    from jsonpath import JSONPathEnvironment, JSONPathError

    try:
        return JSONPathEnvironment(strict=True).compile(text)  # type: ignore[return-value]  # strict: no compound paths
    except JSONPathError as error:
        raise ConfigError(
            f"{key} {text!r} is not a JSONPath such as $.answer or $.choices[0].text: {error.args[0]}"
        ) from error


def value_at(text: str, result: Any, key: str) -> Any:
    """The value at a path in a model, a container or JSON text; raises WorkflowError unless it is unique."""
    path = json_path(text, key)
    if path is None:
        return result
    if isinstance(result, str | bytes):
        try:
            result = from_json(result)
        except ValueError as error:
            raise WorkflowError(f"{key} {text}: the result {result!r:.80} is not JSON") from error
    values = path.findall(to_jsonable_python(result, fallback=json_form, bytes_mode="base64"))
    if len(values) != 1:
        raise WorkflowError(f"{key} {text} matches {len(values)} values of {result!r:.200}, not one")
    return values[0]


def has_lone_surrogate(text: str) -> bool:
    """Whether a text, as JSON may hold it, cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def gzip_lines(header: dict[str, Any] | None, rows: Sequence[BaseModel]) -> bytes:
    """Rows as gzipped JSON lines, after a header if there is one. Level 1 pays off even on loopback."""
    lines = [] if header is None else [orjson.dumps(header)]
    for row in rows:
        if row.__pydantic_extra__:
            values = row.model_dump()
        else:  # much faster
            values = {key: value for key, value in row.__dict__.items() if key in row.model_fields_set}
        lines.append(orjson.dumps(values))
    return gzip.compress(b"\n".join(lines) + b"\n", compresslevel=1)
