"""Parts of streaming calls: the stall timeout, the begin message, unix sockets, and relays."""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from stratagem.common.base.errors import LimitError, UnavailableError
from stratagem.common.process.process import OwnFolder, machine_prefix, temporary_folder

# ---- Stall timeout ----
#
# gRPC waits forever for a peer that has stopped reading or writing: the call, its file and its
# buffers would never end. The limit is on progress: a stream may last, and only the waits for the
# peer count, not the work between them. One timer serves all messages of a stream.

_NUM_LOOKS: Final = 8
"""The number of checks per stall timeout, so that a wait may last an eighth longer than it."""


def is_silent(stall_s: float) -> Exception:
    """Return the error that StallTimeout raises by default: the peer sends nothing."""
    return TimeoutError(f"the peer was silent for {stall_s:g} s")


def takes_nothing(stall_s: float) -> Exception:
    """Return the error that StallTimeout raises for a caller that does not read its answers."""
    return UnavailableError(
        f"the caller has taken nothing for {stall_s:g} s; ask again from there on"
    )


class StallTimeout:
    """Async context manager that raises an error if one wait in its block lasts stall_s."""

    __slots__ = ("_error", "_loop", "_since_s", "_stall_s", "_timeout", "_timer")

    def __init__(
        self, stall_s: float | None, error: Callable[[float], Exception] = is_silent
    ) -> None:
        """Set the timeout of each wait; None waits forever. error: makes the error from stall_s."""
        self._stall_s, self._error = stall_s, error
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._look_later()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError:
            assert self._stall_s is not None
            raise self._error(self._stall_s) from None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager that marks its block as one wait for the peer, whose time is limited."""
        self._since_s = self._loop.time()
        try:
            yield
        finally:
            self._since_s = None

    def _look_later(self) -> None:
        if self._stall_s is not None:
            self._timer = self._loop.call_later(self._stall_s / _NUM_LOOKS, self._look)

    def _look(self) -> None:
        assert self._stall_s is not None
        now_s = self._loop.time()
        if self._since_s is not None and now_s - self._since_s >= self._stall_s:
            self._timeout.reschedule(now_s)
        else:
            self._look_later()


# ---- Begin of a stream ----
#
# A coordinator acknowledges that it follows something before there is any news to send. Without
# that, a caller cannot distinguish a quiet stream from one that nobody serves. Coordinators of
# 0.2.0 send no acknowledgement.

BEGUN: Final = (("stratagem-stream", "begun"),)
"""The initial metadata by which a coordinator accepts a stream; a call that fails has none."""


def has_begun(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Return whether initial metadata contain the acknowledgement `BEGUN`."""
    return set(BEGUN) <= {(key, value) for key, value in metadata or ()}


# ---- Unix sockets ----

KIND: Final = "sockets"
LONGEST_PATH: Final = 107
"""The largest length in bytes of the path of a unix socket."""


class SocketFolder:
    """A private folder for unix sockets. It is made for the first socket; folders that killed
    processes of this user have left are removed then."""

    def __init__(self) -> None:
        self._folder: OwnFolder | None = None

    def path(self, name: str) -> str:
        """Return the path for a socket of this name."""
        if self._folder is None:
            place = Path(tempfile.gettempdir())
            drawn = f"{machine_prefix()}{KIND}-{8 * 'x'}"  # by mkdtemp
            if len(os.fsencode(place / drawn / name)) > LONGEST_PATH:
                place = Path("/tmp")
            self._folder = temporary_folder(KIND, place)
        return str(self._folder.path / name)

    def close(self) -> None:
        """Remove the folder with its sockets."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


# ---- Relay ----
#
# Both ends of a tunnel copy the bytes of a socket over a stream of frames, and back. A socket is
# read only once the previous frame has been written, so nothing is queued here: a slow reader makes
# the other end wait, as over a plain connection.

FRAME_BYTES: Final = 256 * 2**10
"""The largest frame of a relayed stream: larger gained nothing, smaller cost more turns."""
PARKED: Final = (("stratagem-relay", "parked"),)
"""The initial metadata that tells a worker that its stream waits for a caller (is parked)."""
LINGER_S: Final = 5.0
"""The seconds for which the other end may still read the last frames after this one has ended."""

Receive = Callable[[], Awaitable[bytes | None]]
"""A function that returns the bytes of the next frame of a stream; None at its end."""
Send = Callable[[bytes], Awaitable[None]]
"""A function that writes a frame to a stream, and returns once there is room for the next."""


async def copy_both_ways(
    connection: socket.socket,
    receive: Receive,
    send: Send,
    finish: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Copy between a socket and a stream, both ways, until one of them ends, and close the socket.

    finish: ends this direction of the stream; the end of the other one is then awaited, so that the
    last frames are read. Without it the stream ends when this returns. Raises the errors of the
    stream; a broken socket counts as ended.
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
