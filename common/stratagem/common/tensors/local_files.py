"""Read bytes from a file that another process on this machine has open, in place of a tensor
stream.

Copying 4 MB takes a millisecond; sending and receiving them over loopback takes ten. The owner of
the file names it by process and descriptor. The reader opens it below /proc, which the same user
in the same namespace of processes may do. It reads only a file with the expected name, and as a
copy only memory, so a peer cannot make it read other files, and a descriptor that was closed and
reused is not mistaken for the file.
"""

import asyncio
import hashlib
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar, cast

from stratagem.common.base.errors import IntegrityError, StratagemError
from stratagem.common.tensors.manifest import Manifest, Purpose, to_proto
from stratagem.common.tensors.stream import (
    MAX_CHUNK_BYTES,
    ChunkWriter,
    Data,
    crc32c,
    iter_views,
    piece_bytes,
    received,
    sent,
)
from stratagem.v1 import tensor_pb2

# ---- Open files ----

_COPY_NAME: Final = re.compile(r"stratagem-snapshot-[0-9a-f]{32}")
MAX_COPY_BYTES: Final = 64 * 2**20
"""The largest content to copy, as a copy doubles the memory; more is sent in chunks."""

_MEMORY: Final = "memfd:"
_MIN_PIECE_BYTES: Final = 2**16


class UnreadableFileError(StratagemError):
    """This process may not open files of other processes, although all are on one machine."""


class _Place:
    """The cached name of the scope in which this process can open other processes' files: machine,
    user and namespace."""

    name: str | None = None


def place() -> str:
    """Return the name of the scope within which processes can open each other's files; "" if this
    process can open none, and after `leave_place`."""
    if _Place.name is None:
        _Place.name = _looked_up()
    return _Place.name


def leave_place() -> None:
    """Stop this process from opening other processes' files, and from offering its own."""
    _Place.name = ""


def _looked_up() -> str:
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
        if os.readlink("/proc/self") != str(os.getpid()):  # this /proc is that of another namespace
            return ""
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}/{processes}/{os.geteuid()}".encode()).hexdigest()


# ---- The side that has a file ----


def offer(
    descriptor: int,
    start: int = 0,
    piece_bytes: int = 0,
    sums: Iterable[int] = (),
    *,
    name: str = "",
) -> tensor_pb2.OpenFile:
    """Make the message that offers an open file of this process to a reader. sums: the CRC32C of
    each piece. name: the name of the file if it is a copy of memory."""
    return tensor_pb2.OpenFile(
        place=place(),
        process=os.getpid(),
        descriptor=descriptor,
        start=start,
        piece_bytes=piece_bytes,
        crc32c=sums,
        name=name,
    )


def copy_of(buffers: Sequence[memoryview]) -> "MemoryCopy | None":
    """Copy memory into a memory file; None if the system cannot. To be called in a thread."""
    with suppress(OSError):
        return MemoryCopy(buffers)
    return None


class MemoryCopy:
    """A copy of memory in a memory file, open until `close` or garbage collection."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Copy the buffers. To be called in a thread. Raises OSError."""
        self._name = f"stratagem-snapshot-{secrets.token_hex(16)}"
        self._descriptor = os.memfd_create(self._name, os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        for views in iter_views(buffers, piece_bytes=MAX_COPY_BYTES):
            for view in views:
                _write(self._descriptor, view)

    def offer(self) -> tensor_pb2.OpenFile:
        return offer(self._descriptor, name=self._name)


def _write(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


# ---- The side that reads it ----


def is_near(other: str) -> bool:
    """Return whether `other` is the place of this process too, so that both can share files."""
    return bool(other) and other == place()


def offered(message: Any) -> tensor_pb2.OpenFile | None:
    """Return the offer of a file in a message; None if it has none that this process may read."""
    if "file" not in message.DESCRIPTOR.fields_by_name or not message.HasField("file"):
        return None
    file: tensor_pb2.OpenFile = message.file
    return file if is_near(file.place) else None


class OpenedFile:
    """Another process's file, open here until `close` or garbage collection."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)


@cache
def _memory_device() -> int:
    """Return the device number that all memory files have, and no other files."""
    descriptor = os.memfd_create("stratagem-device", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def opened_copy(file: tensor_pb2.OpenFile) -> OpenedFile | None:
    """Open an offered file as `opened` does, and check that it is a memory file."""
    if not _COPY_NAME.fullmatch(file.name):
        raise IntegrityError("an open file was offered that is no copy of a snapshot")
    copy = opened(file, file.name)
    if copy is not None and os.fstat(copy.descriptor).st_dev != _memory_device():
        # Another user could give this name to a file that only this process may read.
        raise IntegrityError("an open file was offered that is not in memory")
    return copy


def opened(file: tensor_pb2.OpenFile, name: str) -> OpenedFile | None:
    """Open an offered file; None if it no longer exists.

    name: the prefix that the file's name must have. Raises IntegrityError for any other file, and
    UnreadableFileError if this process may open none.
    """
    path = f"/proc/{file.process}/fd/{file.descriptor}"
    try:
        _check_name(path, name)
        handle = OpenedFile(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError as error:
        raise UnreadableFileError(f"{path}: {error.strerror}") from error
    except OSError:
        return None
    try:
        _check_name(f"/proc/self/fd/{handle.descriptor}", name)  # may have changed
    except BaseException:
        handle.close()
        raise
    return handle


def _check_name(path: str, name: str) -> None:
    file_name = os.path.basename(os.readlink(path)).removeprefix(_MEMORY)
    if not (file_name.startswith(name) and stat.S_ISREG(os.stat(path).st_mode)):
        raise IntegrityError(f"an open file was offered that is no {name}")


def contents(
    opened_file: OpenedFile, file: tensor_pb2.OpenFile, total_bytes: int
) -> Generator[memoryview, None, None]:
    """Yield the bytes of an offered file, in pieces that reuse one buffer, then close it. Raises
    IntegrityError if the checksums differ."""
    size = file.piece_bytes if file.crc32c else piece_bytes(total_bytes)
    try:
        if not _MIN_PIECE_BYTES <= size <= MAX_CHUNK_BYTES:
            raise IntegrityError(f"a file was offered in pieces of {size} bytes")
        buffer = memoryview(bytearray(min(size, total_bytes)))
        for number, offset in enumerate(range(0, total_bytes, size)):
            piece = buffer[: total_bytes - offset]
            got = os.preadv(opened_file.descriptor, [piece], file.start + offset)
            sums = file.crc32c[number : number + 1]
            if got != len(piece) or (file.crc32c and [crc32c(piece)] != list(sums)):
                raise IntegrityError(f"an offered file has other bytes from {offset} on")
            yield piece
    finally:
        opened_file.close()


def until(pieces: Iterator[memoryview], limit_s: float) -> Iterator[memoryview]:
    """Yield the pieces, but stop once limit_s seconds have passed."""
    end_s = time.monotonic() + limit_s
    for piece in pieces:
        yield piece
        if time.monotonic() > end_s:
            return


def readable_copy(file: tensor_pb2.OpenFile, total_bytes: int) -> Iterator[memoryview] | None:
    """Return the bytes of an offered memory file as `contents` does; None if it no longer exists,
    so that they must be requested. Raises UnreadableFileError if this process may open none."""
    try:
        copy = opened_copy(file)
    except IntegrityError:  # the copy was closed, and its descriptor reused
        return None
    return None if copy is None else contents(copy, file, total_bytes)


# ---- Transfer ----
#
# In a download by open file, one side offers a copy and the other reads it. Both count its bytes as
# those of a stream. This section decides the lifetime of a copy; the calls that carry an offer are
# in rpc/tensor_transfer.py.

M = TypeVar("M")

Take = Callable[[int, Iterator[Data]], Awaitable[None]]
"""A function that consumes all bytes from an offset on, as pieces valid until the next one."""


class Near(NamedTuple):
    """A download from a sender on this machine, which may offer a file in place of chunks."""

    open_call: Callable[[], Any]
    """Starts a call, from the first byte on, in which the server may offer a file."""
    take: Take
    """Consumes the content of the offered file, instead of the destination of `accept`."""
    leave: Callable[[], None]
    """Makes further calls accept no offers, since this process may not open the files."""


async def serve_copy(
    make: Callable[[], M],
    manifest: Manifest,
    copy: MemoryCopy,
    num_bytes: int,
    idle_timeout_s: float,
) -> AsyncIterator[M]:
    """Yield the only response of a download, which offers a copy of the content to the caller. The
    copy exists until the caller ends the call, for at most idle_timeout_s. num_bytes: the bytes
    that count as sent."""
    try:
        first = make()
        cast(Any, first).manifest.CopyFrom(to_proto(manifest))
        cast(Any, first).file.CopyFrom(copy.offer())
        sent(manifest.purpose).num_bytes += num_bytes
        yield first
        with suppress(TimeoutError):
            async with asyncio.timeout(idle_timeout_s):
                await asyncio.Event().wait()
    finally:
        copy.close()


async def take_offered(
    near: Near, file: tensor_pb2.OpenFile, writer: ChunkWriter, purpose: Purpose
) -> bool:
    """Read all bytes that the writer lacks from an offered file; return False if it cannot."""
    try:
        pieces = readable_copy(file, writer.total_bytes)
    except UnreadableFileError:
        near.leave()
        return False
    if pieces is None:
        return False
    await near.take(0, pieces)
    writer.received = writer.total_bytes
    received(purpose).num_bytes += writer.total_bytes
    return True
