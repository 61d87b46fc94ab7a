"""Secrets of this process, and what it prints, writes and answers without them.

The command line, the configuration and the clients of model servers say what is secret (`remember_...`). Console and
logs (`redact_stream`), files (`files.py`) and error responses (`redact`) then hold `***` instead, also where a library
or an agent has put a secret into a message.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote, unquote

MIN_LENGTH = 8
"""Shorter values are kept: they may be ordinary words, such as `none` and `default`."""
MASK = "***"
_SHORTEST_ALPHABETIC = 16

_VARIABLE = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|_PWD$|(?:^|_)(?:TOKENS?|KEYS?|PAT|AUTH|COOKIES?)(?:_|$)", re.IGNORECASE
)
_KEY = re.compile(
    r"secret|passw|passphrase|credential|authorization|cookie|(?:api|access|private|auth)[_-]?key$"
    r"|^(?:(?:\w+[_-])?(?:api|auth|access|bearer|refresh|hf|hub)[_-])?token$",
    re.IGNORECASE,
)
"""Keys of a configuration. Narrower than for variables: `id_key` and `stop_token` hold no secrets."""
_NUMBER = re.compile(r"[\d.eE+-]+")
"""Never redacted: it may be a part of any number in a file."""
_IN_URL = re.compile(
    r"(?:://|^)[^/\s:@]*:([^/\s]+)@|[?&][^=&\s]*(?:key|token|secret|passw)[^=&\s]*=([^&#\s]+)", re.IGNORECASE
)

_texts: tuple[str, ...] = ()
_bytes: tuple[bytes, ...] = ()


def is_secret_variable(name: str, value: str) -> bool:
    """Whether an environment variable is a secret, by its name, or because it is a URL with a password."""
    return bool(_VARIABLE.search(name)) or any(True for _ in _url_secrets(value))


def is_secret_key(name: str) -> bool:
    """Whether a key of a configuration has a secret."""
    return bool(_KEY.search(name))


def remember_secret(value: str | None) -> None:
    """Removes a value from what this process prints and writes from now on, also quoted for JSON or a URL."""
    global _texts, _bytes
    if value is None or len(value) < MIN_LENGTH or value in _texts or _NUMBER.fullmatch(value):
        return
    forms = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], quote(value, safe="")}
    _texts = tuple(sorted({*_texts, *forms}, key=len, reverse=True))  # a secret may contain another one
    _bytes = tuple(text.encode(errors="surrogatepass") for text in _texts)


def remember_url(text: str | None) -> None:
    """Remembers the password of a URL, and the keys and tokens in its query."""
    for secret in _url_secrets(text or ""):
        remember_secret(secret)
        remember_secret(unquote(secret))


def _url_secrets(text: str) -> Iterator[str]:
    return (found[1] or found[2] for found in _IN_URL.finditer(text))


def remember_environment(variables: Mapping[str, str]) -> None:
    """Remembers the secrets among environment variables, but neither paths nor words, as in `KEY_CHECKING=disabled`."""
    for name, value in variables.items():
        is_word = value.isalpha() and len(value) < _SHORTEST_ALPHABETIC
        if _VARIABLE.search(name) and not is_word and not value.startswith("/"):
            remember_secret(value)
        remember_url(value)


def remember_settings(node: Any, key: str = "") -> None:
    """Remembers the texts in nested mappings and lists whose keys say that they are secret, and those in URLs."""
    if isinstance(node, dict):
        for name, value in node.items():
            remember_settings(value, str(name) if not _KEY.search(key) else key)
    elif isinstance(node, list):
        for value in node:
            remember_settings(value, key)
    elif isinstance(node, str):
        remember_url(node)
        if _KEY.search(key):
            remember_secret(node)
            remember_secret(node.rpartition(" ")[2])  # of `Bearer SECRET`


def redact(text: str) -> str:
    for secret in _texts:
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def redact_bytes(data: bytes) -> bytes:
    """The same for UTF-8."""
    for secret in _bytes:
        if secret in data:
            data = data.replace(secret, MASK.encode())
    return data


def redact_stream(stream: TextIO) -> None:
    """Redacts whatever is written to a stream: by `print`, rich, logging and tracebacks."""
    write = stream.write
    stream.write = lambda text: write(redact(text))  # type: ignore[method-assign]
