"""Requests that somebody else has signed: carried out as they are, and no others."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stratagem.common.base.errors import IntegrityError, InvalidInputError, UnavailableError
from stratagem.common.identity.certificates import make_authority
from stratagem.common.identity.tls import Role
from stratagem.common.rpc import signed_objects
from stratagem.common.rpc.signed_objects import MAX_URL_CHARS, SignedObjects, check_signed_url

CONTENT = bytes(range(256)) * 20_000
SIGNATURE = "X-Amz-Signature=secret"
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.answer(self)

    do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        return

    def take(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    answer: Answer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.scheme = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}/bucket/object?{SIGNATURE}"


@contextmanager
def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    with Server() as server:
        server.answer = answer
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
            server.scheme = "https"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


OBJECTS = SignedObjects(allows_http=True)


def test_what_is_put_is_got(tmp_path: Path) -> None:
    came: list[bytes] = []
    halves: list[str] = []

    def answer(handler: Handler) -> None:
        if handler.command == "PUT":
            came.append(handler.take())
            handler.say(200)
        else:
            handler.say(200, came[0])

    view = memoryview(CONTENT)
    with serving(answer) as server:
        pieces = [view[:7], view[7:3_000_000], view[3_000_000:]]
        OBJECTS.put(server.url, pieces, len(CONTENT), lambda: halves.append("half"))
        assert came == [CONTENT]
        assert halves == ["half"]
        assert OBJECTS.get(server.url, len(CONTENT)) == CONTENT
        assert server.asked == [f"/bucket/object?{SIGNATURE}"] * 2
        OBJECTS.put(server.url, [], 0)
        assert came[1] == b""


def test_a_refusal_says_the_code_of_the_store() -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"

    def early(handler: Handler) -> None:
        """Before it has read what comes, and closes then."""
        handler.say(403, denied, Connection="close")
        handler.close_connection = True

    def late(handler: Handler) -> None:
        handler.take()
        handler.say(403, denied)

    with serving(late) as server:
        with pytest.raises(UnavailableError, match=r"answers 403: AccessDenied$"):
            OBJECTS.put(server.url, [memoryview(CONTENT)], len(CONTENT))
        server.answer = early
        with pytest.raises(UnavailableError, match=r"answers 403: AccessDenied$"):
            OBJECTS.get(server.url, 1)
        large = bytes(2**26)  # more than any buffer of a socket
        with pytest.raises(UnavailableError):
            OBJECTS.put(server.url, [memoryview(large)], len(large))


def test_a_redirect_is_not_followed() -> None:
    with serving(lambda handler: handler.say(200, b"stolen")) as elsewhere:

        def answer(handler: Handler) -> None:
            if handler.command == "PUT":
                handler.take()
            handler.say(307, Location=elsewhere.url)

        with serving(answer) as server:
            for call in (
                lambda: OBJECTS.get(server.url, 6),
                lambda: OBJECTS.put(server.url, [memoryview(b"state")], 5),
            ):
                with pytest.raises(UnavailableError, match="307: it names another place"):
                    call()
        assert elsewhere.asked == []


def test_no_more_is_read_than_was_agreed_and_no_less_taken() -> None:
    def ending(body: bytes, name: str, value: str) -> Answer:
        def answer(handler: Handler) -> None:
            handler.send_response_only(200)
            handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)
            handler.close_connection = True

        return answer

    def take_all(handler: Handler) -> None:
        handler.take()

    whole: Answer = lambda handler: handler.say(200, b"sixsix")  # noqa: E731
    without_size = ending(b"sixsix", "Connection", "close")
    broken = ending(b"six", "Content-Length", "7")
    with serving(whole) as server:
        for answer, size, error, said in (
            (whole, 5, IntegrityError, "has 6 bytes, not 5"),
            (whole, 7, IntegrityError, "has 6 bytes, not 7"),
            (without_size, 5, IntegrityError, "more than 5 bytes"),
            (without_size, 7, UnavailableError, "6 of 7 bytes"),
            (broken, 7, UnavailableError, "3 of 7 bytes"),
        ):
            server.answer = answer
            with pytest.raises(error, match=said):
                OBJECTS.get(server.url, size)
        server.answer = take_all  # one that closes early may be met before it is cancelled
        with pytest.raises(UnavailableError, match="not wanted any more"):
            OBJECTS.put(server.url, [memoryview(CONTENT)], len(CONTENT), is_cancelled=lambda: True)


def test_nobody_answers_or_without_tls_where_the_network_is_not_trusted() -> None:
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/bucket/object?{SIGNATURE}"
        refused = r"127\.0\.0\.1:\d+: Connection refused"
        with pytest.raises(UnavailableError, match=refused) as error:
            OBJECTS.get(url, 1)
    assert "secret" not in str(error.value)
    url = f"http://store:9000/object?{SIGNATURE}"
    with pytest.raises(InvalidInputError, match=r"store:9000 has no TLS, .* trusted") as told:
        SignedObjects(allows_http=False).get(url, 1)
    assert "secret" not in str(told.value)
    assert check_signed_url(url, allows_http=True).netloc == "store:9000"


def test_what_is_no_signed_request_is_refused_and_not_shown() -> None:
    for url in (
        *("", "ftp://host/object?secret", "file:///etc/passwd?secret", "https://?secret"),
        *("https://user:secret@host/object", "https://host:99999/object?secret"),
        *("https://host/object?secret#fragment", "https://host/object?secret\r\nHost: other"),
        *("https://host/an object?secret", f"https://host/{'a' * MAX_URL_CHARS}secret"),
    ):
        with pytest.raises(InvalidInputError, match="url: is not https://HOST/OBJECT") as error:
            OBJECTS.get(url, 1)
        assert "secret" not in str(error.value)


def test_an_unproven_store_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_authority(tmp_path / "certs")
    files = made.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(str(files.cert), files.key)
    with serving(lambda handler: handler.say(200, b"state"), tls) as server:
        monkeypatch.setattr(signed_objects, "_tls", ssl.create_default_context)
        with pytest.raises(UnavailableError, match="certificate"):
            SignedObjects(allows_http=False).get(server.url, 5)
        assert server.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
        assert bytes(SignedObjects(allows_http=False).get(server.url, 5)) == b"state"
