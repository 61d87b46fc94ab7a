"""Secrets of this process, and what it prints, writes and answers without them.

The command line, the configuration and the clients of model servers say what is secret (`remember_...`). Console and
logs (`redact_stream`), files (`files.py`) and error responses (`redact`) then hold `***` instead, also where a library
or an agent has put a secret into a message, or encoded it. Where settings are shown, what is hidden depends on their
keys, whatever the values (`config/resolved.py`).
"""

import html
import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import quote, quote_plus, unquote

if TYPE_CHECKING:  # importing rich would slow `--help` down
    from rich.console import Console
    from rich.text import Text

MIN_LENGTH = 8
"""Shorter values are not recognised: they may be part of ordinary words and numbers."""
MASK = "***"
_SHORTEST_ALPHABETIC = 16
_SHORTEST_LINE = 16

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

_secrets: dict[str, bytes] = {}
"""What this process hides, the longest first, as text and in UTF-8."""


def is_secret_variable(name: str, value: str) -> bool:
    """Whether an environment variable is a secret, by its name, or because it is a URL with a password."""
    return bool(_VARIABLE.search(name)) or any(True for _ in _url_secrets(value))


def is_secret_key(name: str) -> bool:
    """Whether a key of a configuration has a secret."""
    return bool(_KEY.search(name))


def remember_secret(value: str | None) -> bool:
    """Removes a value from what this process prints and writes from now on, in any of the usual encodings.

    Returns False for a value that cannot be recognised: one that is too short, or a number.
    """
    global _secrets
    if value is None or len(value.strip()) < MIN_LENGTH or _NUMBER.fullmatch(value.strip()):
        return False
    if value not in _secrets:
        lines = (line for line in map(str.strip, value.splitlines()) if len(line) >= _SHORTEST_LINE)
        forms = {form for part in {value, value.strip(), *lines} for form in _forms(part)}
        texts = sorted({*_secrets, *forms}, key=len, reverse=True)  # a secret may contain another one
        _secrets = {text: _utf8(text) for text in texts}
    return True


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


_SAFE_IN_URLS = ("", "/", "!$&'()*+,;", "!$&'()*+,;=", "!$&'()*+,;=:@/?")
"""Characters that libraries leave as they are when they quote a part of a URL."""


def _forms(text: str) -> Iterator[str]:
    """A text as it is, and quoted for JSON, Python, HTML or a URL, or encoded in base64."""
    data = _utf8(text)
    yield text
    for quoted in (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]):
        yield quoted
        yield json.dumps(quoted)[1:-1]  # as in the arguments of a tool call
    yield from (repr(text)[1:-1], ascii(text)[1:-1], repr(data)[2:-1], html.escape(text))
    for quoted in (*(quote(data, safe=safe) for safe in _SAFE_IN_URLS), quote_plus(data)):
        yield quoted
        yield re.sub("%..", lambda code: code[0].lower(), quoted)
    yield from _in_base64(data)


def _in_base64(data: bytes) -> Iterator[str]:
    """What is the same in any base64 text of which `data` is a part, as in `Basic` credentials, after `user:`."""
    for before in range(3):  # bytes before it in its group of three
        first, end = (0, 2, 3)[before], (before + len(data)) * 8 // 6
        for encode in (b64encode, urlsafe_b64encode):
            yield encode(bytes(before) + data)[first:end].decode()


def remember_url(text: str | None) -> bool:
    """Remembers the password of a URL, and the keys and tokens in its query; False if one cannot be recognised."""
    recognised = True
    for secret in _url_secrets(text or ""):
        remember_secret(unquote(secret))
        recognised &= remember_secret(secret) or _is_word(secret)
    return recognised


def _url_secrets(text: str) -> Iterator[str]:
    return (found[1] or found[2] for found in _IN_URL.finditer(text))


def hide_url_secrets(text: str) -> str:
    """A text without the passwords, keys and tokens of its URLs, however short."""

    def hide(found: re.Match[str]) -> str:
        start, end = (index - found.start() for index in found.span(1 if found[1] else 2))
        return found[0][:start] + MASK + found[0][end:]

    return _IN_URL.sub(hide, text)


def _is_word(value: str) -> bool:
    """Such as `none` and `default`: letters only, and few of them."""
    return value.isalpha() and len(value) < MIN_LENGTH


def remember_environment(variables: Mapping[str, str]) -> None:
    """Remembers the secrets among environment variables, but neither paths nor words, as in `KEY_CHECKING=disabled`."""
    for name, value in variables.items():
        is_word = value.isalpha() and len(value) < _SHORTEST_ALPHABETIC
        if _VARIABLE.search(name) and not is_word and not value.startswith("/"):
            remember_secret(value)
        remember_url(value)


def remember_settings(node: Any, where: str = "", *, secret: bool = False) -> list[str]:
    """Remembers the texts in nested mappings and lists whose keys say that they are secret, and those in URLs.

    Returns the dotted keys of secrets that cannot be recognised.
    """
    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        unrecognised = []
        for name, value in items:
            is_secret = secret or is_secret_key(str(name))
            unrecognised += remember_settings(value, f"{where}.{name}".removeprefix("."), secret=is_secret)
        return unrecognised
    recognised = not isinstance(node, str) or remember_url(node)
    if secret and isinstance(node, str | int | float) and not isinstance(node, bool) and node != "":
        value = str(node)
        recognised = remember_secret(value) or _is_word(value)
        remember_secret(value.rpartition(" ")[2])  # of `Bearer SECRET`
    return [] if recognised else [where]


def redact(text: str) -> str:
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def redact_bytes(data: bytes) -> bytes:
    """Redacts UTF-8 text."""
    for secret in _secrets.values():
        if secret in data:
            data = data.replace(secret, MASK.encode())
    return data


def redact_stream(stream: TextIO) -> None:
    """Redacts whatever is written to a stream: by `print`, rich, logging and tracebacks."""
    write = stream.write
    stream.write = lambda text: write(redact(text))  # type: ignore[method-assign]


def results_console(*, stderr: bool = False) -> "Console":
    """Standard output: progress and tables."""
    from rich.console import Console

    class RedactedConsole(Console):
        """Removes secrets before lines are wrapped, as a secret of two lines is not recognised."""

        def render_str(self, text: str, **options: Any) -> "Text":
            return super().render_str(redact(text), **options)

    return RedactedConsole(stderr=stderr, highlight=False)


notes_console = partial(results_console, stderr=True)
"""Standard error, for commands whose standard output is their answer."""
