"""Serves metrics over HTTP: `GET /metrics` on a port of their own, and nothing else.

What belongs to the event loop is read on it, which takes microseconds; the text is made in a
thread. Requests are bounded in size, time and number: a peer that reaches the port must not be able
to hold up the process.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.common.base.host_port import is_loopback
from stratagem.common.identity.tls_files import DEFAULT_TRUST_DOMAIN
from stratagem.common.observe.event_loop_lag import LoopLag
from stratagem.common.observe.metric_definition import Readings
from stratagem.common.observe.scrape_guard import PLAIN, Guard

MAX_REQUEST_BYTES: Final = 8 << 10
MAX_CONNECTIONS: Final = 16
REQUEST_TIMEOUT_S: Final = 10.0
CHALLENGE: Final = "WWW-Authenticate: Bearer\r\n"

Sample = Callable[[], Callable[[], Readings]]
"""Called on the event loop: takes hold of what is there, and answers with what, in any thread,
makes readings of it."""

log = structlog.get_logger()


@asynccontextmanager
async def metrics_served(
    sample: Sample,
    lag: LoopLag,
    host: str,
    port: int | None,
    *,
    guard: Guard = PLAIN,
    deployment: str = DEFAULT_TRUST_DOMAIN,
    allow_insecure_network: bool,
) -> AsyncIterator[str]:
    """Serve inside the `with`; host:port, empty where port is None, which is off. Port 0 is any
    free one. Plaintext is for loopback, unless the operator allows more.

    deployment: the label of all metrics that this process has in common with its coordinators and
    workers, and with no other server."""
    if port is None:
        yield ""
        return
    if not (guard.has_tls or allow_insecure_network or is_loopback(host)):
        raise InvalidInputError.at(
            "metrics_port",
            f"metrics are not encrypted, and {host!r} can be reached from other machines; give a "
            f"certificate (--metrics-tls-cert, --metrics-tls-key), listen on 127.0.0.1, or allow "
            f"the insecure network explicitly",
        )
    context = guard.ssl_context()
    if guard.token_file is not None:
        guard.token()  # what is wrong with it is said at the start
    try:
        server = await asyncio.start_server(
            _Handler(sample, guard, deployment).serve,
            host.strip("[]"),
            port,
            limit=MAX_REQUEST_BYTES,
            ssl=context,
            ssl_handshake_timeout=None if context is None else REQUEST_TIMEOUT_S,
        )
    except OSError as error:
        raise UnavailableError(f"cannot serve metrics on {host}:{port}: {error}") from error
    address = f"{host}:{server.sockets[0].getsockname()[1]}"
    scheme = "https" if guard.has_tls else "http"
    log.info("metrics", address=f"{scheme}://{address}/metrics")
    measuring = asyncio.create_task(lag.run())
    try:
        yield address
    finally:
        measuring.cancel()
        server.close()
        await asyncio.gather(measuring, return_exceptions=True)


class _Handler:
    def __init__(self, sample: Sample, guard: Guard, deployment: str) -> None:
        self._sample, self._guard, self._deployment = sample, guard, deployment
        self._num_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of one connection."""
        self._num_open += 1
        try:
            if self._num_open <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(head))
                    await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            pass  # not a request, or the peer no longer waits for the answer
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET\n")
        if rest.partition(b" ")[0].partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", b"only /metrics\n")
        try:
            is_let_in = self._guard.admits(head)
        except InvalidInputError as error:
            log.warning("nobody can scrape", reason=str(error))
            is_let_in = False
        if not is_let_in:
            return _response("401 Unauthorized", b"needs a token\n", more=CHALLENGE)
        from stratagem.common.observe.exposition import CONTENT_TYPE, render

        try:
            text = await asyncio.to_thread(render, self._sample(), self._deployment)
        except Exception:  # the boundary: a defect must not end in silence
            log.exception("metrics cannot be read")
            return _response("500 Internal Server Error", b"see the log\n")
        return _response("200 OK", text, CONTENT_TYPE, with_body=method == b"GET")


def _response(
    status: str,
    body: bytes,
    content_type: str = "text/plain",
    *,
    with_body: bool = True,
    more: str = "",
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
