"""Explain why a connection fails, where identity or a proxy is the reason.

gRPC says "Socket closed" when a server wants a certificate, has another authority or is no TLS
server at all. After such a failure the handshake is repeated by hand, and its result becomes a
sentence with the file and the remedy. All of this blocks.
"""

import asyncio
import base64
import ipaddress
import os
import socket
import ssl
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import grpc

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import split_address
from stratagem.common.identity.tls import (
    DEFAULT_TRUST_DOMAIN,
    Material,
    TlsFiles,
    chain_of,
    ended,
    expiry_text,
    worker_name,
)
from stratagem.common.rpc.channel import Proof

if TYPE_CHECKING:
    from cryptography import x509

# ---- HTTP proxy ----
#
# gRPC goes through proxies by itself; this section finds the HTTP proxy between this process and
# a server and connects through it in the same way, for diagnosis. The proxy is asked to CONNECT
# to a name, and resolves the name itself.

MAX_ANSWER_BYTES: Final = 16 * 2**10
MAX_STATUS_CHARS: Final = 200
_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS: Final = ("no_grpc_proxy", "no_proxy")
"""Environment variables with hosts to reach without a proxy; gRPC takes the first that is set."""


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """An HTTP proxy: its address, and USER:PASSWORD if it requires them."""

    host: str
    port: int
    credentials: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def connection(self, address: str, timeout_s: float) -> socket.socket:
        """Connect to HOST:PORT through the proxy and return the socket. Raises ProxyRefusalError or
        ProxyAwayError, with a sentence on the cause."""
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
        """Raise the error that the status line of the proxy's answer means, unless it says 200."""
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
    """A proxy refuses to connect to the address; a retry does not help."""


class ProxyAwayError(OSError):
    """A proxy cannot be reached, or cannot reach the address; a retry may help."""


def check_proxy(url: str) -> str:
    """Validate a proxy's URL, or "", and return it. Raises ValueError if gRPC cannot use it."""
    if url:
        _parsed(url)
    return url


def proxy_for(address: str, url: str = "") -> HttpProxy | None:
    """Return the proxy through which gRPC connects to HOST:PORT; None for a direct connection. url:
    as given to open_channel."""
    host, _ = split_address(address)
    if _is_excepted(host.strip("[]")):
        return None
    try:
        url = url or _first_set(_PROXIES)
        return _parsed(url) if url else None
    except ValueError:
        return None  # gRPC ignores it, too


def _parsed(url: str) -> HttpProxy:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        address = url.rpartition("@")[2][:80]  # never the password
        raise ValueError(f"{address!r} is not http://[USER:PASSWORD@]HOST:PORT")
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
    """Read the head of the proxy's HTTP answer; what follows stays unread in the socket."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte or len(head) >= MAX_ANSWER_BYTES:
            raise OSError("it ends the connection, or answers without end")
        head += byte
    return head


# ---- TLS handshake ----

TIMEOUT_S: Final = 3.0
_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
"""The first bytes that an HTTP/2 client sends: the preface and empty settings."""

# These are OpenSSL's codes, as in SSLCertVerificationError.verify_code.
_NOT_YET_VALID, _EXPIRED, _PURPOSE = 9, 10, 26
_OTHER_HOST, _OTHER_ADDRESS = 62, 64


async def identity_problem(
    error: grpc.aio.AioRpcError,
    address: str,
    proof: Proof,
    to_worker: str | None = None,
    proxy: str = "",
    *,
    lasting: bool = False,
) -> str:
    """Return a sentence on why a call failed; "" unless identity (TLS, token) or a proxy is the
    reason.

    to_worker, proxy: as given to open_channel. lasting: leave out a transient cause, which is a
    proxy that cannot be reached or does not reach the address.
    """
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return ""
    if "Connection refused" in (error.details() or "") and proxy_for(address, proxy) is None:
        return ""
    return await asyncio.to_thread(explain, address, proof, to_worker, proxy=proxy, lasting=lasting)


def explain(
    address: str,
    proof: Proof,
    to_worker: str | None = None,
    timeout_s: float = TIMEOUT_S,
    proxy: str = "",
    lasting: bool = False,
) -> str:
    """Make a handshake by hand, and return a sentence on why a caller cannot connect to a server;
    "" if it works, or no server can be reached at all. lasting: leave out transient causes."""
    probe = _Probe(address, timeout_s, proxy_for(address, proxy))
    try:
        if proof.tls is None:
            return _of_plaintext(probe)
        material = proof.tls.read()
        trust = DEFAULT_TRUST_DOMAIN if material.cert_id is None else material.cert_id.trust_domain
        host = address.rpartition(":")[0].strip("[]")
        expected = host if to_worker is None else worker_name(trust, to_worker)
        return _of_tls(probe, proof.tls, material, expected)
    except ProxyAwayError as error:
        return "" if lasting else str(error)
    except (InvalidInputError, ProxyRefusalError) as error:
        return str(error)
    except (OSError, UnicodeError):
        return ""


class _Connection(ssl.SSLSocket):
    """A TLS socket that closes its descriptor if the peer has gone before the handshake."""

    def getpeername(self) -> object:
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionResetError("the peer has gone before the handshake") from error


@dataclass(frozen=True, slots=True)
class _Probe:
    address: str
    timeout_s: float
    proxy: HttpProxy | None

    def handshake(self, context: ssl.SSLContext, name: str) -> ssl.SSLSocket:
        """Make a TLS handshake; return the socket. Raises OSError, of which SSLError is one."""
        context.set_alpn_protocols(["h2"])
        context.sslsocket_class = _Connection
        plain = self._connection()
        try:
            return context.wrap_socket(plain, server_hostname=name)
        except BaseException:
            plain.close()
            raise

    def _connection(self) -> socket.socket:
        if self.proxy is not None:
            return self.proxy.connection(self.address, self.timeout_s)
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), self.timeout_s)

    def peer_certificate(self) -> "x509.Certificate":
        """Fetch the server's certificate without verifying it."""
        from cryptography import x509

        with closing(self.handshake(_without_checks(), "probe")) as connection:
            return x509.load_der_x509_certificate(connection.getpeercert(True) or b"")


def _of_plaintext(probe: _Probe) -> str:
    try:
        probe.handshake(_without_checks(), "probe").close()
    except ssl.SSLError:
        return ""
    return (
        f"{probe.address} wants TLS: give --tls-ca, and --tls-cert with --tls-key or --token-file"
    )


def _of_tls(probe: _Probe, files: TlsFiles, material: Material, expected: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=material.ca.decode("ascii", "replace"))
    if files.cert is not None:
        context.load_cert_chain(files.cert, files.key)
    try:
        connection = probe.handshake(context, expected)
    except ssl.SSLCertVerificationError as error:
        return _of_server(error.verify_code, error.verify_message, probe, files, expected)
    except ssl.SSLEOFError:  # before it has read anything: nothing serves there, or not yet
        return ""
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return f"{probe.address} speaks plaintext: it was started without certificates"
        return _of_caller(probe, files, material)
    with closing(connection):
        try:
            connection.sendall(_HELLO)
            is_in = bool(connection.recv(1))
        except TimeoutError:
            return ""
        except OSError:  # an alert about our certificate comes only now, or the end
            is_in = False
    return "" if is_in else _of_caller(probe, files, material)


def _of_server(code: int, words: str, probe: _Probe, files: TlsFiles, expected: str) -> str:
    """Return a sentence on what is wrong with the server's certificate."""
    from cryptography import x509

    from stratagem.common.identity.tls import names_of

    theirs = probe.peer_certificate()
    whose = f"the certificate of {probe.address}"
    if code == _EXPIRED:
        return _of_ended(theirs, whose, files)
    if code == _NOT_YET_VALID:
        return f"{whose} is valid from {theirs.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on only"
    if code in (_OTHER_HOST, _OTHER_ADDRESS):
        names = [*names_of(theirs, x509.DNSName), *names_of(theirs, x509.IPAddress)]
        return f"{whose} is for {', '.join(names) or 'no host'}, and not for {expected}"
    if code == _PURPOSE:
        return f"{whose} is not one of a server"
    issuer = theirs.issuer.rfc4514_string()
    opened = (
        ""
        if probe.proxy is None
        else (
            f": the proxy {probe.proxy} seems to open TLS, and then neither side knows "
            f"who the other is; have it let {probe.address} through"
        )
    )
    return (
        f"{whose} is not signed by an authority in {files.ca}, but by {issuer!r} ({words}){opened}"
    )


def _of_ended(theirs: "x509.Certificate", whose: str, files: TlsFiles) -> str:
    """Return a sentence on which certificate has expired: the server's or a trusted authority's."""
    from cryptography import x509

    authorities = x509.load_pem_x509_certificates(Path(files.ca).read_bytes())
    chain = chain_of(whose, [theirs], str(files.ca), authorities)
    link = ended(chain)
    if link is not None and link.is_authority:
        return expiry_text(link, whose)
    return f"{whose} has expired at {theirs.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it"


def _of_caller(probe: _Probe, files: TlsFiles, material: Material) -> str:
    """Return a sentence on what is wrong with our own certificate, if the server rejected it."""
    if material.cert is None:
        return (
            f"{probe.address} asks for a certificate: give --tls-cert and --tls-key, or call its "
            f"--token-listen address with --token-file"
        )
    if material.problem:
        return material.problem
    starts = _leaf(material).not_valid_before_utc
    if starts > datetime.now(UTC):
        return f"the certificate {files.cert} is valid from {starts:%Y-%m-%d %H:%M} UTC on only"
    issuer = _leaf(material).issuer.rfc4514_string()
    return (
        f"{probe.address} does not accept the certificate {files.cert}, signed by {issuer!r}: its "
        f"--tls-ca must hold that authority, and the certificate be one for clients"
    )


def _leaf(material: Material) -> "x509.Certificate":
    from cryptography import x509

    return x509.load_pem_x509_certificates(material.cert or b"")[0]


def _without_checks() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
