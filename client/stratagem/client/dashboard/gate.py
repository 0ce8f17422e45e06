"""Refuse requests that break the page's rules or lack a session, set the headers of every answer,
and end open streams when the page ends."""

import asyncio
import hmac
import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stratagem.common.base.errors import InvalidInputError

# ---- Rules ----
#
# The rules say where the page may be served, who may ask, and which headers every answer has.
# They are pure functions of requests as plain texts, without sockets or sessions.

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
    """The address at which the page listens, and the origins under which browsers reach it."""

    host: str
    port: int
    origins: frozenset[str]
    """The origins, such as http://127.0.0.1:7080; the first is the one that is printed."""
    printed: str


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Return whether the host is a wildcard such as 0.0.0.0, under which nobody opens a page."""
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
    """Return the address of a page with these options, if they may be combined.

    public_url: the URL by which browsers reach the page, if it is another one. names: the hosts in
    the page's certificate. Raises InvalidInputError: an address that other machines reach requires
    a token, TLS of the page or of a proxy in front of it, and a name that browsers know.
    """
    if behind_proxy and not public_url:
        raise InvalidInputError.at("--behind-proxy", "needs --public-url, the proxy's own address")
    if not is_loopback(host) and not (has_token and (has_tls or behind_proxy)):
        text = (
            f"{host} can be reached from elsewhere, which requires --page-token-file, and "
            "--page-tls-cert with --page-tls-key, or --behind-proxy with --public-url; 127.0.0.1 "
            "requires none of them"
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
    origins = [origin_of(f"{scheme}://{_bracketed(name)}:{port}") for name in (*hosts, *names)]
    if public_url:
        printed = origin_of(public_url)
        origins = [printed, *(origins if is_loopback(host) else ())]
    elif is_unspecified(host):
        printed = origins[0]
    else:
        printed = origin_of(f"{scheme}://{_bracketed(host)}:{port}")
    return PageAddress(host, port, frozenset((*origins, printed)), printed)


def origin_of(url: str) -> str:
    """Return the origin (scheme, host and port) of a URL as browsers write it. Raises
    InvalidInputError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.path not in ("", "/"):
        raise InvalidInputError.at("--public-url", f"{url[:80]!r} is not http(s)://HOST[:PORT]")
    port_text = "" if port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{_bracketed(parts.hostname)}{port_text}"


def why_not(address: PageAddress, method: str, headers: Mapping[str, str]) -> str:
    """Return the reason why a request must be refused, whoever sends it; "" if it may pass. Its
    host must be the page's, against foreign names that lead to this machine (DNS rebinding). A
    request that changes something must come from the page itself."""
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


# ---- Sessions ----
#
# A browser may read the page once it has shown the token; each browser gets a cookie of its own.

MIN_TOKEN_CHARS: Final = 16


def token_in(path: Path) -> str:
    """Read the page's token from a file. Raises InvalidInputError if it has no usable one."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError.at("--page-token-file", f"{path}: {error}") from None
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        text = f"{path} holds no token: at least {MIN_TOKEN_CHARS} printable ASCII characters"
        raise InvalidInputError.at("--page-token-file", text)
    return token


class PageSessions:
    """The page's token, and the session cookies given in exchange for it.

    A cookie is a random number signed with the token. Cookies need not be stored, and a page that
    is started again with the same token accepts the earlier ones.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token.encode()
        self.cookie = f"stratagem-{port}"  # cookies are shared by all ports of a host

    def begin(self, token: str) -> str | None:
        """Return a new session cookie; None for a wrong token."""
        if not hmac.compare_digest(token.encode(), self._token):
            return None
        number = secrets.token_urlsafe(24)
        return f"{number}.{self._signature(number)}"

    def knows(self, cookie_header: str) -> bool:
        """Return whether a request has a valid session cookie."""
        try:
            morsel = SimpleCookie(cookie_header).get(self.cookie)
        except CookieError:
            return False
        if morsel is None:
            return False
        number, _, signature = morsel.value.partition(".")
        return hmac.compare_digest(signature.encode(), self._signature(number).encode())

    def _signature(self, number: str) -> str:
        signed = f"{self.cookie} {number}"  # another page may have the same token
        return hmac.new(self._token, signed.encode(), "sha256").hexdigest()


# ---- Gate ----

OPEN_PATHS = ("/", "/api/session")
OPEN_FOLDER = "/static/"


class PageGate:
    """ASGI middleware that refuses requests without a session and sets security headers."""

    def __init__(self, app: ASGIApp, address: PageAddress, sessions: PageSessions) -> None:
        self._app, self._address, self._sessions = app, address, sessions
        self._answering: set[asyncio.Task[None]] = set()
        self._has_ended = False

    def end(self) -> None:
        """End all streams, which would never end by themselves, and answer all waiting requests."""
        self._has_ended = True
        for task in self._answering:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        reason = why_not(self._address, scope["method"], headers)
        if reason:
            refusal = PlainTextResponse(reason, 403)
        elif not (
            scope["path"] in OPEN_PATHS
            or scope["path"].startswith(OPEN_FOLDER)
            or self._sessions.knows(headers.get("cookie", ""))
        ):
            text = "open this page by the address that it printed, or enter its token on it"
            refusal = PlainTextResponse(text, 401)
        else:
            await self._answer(scope, receive, send_with_headers)
            return
        await refusal(scope, receive, send_with_headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request, unless the page ends first."""
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        task = asyncio.current_task()
        assert task is not None  # every request has one
        self._answering.add(task)
        try:
            await self._app(scope, receive, send_on)
        except asyncio.CancelledError:
            if not self._has_ended:
                raise
            task.uncancel()
            if has_begun:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                await PlainTextResponse("the page has ended", 503)(scope, receive, send)
        finally:
            self._answering.discard(task)
