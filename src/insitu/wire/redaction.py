"""Secrets of this process, and what it prints, writes and answers without them.

The command line, the configuration and the clients of model servers say what is secret (`remember_...`). Console and
logs (`redact_stream`), files (`files.py`) and error responses (`redact`) then hold `***` instead, also where a library
or an agent has put a secret into a message, or encoded it. Where settings are shown, what is hidden depends on their
keys, whatever the values (`config/resolved.py`).
"""

import errno
import html
import io
import json
import os
import re
import sys
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping
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
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|BEARER|SIGNATURE|WEBHOOK|CONN(?:ECTION)?_?STR|(?:_|PG|DB)PWD$|TOKEN$"
    r"|(?:^|_|PG|DB)PASS(?:_|$)|(?:^|_)(?:TOKENS?|KEYS?|PAT|AUTH|COOKIES?|JWT|DSN)(?:_|$)|(?:API|ACCESS|PRIVATE|SSH)KEY$",
    re.IGNORECASE,
)
_COLUMN = re.compile(r"(?:^|_)(?:SORT|PRIMARY|FOREIGN|PARTITION|CACHE)_KEYS?$", re.IGNORECASE)
"""How variables end that name a column rather than a secret."""
_COLUMN_NAME = re.compile(r"(?=.{1,24}$)[a-z]+(?:_[a-z]+)*")
_GONE = (errno.EPIPE, errno.EIO)
"""The errors of a pipe that nobody reads, and of a terminal that was closed."""
_KEY = re.compile(
    r"secret|passw|passphrase|credential|authorization|cookie|(?:api|access|private|auth)[_-]?key$"
    r"|^(?:(?:\w+[_-])?(?:api|auth|access|bearer|refresh|hf|hub)[_-])?token$",
    re.IGNORECASE,
)
"""Keys of a configuration. Narrower than for variables: `id_key` and `stop_token` hold no secrets."""
_SENT = re.compile(r"env|env_vars|environment|(?:\w+[_-])?headers", re.IGNORECASE)
"""Blocks of a configuration whose values go to another program or server, and are hidden where settings are shown."""
_SHORTEST_RANDOM = 12
_SHORTEST_RANDOM_PART = 9
_ORDINARY_PART = re.compile(r"[^\W\d_]+\d{0,3}|\d{1,3}[^\W\d_]+|\d{1,8}")
"""A word, a version such as `qwen2` or `8b`, a date: parts of names."""
_TOKEN_PREFIX = re.compile(r"(?:sk|pk|gh[a-z]|github_pat|glpat|npm|hf|xox[a-z])[-_]\S{12,}")
_BASE64 = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z0-9+/]{20,}={0,2}")
_PATH = re.compile(r"(?:~|\.{0,2})/[A-Za-z._-]+/")
_BETWEEN = re.compile(r"[\s;,=\"'&?@<>{}\[\]]+")
_BETWEEN_IN_URL = re.compile(r"[/:]+")
_ORDINARY = re.compile(
    r"PATH|HOME|USER|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|(?:https?|all|no)_proxy|accept|user-agent"
    r"|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL|AWS)_CA_BUNDLE|NODE_EXTRA_CA_CERTS|content-type",
    re.IGNORECASE,
)
"""Variables that every program needs, and headers, which hold no secrets."""
_REFERENCE = re.compile(r"\$\{\w+\}")
_NUMBER = re.compile(r"[\d.eE+-]+")
"""Never redacted: it may be a part of any number in a file."""
_IN_URL = re.compile(
    r"(?:://|^)[^/\s:@]*:([^/\s]+)@|[?&][^=&\s]*(?:key|token|secret|passw)[^=&\s]*=([^&#\s]+)", re.IGNORECASE
)

EPISODE_KEY = "insitu-ep-"
"""How keys of episodes begin, by which they are recognised also after their episode."""
_EPISODE_KEYS = re.compile(rf"{EPISODE_KEY}[\w-]{{16,}}")
_EPISODE_KEYS_UTF8 = re.compile(_EPISODE_KEYS.pattern.encode())
_secrets: dict[str, bytes] = {}
"""What this process hides, the longest first, as text and in UTF-8."""


def is_secret_variable(name: str, value: str) -> bool:
    """Whether an environment variable is a secret, by its name, or because it is a URL with a password."""
    return bool(_VARIABLE.search(name)) or any(True for _ in _url_secrets(value))


def is_secret_key(name: str) -> bool:
    """Whether a key of a configuration has a secret."""
    return bool(_KEY.search(name))


def is_sent_block(name: str, value: Any) -> bool:
    """Whether a key of a configuration has values for another program or server, such as `env` or `headers`."""
    return isinstance(value, Mapping | list) and _SENT.fullmatch(name) is not None


def is_ordinary_variable(name: str) -> bool:
    """Whether any program may have an environment variable: paths, language, proxies and certificates."""
    return _ORDINARY.fullmatch(name) is not None


def is_reference(value: Any) -> bool:
    """Whether a value only names an environment variable, as `${NAME}`."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


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
    for quoted in (repr(text)[1:-1], ascii(text)[1:-1]):
        yield quoted
        yield json.dumps(quoted)[1:-1]  # as in the error of an episode
    yield from (repr(data)[2:-1], html.escape(text))
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
    return (match[1] or match[2] for match in _IN_URL.finditer(text))


def hide_url_secrets(text: str) -> str:
    """A text without the passwords, keys and tokens of its URLs, however short."""

    def hide(match: re.Match[str]) -> str:
        start, end = (index - match.start() for index in match.span(1 if match[1] else 2))
        return match[0][:start] + MASK + match[0][end:]

    return _IN_URL.sub(hide, text)


def _is_word(value: str) -> bool:
    """Such as `none` and `default`: letters only, and few of them."""
    return value.isalpha() and len(value) < MIN_LENGTH


def remember_environment(variables: Mapping[str, str]) -> None:
    """Remembers the secrets among environment variables, but neither paths nor words, as in `KEY_CHECKING=disabled`."""
    for name, value in variables.items():
        if _VARIABLE.search(name):
            _remember_unless_plain(name, value)
        remember_url(value)


def _remember_unless_plain(name: str, value: str) -> None:
    """Remembers neither a path nor a word, nor the name of a column in a variable such as SORT_KEY."""
    is_column = _COLUMN_NAME.fullmatch(value) and not _VARIABLE.search(_COLUMN.sub("", name))
    if not (value.isalpha() and len(value) < _SHORTEST_ALPHABETIC) and not value.startswith("/") and not is_column:
        remember_secret(value)


def _pieces(text: str) -> Iterator[str]:
    """The words of a text, and the parts between the separators of settings, cookies, queries and URLs."""
    for word in text.split():
        if "://" not in word:
            yield word
        for piece in _BETWEEN.split(word):
            yield from _BETWEEN_IN_URL.split(piece) if "://" in piece else [piece]


def _looks_random(word: str) -> bool:
    """Whether it is base64, begins as tokens do, or has a part of 9 letters and digits; paths and names have none."""
    if len(word) < _SHORTEST_RANDOM or _PATH.match(word):
        return False
    parts = re.split(r"[\W_]+", word)
    if _TOKEN_PREFIX.fullmatch(word) or (_BASE64.fullmatch(word) and not all(map(_ORDINARY_PART.fullmatch, parts))):
        return True
    mixed = any(map(str.isalpha, word)) and any(map(str.isdigit, word))
    return mixed and any(len(p) >= _SHORTEST_RANDOM_PART and not _ORDINARY_PART.fullmatch(p) for p in parts)


def _remember_variable(name: str, value: str) -> None:
    """Remembers a variable's value, and its parts between separators, if the name says that it is secret."""
    if _VARIABLE.search(name.replace("-", "_")):
        for piece in (value, *_BETWEEN.split(value)):
            _remember_unless_plain(name.replace("-", "_"), piece)


def remember_settings(node: Any, where: str = "", *, secret: bool = False, sent: bool = False) -> list[str]:
    """Remembers the texts in nested mappings and lists whose keys say that they are secret, and those in URLs.

    In a block that goes to another program (`sent`), also those of variables with secret names, and words of any value
    that look random. Returns the dotted keys of secrets that cannot be recognised.
    """
    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        unrecognised = []
        for name, value in items:
            of_value = {
                "secret": secret or is_secret_key(str(name)),
                "sent": is_sent_block(str(name), value) or (sent and not is_ordinary_variable(str(name))),
            }
            if sent and isinstance(value, str):
                _remember_variable(str(name), value)
            unrecognised += remember_settings(value, f"{where}.{name}".removeprefix("."), **of_value)
        if sent and isinstance(node, dict) and node.keys() >= {"name", "value"}:  # an entry of a list of variables
            _remember_variable(str(node["name"]), str(node["value"]))
        return unrecognised
    if sent and isinstance(node, str):
        name, _, value = node.partition("=")
        _remember_variable(name, value)
        for word in filter(_looks_random, _pieces(node)):
            remember_secret(word)
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
    return _EPISODE_KEYS.sub(MASK, text) if EPISODE_KEY in text else text


def redact_bytes(data: bytes) -> bytes:
    """Redacts UTF-8 text."""
    for secret in _secrets.values():
        if secret in data:
            data = data.replace(secret, MASK.encode())
    return _EPISODE_KEYS_UTF8.sub(MASK.encode(), data) if EPISODE_KEY.encode() in data else data


def redact_stream(stream: TextIO) -> None:
    """Redacts whatever is written to a stream: by `print`, rich, logging and tracebacks."""
    write = stream.write
    stream.write = lambda text: write(redact(text))  # type: ignore[method-assign]


def outlive_readers() -> None:
    """From now on this process goes on without output, rather than fail, when nobody reads it any more."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and "flush" not in vars(stream):
            for name in ("write", "flush"):
                setattr(stream, name, partial(_or_nowhere, getattr(stream, name), stream))


def _or_nowhere(method: Callable[..., Any], stream: io.TextIOWrapper, *args: Any) -> Any:
    try:
        return method(*args)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return method(*args)


def results_console(*, stderr: bool = False, file: TextIO | None = None) -> "Console":
    """Standard output, unless it is another file: progress and tables."""
    from rich.console import Console

    class RedactedConsole(Console):
        """Removes secrets before lines are wrapped, as a secret of two lines is not recognised."""

        def render_str(self, text: str, **options: Any) -> "Text":
            return super().render_str(redact(text), **options)

    return RedactedConsole(stderr=stderr, file=file, highlight=False)


notes_console = partial(results_console, stderr=True)
"""Standard error, for commands whose standard output is their answer."""
