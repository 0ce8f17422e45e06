"""Serves metrics over HTTP: `GET /metrics` on a port of their own, and nothing else.

What belongs to the event loop is read on it, which takes microseconds; the text is made in a
thread. Requests are bounded in size, time and number: whoever can reach the port must not be able
to hold up the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from stratagem.common.errors import InvalidInputError, UnavailableError
from stratagem.common.metrics.definition import Readings
from stratagem.common.metrics.lag import LoopLag
from stratagem.common.rpc.addresses import is_loopback

MAX_REQUEST_BYTES: Final = 8 << 10
MAX_CONNECTIONS: Final = 16
REQUEST_TIMEOUT_S: Final = 10.0

Sample = Callable[[], Callable[[], Readings]]
"""Called on the event loop: takes hold of what is there, and answers with what, in any thread,
makes readings of it."""

log = structlog.get_logger()


@asynccontextmanager
async def metrics_served(
    sample: Sample, lag: LoopLag, host: str, port: int | None, *, allow_insecure_network: bool
) -> AsyncIterator[str]:
    """Serve inside the `with`; host:port, empty where port is None, which is off. Port 0 is any
    free one."""
    if port is None:
        yield ""
        return
    if not allow_insecure_network and not is_loopback(host):
        raise InvalidInputError.at(
            "metrics_port",
            f"metrics are neither encrypted nor authenticated, and {host!r} can be reached from "
            f"other machines; listen on 127.0.0.1, or allow the insecure network explicitly",
        )
    try:
        server = await asyncio.start_server(
            _Handler(sample).serve, host.strip("[]"), port, limit=MAX_REQUEST_BYTES
        )
    except OSError as error:
        raise UnavailableError(f"cannot serve metrics on {host}:{port}: {error}") from error
    address = f"{host}:{server.sockets[0].getsockname()[1]}"
    log.info("metrics", address=f"http://{address}/metrics")
    measuring = asyncio.create_task(lag.run())
    try:
        yield address
    finally:
        measuring.cancel()
        server.close()
        await asyncio.gather(measuring, return_exceptions=True)


class _Handler:
    def __init__(self, sample: Sample) -> None:
        self._sample = sample
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
            pass  # not a request, or nobody waits for the answer any more
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET\n")
        if rest.partition(b" ")[0].partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", b"only /metrics\n")
        from stratagem.common.metrics.exposition import CONTENT_TYPE, render

        try:
            text = await asyncio.to_thread(render, self._sample())
        except Exception:  # the boundary: a defect must not end in silence
            log.exception("metrics cannot be read")
            return _response("500 Internal Server Error", b"see the log\n")
        return _response("200 OK", text, CONTENT_TYPE, with_body=method == b"GET")


def _response(
    status: str, body: bytes, content_type: str = "text/plain", *, with_body: bool = True
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
