"""Who may use our HTTP servers: bearer tokens, and without a token the checks that keep web pages out.

A browser sends requests for any page its user visits, also to servers on the loopback address. Such requests give
themselves away: by the name in `Host` if the page had its own name resolved to this machine (DNS rebinding), by
`Origin`, or by a content type that pages may send without asking the server first.
"""

import base64
import hmac
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import SplitResult, urlsplit

from insitu.errors import ConfigError, RequestRefused
from insitu.wire.addresses import ip_address, is_loopback
from insitu.wire.redaction import remember_secret

JSON_TYPES = ("application/json", "application/x-ndjson", "application/jsonl")
"""Content types of request bodies. Pages cannot send them to other servers without a preflight request."""
_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class AccessPolicy:
    """The requests that a server accepts: those with `token`, or without one those to `hosts` that no web page sent.

    IP addresses and `localhost` need not be listed in `hosts`. `variable` is the environment variable of the token.
    """

    token: str | None = field(default=None, repr=False)
    hosts: frozenset[str] = frozenset()
    variable: str = ""
    key: str | None = None
    """The key of the file that says where the server listens; None: options of the command line do."""

    @classmethod
    def of(
        cls,
        host: str,
        token: str | None,
        *,
        variable: str,
        allow_anyone: bool = False,
        allowed_hosts: Iterable[str] = (),
        key: str | None = None,
    ) -> Self:
        """The policy of a server bound to `host`. Raises ConfigError if the token cannot be one, or is missing.

        A token may be missing if only this machine can connect, or with `allow_anyone`.
        """
        machine = socket.gethostname()
        names = {host, machine, machine.partition(".")[0], *allowed_hosts}
        policy = cls(token, frozenset(name.lower().rstrip(".") for name in names), variable, key)
        if token is not None and not _TOKEN.fullmatch(token):
            problem = "empty" if not token else "not made of printable ASCII characters without spaces"
            raise ConfigError(f"{policy._token_name} is {problem}; give a token, or leave it unset")
        if token is None and not allow_anyone and not is_loopback(host):
            raise ConfigError(
                f"{key or '--host'} is {host!r}, which other machines can connect to: set {policy._token_name}"
                + (", or give --insecure_no_auth to serve everyone who can" if key is None else "")
            )
        remember_secret(token)
        return policy

    @property
    def _token_name(self) -> str:
        return f"--token (or {self.variable})" if self.key is None else self.variable

    def check(self, headers: Mapping[str, str], *, is_public: bool = False) -> None:
        """Raises RequestRefused unless the request may be answered; `headers` has lower-case keys or ignores case.

        `is_public`: the route needs no token.
        """
        scheme, host, origin = None, headers.get("host", ""), headers.get("origin")
        if self.token is not None:
            if is_public:
                return
            sent = headers.get("authorization", ""), f"bearer {headers.get('x-api-key', '')}"  # as Anthropic's clients
            scheme = next(filter(None, (_authorized_by(self.token, each) for each in sent)), None)
            if scheme is None:
                problem = f"the bearer token is missing or wrong (it is the server's {self._token_name})"
                raise RequestRefused(problem, status=401, code="invalid_token")
        elif host and not self._is_known(host):
            problem = f"Host is {host!r:.80}, which is neither an IP address nor a name of this server"
            advice = "allow it with --allowed_host" if self.key is None else f"with {self.variable}, any is allowed"
            raise RequestRefused(f"{problem}; {advice}", status=403, code="unknown_host")
        if scheme != "bearer" and origin is not None and (_parsed(origin).netloc.lower() or None) != host.lower():
            # Browsers attach Basic credentials and addresses to the requests of any page, but never bearer tokens.
            problem = f"Origin is {origin!r:.80}: web pages may not use this server without a bearer token"
            raise RequestRefused(problem, status=403, code="foreign_origin")
        require_json(headers)

    def _is_known(self, host: str) -> bool:
        """Whether a Host header is safe: an IP address cannot be resolved to another one."""
        name = (_parsed(f"//{host}").hostname or "").rstrip(".")
        return name == "localhost" or name.endswith(".localhost") or ip_address(name) is not None or name in self.hosts


def _authorized_by(token: str, authorization: str) -> str | None:
    """The scheme that carries the right token: `bearer`, or `basic` with the token as password."""
    scheme, _, credentials = authorization.partition(" ")
    scheme, password = scheme.lower(), credentials.encode(errors="surrogateescape")  # as aiohttp decodes headers
    if scheme == "basic":
        try:
            password = base64.b64decode(password, validate=True).partition(b":")[2]
        except ValueError:
            return None
    is_right = scheme in ("basic", "bearer") and hmac.compare_digest(password, token.encode())
    return scheme if is_right else None


def require_json(headers: Mapping[str, str]) -> None:
    """Raises RequestRefused (415) for a body that is not sent as JSON."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES:
        problem = f"Content-Type is {kind!r:.80}" if kind else "the request has no Content-Type"
        raise RequestRefused(f"{problem}; send JSON as application/json", status=415, code="unsupported_media_type")


def _parsed(url: str) -> SplitResult:
    """The parts of a URL; those of one that is malformed are empty."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
