"""The HTTP proxy between this process and a server: which one it is, and connections through it.

gRPC goes through proxies by itself; this does the same for those who look by hand why that fails.
The proxy is asked to CONNECT to a name, and resolves the name itself.
"""

import base64
import ipaddress
import os
import socket
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from stratagem.common.base.host_port import split_address

MAX_ANSWER_BYTES: Final = 16 * 2**10
MAX_STATUS_CHARS: Final = 200
_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS: Final = ("no_grpc_proxy", "no_proxy")
"""Variables of the environment, in the order in which gRPC takes the first that is set."""


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """A proxy: where it listens, and USER:PASSWORD where it wants one."""

    host: str
    port: int
    credentials: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def connection(self, address: str, timeout_s: float) -> socket.socket:
        """Return a socket that the proxy has connected to HOST:PORT.

        Raises ProxyRefusalError and ProxyAwayError, which say in a sentence what is wrong.
        """
        try:
            connection = socket.create_connection((self.host.strip("[]"), self.port), timeout_s)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ProxyAwayError(f"the proxy {self} cannot be reached: {reason}") from None
        try:
            connection.sendall(self._request(address))
            status = _answer(connection).split(b"\r\n", 1)[0].decode("ascii", "replace")
            self._check(status[:MAX_STATUS_CHARS], address)
        except OSError as error:
            connection.close()
            if isinstance(error, ProxyAwayError | ProxyRefusalError):
                raise
            raise ProxyAwayError(f"the proxy {self} does not answer: {error}") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, status: str, address: str) -> None:
        """Raise what the first line of the proxy's answer means, unless it has connected."""
        code = status.split(" ")[1:2]
        if code == ["200"]:
            return
        if code == ["407"]:
            wants = "does not accept this" if self.credentials else "wants a"
            raise ProxyRefusalError(f"the proxy {self} {wants} USER:PASSWORD ({status!r})")
        if code and code[0].startswith("5"):
            raise ProxyAwayError(f"the proxy {self} does not reach {address} ({status!r})")
        raise ProxyRefusalError(
            f"the proxy {self} refuses to connect to {address} ({status!r}): have it allow CONNECT "
            f"to port {split_address(address)[1]}"
        )

    def _request(self, address: str) -> bytes:
        lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
        if self.credentials:
            coded = base64.b64encode(self.credentials.encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {coded}")
        return "\r\n".join([*lines, "", ""]).encode()


class ProxyRefusalError(OSError):
    """A proxy does not connect to where it should, and will not the next time."""


class ProxyAwayError(OSError):
    """A proxy is not there, or does not reach where it should connect to: that may pass."""


def check_proxy(url: str) -> str:
    """Return the URL of a proxy as it is, "" included; ValueError where gRPC could not use it."""
    if url:
        _parsed(url)
    return url


def proxy_for(address: str, url: str = "") -> HttpProxy | None:
    """Return the proxy by which gRPC goes to HOST:PORT, None when it goes there directly. url: as
    given to open_channel."""
    host, _ = split_address(address)
    if _is_excepted(host.strip("[]")):
        return None
    try:
        url = url or _first_set(_PROXIES)
        return _parsed(url) if url else None
    except ValueError:
        return None  # gRPC takes no notice of it either


def _parsed(url: str) -> HttpProxy:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        shown = url.rpartition("@")[2][:80]  # never the password
        raise ValueError(f"{shown!r} is not http://[USER:PASSWORD@]HOST:PORT")
    if parts.port is None:
        raise ValueError(f"{parts.hostname} has no port: give http://{parts.hostname}:PORT")
    return HttpProxy(parts.hostname, parts.port, unquote(parts.netloc.rpartition("@")[0]))


def _is_excepted(host: str) -> bool:
    entries = [entry.strip() for entry in _first_set(_EXCEPTIONS).split(",")]
    return any(entry and _covers(entry, host) for entry in entries)


def _covers(entry: str, host: str) -> bool:
    if host.lower().endswith(entry.lower()):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _first_set(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _answer(connection: socket.socket) -> bytes:
    """Return the head of the proxy's answer, and leave what follows it in the socket."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte or len(head) >= MAX_ANSWER_BYTES:
            raise OSError("it ends the connection, or answers without end")
        head += byte
    return head
