"""The rules of the page: where it may be served, who may ask, and the headers of every answer.

Pure: knows requests as plain texts, and neither sockets nor sessions.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from stratagem.common.base.errors import InvalidInputError

CONTENT_POLICY: Final = "; ".join((
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types pictures",
))  # fmt: skip
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_SAME_SITE: Final = ("same-origin", "none")


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where the page listens, and the origins under which browsers know it."""

    host: str
    port: int
    origins: frozenset[str]
    """Scheme and host with its port, such as http://127.0.0.1:7080; the first is printed."""
    printed: str


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Return whether the host is all addresses of this machine, by which nobody opens a page."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def address_of(
    host: str,
    port: int,
    *,
    has_tls: bool,
    public_url: str,
    has_token: bool,
    behind_proxy: bool,
    names: Sequence[str] = (),
) -> PageAddress:
    """Return the address of the page, where it may be served there.

    public_url: how browsers reach it where that is not the address itself. names: the hosts that
    its certificate names. Raises InvalidInputError: elsewhere than on this machine it takes a
    token, and TLS of its own or of a proxy in front of it, and a name that browsers know.
    """
    if behind_proxy and not public_url:
        raise InvalidInputError.at("--behind-proxy", "needs --public-url, the proxy's own address")
    if not is_loopback(host) and not (has_token and (has_tls or behind_proxy)):
        text = (
            f"{host} is reached from elsewhere, which takes --page-token-file, and "
            "--page-tls-cert with --page-tls-key, or --behind-proxy with --public-url; 127.0.0.1 "
            "takes none of them"
        )
        raise InvalidInputError.at("--listen", text)
    scheme = "https" if has_tls else "http"
    hosts = ["127.0.0.1", "localhost", "::1"] if is_loopback(host) else [host]
    if is_unspecified(host):
        if not (public_url or names):
            text = (
                f"missing: nobody opens a page at {host}, and its certificate names no host; write "
                f"--public-url {scheme}://HOST:{port}, as browsers reach it"
            )
            raise InvalidInputError.at("--public-url", text)
        hosts = []
    own = [origin_of(f"{scheme}://{_bracketed(name)}:{port}") for name in (*hosts, *names)]
    if public_url:
        printed = origin_of(public_url)
        own = [printed, *(own if is_loopback(host) else ())]
    elif is_unspecified(host):
        printed = own[0]
    else:
        printed = origin_of(f"{scheme}://{_bracketed(host)}:{port}")
    return PageAddress(host, port, frozenset((*own, printed)), printed)


def origin_of(url: str) -> str:
    """Return scheme, host and port of a URL as browsers write them. Raises InvalidInputError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.path not in ("", "/"):
        raise InvalidInputError.at("--public-url", f"{url[:80]!r} is not http(s)://HOST[:PORT]")
    shown = "" if port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{_bracketed(parts.hostname)}{shown}"


def why_not(address: PageAddress, method: str, headers: Mapping[str, str]) -> str:
    """Return why a request is refused whoever makes it; "" when it is not.

    The host has to be ours, against names of others that lead to this machine (DNS rebinding);
    whatever changes something has to come from a page of ours.
    """
    host = headers.get("host", "")
    if host not in {origin.partition("://")[2] for origin in address.origins}:
        return "this page has another address"
    origin = headers.get("origin")
    if origin is not None and origin not in address.origins:
        return "this request comes from another page"
    if headers.get("sec-fetch-site", "none") not in _SAME_SITE and method != "GET":
        return "this request comes from another site"
    if method not in ("GET", "HEAD") and origin is None:
        return "this request does not say where it comes from"
    return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
