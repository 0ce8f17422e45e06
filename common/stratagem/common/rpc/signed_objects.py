"""Write and read objects over HTTP by pre-signed URLs of an object store.

A URL names one object, one kind of request and the time for which it is valid; its holder has no
other right. Redirects are not followed, TLS is verified against the authorities of the system
(SSL_CERT_FILE names others), and no more bytes are read than agreed. Requests use the proxy of the
environment, as gRPC does. All functions block on the network, so they are for threads.
"""

import http.client
import re
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from typing import Final
from urllib.parse import SplitResult, urlsplit

from stratagem.common.base.errors import IntegrityError, InvalidInputError, UnavailableError
from stratagem.common.rpc.probe import proxy_for

TIMEOUT_S: Final = 30.0
"""The longest time that a request may go without progress."""
MAX_URL_CHARS: Final = 8192
_PIECE_BYTES: Final = 2**20
_SMALL_BYTES: Final = 2**16
_MAX_ERROR_BYTES: Final = 4096
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9.]{1,80})</Code>")

CancelCheck = Callable[[], bool]


class SignedObjects:
    """An HTTP client for pre-signed URLs; thread-safe."""

    def __init__(self, *, allows_http: bool) -> None:
        """Make a client. allows_http: also use a store without TLS, on trusted networks."""
        self._allows_http = allows_http

    def put(
        self,
        url: str,
        pieces: Iterable[memoryview],
        num_bytes: int,
        on_half: Callable[[], None] = lambda: None,
        is_cancelled: CancelCheck = lambda: False,
    ) -> None:
        """Upload an object, durably when this returns. on_half: called when half of it is sent.

        Raises UnavailableError if the store refuses or cannot be reached, or the call was
        cancelled; the object then does not exist, or is whole.
        """
        with self._connection(url) as (connection, target):
            connection.putrequest("PUT", target)
            connection.putheader("Content-Length", str(num_bytes))
            connection.endheaders()
            was_half = False
            try:
                for sent in _sent(connection, pieces):
                    if is_cancelled():
                        raise UnavailableError("it is not wanted any more")
                    if not was_half and 2 * sent >= num_bytes:
                        was_half = True
                        on_half()
            except OSError:  # its answer may say that it refused before it had read all
                _check(connection.getresponse())
                raise
            _check(connection.getresponse())

    def get(self, url: str, num_bytes: int) -> memoryview:
        """Download an object of exactly num_bytes. Raises UnavailableError, or IntegrityError if it
        has another size."""
        with self._connection(url) as (connection, target):
            connection.request("GET", target)
            answer = connection.getresponse()
            _check(answer)
            if answer.length is not None and answer.length != num_bytes:
                raise IntegrityError(f"an object has {answer.length} bytes, not {num_bytes}")
            data = memoryview(bytearray(num_bytes))
            done = 0
            while done < num_bytes:
                count = answer.readinto(data[done : done + _PIECE_BYTES])
                if not count:
                    raise UnavailableError(f"{done} of {num_bytes} bytes of an object came")
                done += count
            if answer.read(1):
                raise IntegrityError(f"an object has more than {num_bytes} bytes")
            return data

    @contextmanager
    def _connection(self, url: str) -> Iterator[tuple[http.client.HTTPConnection, str]]:
        parts = check_signed_url(url, allows_http=self._allows_http)
        assert parts.hostname is not None
        target = f"{parts.path or '/'}?{parts.query}"
        try:
            with closing(_connect(parts)) as connection:
                yield connection, target
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UnavailableError(f"{parts.netloc}: {reason}") from error


def check_signed_url(url: str, *, allows_http: bool) -> SplitResult:
    """Parse an allowed URL. Raises InvalidInputError, whose text omits the query, since that grants
    the right."""
    try:
        parts = urlsplit(url)
        is_one = len(url) <= MAX_URL_CHARS and url.isascii() and url.isprintable()
        is_one = is_one and " " not in url and bool(parts.hostname) and parts.port != 0
        is_one = is_one and not parts.username and not parts.fragment
    except ValueError:
        is_one = False
    if not is_one or parts.scheme not in ("http", "https"):
        raise InvalidInputError.at("url", "is not https://HOST/OBJECT?SIGNATURE")
    if parts.scheme == "http" and not allows_http:
        text = f"{parts.netloc} has no TLS, which needs --data-plane trusted"
        raise InvalidInputError.at("url", text)
    return parts


def _connect(parts: SplitResult) -> http.client.HTTPConnection:
    assert parts.hostname is not None
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    if is_tls:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, port, timeout=TIMEOUT_S, context=_tls()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, port, timeout=TIMEOUT_S)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    proxy = proxy_for(f"{host}:{port}")
    if proxy is not None:
        through = proxy.connection(f"{host}:{port}", TIMEOUT_S)
        through.settimeout(TIMEOUT_S)
        is_ours = _tls().wrap_socket(through, server_hostname=parts.hostname) if is_tls else through
        connection.sock = is_ours
    return connection


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _sent(connection: http.client.HTTPConnection, pieces: Iterable[memoryview]) -> Iterator[int]:
    """Send the pieces; after each write yield the number of bytes sent so far."""
    sent = 0
    for piece in _in_large_pieces(pieces):
        view = memoryview(piece).cast("B")
        while view:
            part, view = view[:_PIECE_BYTES], view[_PIECE_BYTES:]
            connection.send(part)
            sent += len(part)
            yield sent


def _in_large_pieces(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Merge small pieces into larger ones, so that small tensors do not become a packet each."""
    small = bytearray()
    for piece in pieces:
        if len(piece) >= _SMALL_BYTES or len(small) >= _PIECE_BYTES:
            yield memoryview(small)
            small = bytearray()
        if len(piece) >= _SMALL_BYTES:
            yield piece
        else:
            small += piece
    yield memoryview(small)


def _check(answer: http.client.HTTPResponse) -> None:
    """Raise UnavailableError unless the response has a success status."""
    if 200 <= answer.status < 300:
        return
    code = _CODE.search(answer.read(_MAX_ERROR_BYTES))
    said = code[1].decode() if code else answer.reason
    if 300 <= answer.status < 400:
        said = "it names another place, where requests are not repeated"
    raise UnavailableError(f"the object store answers {answer.status}: {said}")
