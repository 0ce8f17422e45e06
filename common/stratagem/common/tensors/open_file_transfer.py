"""Downloads by an open file in place of chunks: one side offers a copy, the other reads it.

Both count its bytes as those of a stream. Owns how long a copy is there for its reader; what may be
read is in `open_files`, and the calls that bring an offer are in `rpc.tensor_transfer`. Must not
know gRPC.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

from stratagem.common.tensors.chunks import ChunkWriter
from stratagem.common.tensors.frames import Data
from stratagem.common.tensors.manifest import Manifest, Purpose, to_proto
from stratagem.common.tensors.open_files import MemoryCopy, UnreadableFileError, readable_copy
from stratagem.common.tensors.traffic import received, sent
from stratagem.v1 import tensor_pb2

M = TypeVar("M")

Take = Callable[[int, Iterator[Data]], Awaitable[None]]
"""Takes all bytes from an offset on, as pieces that are valid until the next one."""


class Near(NamedTuple):
    """A download from a sender on this machine, which may offer a file in place of chunks."""

    open_call: Callable[[], Any]
    """Starts a call that says so, from the first byte on."""
    take: Take
    """Reads the file, instead of what `accept` names."""
    leave: Callable[[], None]
    """Has no file offered any more: this process may not open it."""


async def serve_copy(
    make: Callable[[], M],
    manifest: Manifest,
    copy: MemoryCopy,
    num_bytes: int,
    idle_timeout_s: float,
) -> AsyncIterator[M]:
    """The one response of a download whose caller reads a copy of the content by itself. It is
    there until the caller ends the call, for idle_timeout_s at most. num_bytes: that count as
    sent."""
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
    """Read the file that a sender offers for all that the writer waits for; False where it cannot
    be read."""
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
