"""Copies the bytes of a socket over a stream of frames, and back: both ends of a tunnel do.

A socket is read only once the frame before has been written, so that nothing is queued here: who
reads slowly makes the other end wait, as over a plain connection.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from stratagem.common.base.errors import LimitError

FRAME_BYTES: Final = 256 * 2**10
"""Most bytes of a frame: larger ones gained nothing, smaller ones cost a turn of the loop each."""
PARKED: Final = (("stratagem-relay", "parked"),)
"""The initial metadata by which a coordinator says that a stream is parked."""
LINGER_S: Final = 5.0
"""How long the other end may take to read what it was sent last."""

Receive = Callable[[], Awaitable[bytes | None]]
"""Of a stream: the bytes of its next frame; None at its end."""
Send = Callable[[bytes], Awaitable[None]]
"""Of a stream: writes one frame, and returns once there is room for the next."""


async def copy_both_ways(
    connection: socket.socket,
    receive: Receive,
    send: Send,
    finish: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Copy until the socket or the stream ends, and close the socket.

    finish: says to the other end of the stream that nothing more comes; its end is then waited for,
    so that it reads what was sent last. Without it the stream ends where this returns.
    Raises what the stream raises; a socket that breaks has ended.
    """
    loop = asyncio.get_running_loop()

    async def to_stream() -> None:
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(connection, FRAME_BYTES):
                await send(data)
        if finish is not None:
            await finish()

    async def to_socket() -> None:
        with contextlib.suppress(OSError):
            while (data := await receive()) is not None:
                if len(data) > FRAME_BYTES:
                    raise LimitError(f"data: {len(data)} bytes, the limit is {FRAME_BYTES}")
                await loop.sock_sendall(connection, data)

    reading, writing = asyncio.create_task(to_stream()), asyncio.create_task(to_socket())
    try:
        await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
        if finish is not None and not writing.done():
            await asyncio.wait((writing,), timeout=LINGER_S)
    finally:
        ended = [task for task in (reading, writing) if task.done()]
        reading.cancel()
        writing.cancel()
        await asyncio.gather(reading, writing, return_exceptions=True)
        connection.close()
    for task in ended:
        task.result()
