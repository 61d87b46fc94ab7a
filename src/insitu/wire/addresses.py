"""Addresses of servers: URLs of a host and port, their credentials, and which machine they name."""

import base64
import ipaddress
import socket
from urllib.parse import unquote, urlsplit

_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "::")


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


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a server bound to `host`, a name or an address."""
    if not host:  # all interfaces
        return False
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(is_loopback_address(str(address[0])) for *_, address in addresses)


def is_loopback_address(host: str) -> bool:
    """Whether an address, or the name `localhost`, is this machine's; no name server is asked."""
    address = ip_address(host)
    if address is None:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a text is; None for a name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
