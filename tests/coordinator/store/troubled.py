"""An S3 server that refuses, fails or breaks off as told, and else hands on to a real one."""

import http.client
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

from stratagem.common.identity.tls import TlsFiles
from tests.patience import PATIENCE_S

OK, UNAVAILABLE, FORBIDDEN = 200, 503, 403
NOT_IMPLEMENTED = 501
EMPTY = "empty"
HALF = "half"
"""Sends the head of an answer and half of its body, and cuts the connection."""

_DENIED = b"<Error><Code>InvalidAccessKeyId</Code><Message>no such key</Message></Error>"


class Troubled(ThreadingHTTPServer):
    """`troubles` maps a method to what becomes of its next requests, in order."""

    daemon_threads = True

    def __init__(self, behind: str, files: TlsFiles | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "https" if files else "http"
        if files:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(str(files.cert), files.key)
            self.socket = tls.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self.behind = urlparse(behind).netloc
        self.troubles: dict[str, list[int | str]] = {}
        self.always: int | None = None
        self.of_signed: list[int | str] = []
        """What becomes of the next requests that have no keys but a signature in their URL."""
        self.always_of_signed: int | None = None
        self.always_of_copies: int | str | None = None
        """What becomes of requests to copy an object inside the store; EMPTY: an empty object."""
        self.num_signed = 0
        self.lock = threading.Lock()
        self.last_authorization = ""
        self.num_refused = 0

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def next_trouble(self, method: str, path: str) -> int | str:
        with self.lock:
            if "X-Amz-Signature=" in path:
                self.num_signed += 1
                waiting = self.of_signed
                return self.always_of_signed or (waiting.pop(0) if waiting else OK)
            waiting = self.troubles.get(method, [])
            return self.always or (waiting.pop(0) if waiting else OK)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Troubled

    def _do(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # it was killed: the server behind would wait for the rest
            self.close_connection = True
            return
        self.server.last_authorization = self.headers.get("Authorization", "")
        trouble = self.server.next_trouble(self.command, self.path)
        if self.server.always_of_copies and "x-amz-copy-source" in self.headers:
            trouble = self.server.always_of_copies
        if isinstance(trouble, int) and trouble != OK:
            self.server.num_refused += 1
            self._answer(trouble, {}, _DENIED if trouble == FORBIDDEN else b"")
            return
        with closing(http.client.HTTPConnection(self.server.behind, timeout=PATIENCE_S)) as behind:
            headers = dict(self.headers)
            if trouble == EMPTY:
                headers.pop("x-amz-copy-source")
            behind.request(self.command, self.path, body, headers)
            answer = behind.getresponse()
            content = answer.read()
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in ("date", "connection")}
        if trouble == HALF:
            self._answer(answer.status, headers, content[: len(content) // 2])
            self.close_connection = True
        else:
            self._answer(answer.status, headers, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in (headers or {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def troubled(behind: str, files: TlsFiles | None = None) -> Iterator[Troubled]:
    """Serves in a thread of its own inside the block; files: over TLS, with this certificate."""
    with Troubled(behind, files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
