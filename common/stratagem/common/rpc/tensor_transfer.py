"""Transfer tensor streams over gRPC, in both directions and on both sides.

The module defines the order of messages, the resumption after a cut, and the idle timeout: a peer
that is silent for `idle_timeout_s` inside a stream counts as gone. gRPC shows whole messages only,
so a chunk must arrive within that time, and a slow stream gets small ones: a download begins with
them, each time it is resumed, and an upload that was too slow continues with them. Bytes pass
through a piece at a time and are never gathered here. The module must not depend on torch, sessions
or the place of the bytes.

    download  caller: request with offset  server: Manifest, Chunk…               pull, serve_get
    upload    caller: header, Chunk…       server: resume_offset, then committed  push, receive_…
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Protocol, TypeVar, cast

import grpc
import grpc.aio

from stratagem.common.base.errors import ConflictError, InvalidInputError, UnavailableError
from stratagem.common.base.retry import Backoff
from stratagem.common.observe.tracing import bind_ids
from stratagem.common.rpc.channel import write_message
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.rpc.streams import StallTimeout
from stratagem.common.tensors.local_files import Near, offered, take_offered
from stratagem.common.tensors.manifest import (
    DEFAULT_LIMITS,
    Limits,
    Manifest,
    Purpose,
    from_proto,
    to_proto,
)
from stratagem.common.tensors.stream import (
    CarriesChunk,
    ChunkFrame,
    ChunkWriter,
    Flow,
    Sink,
    Source,
    check_offset,
    from_buffers,
    iter_frames,
    piece_bytes,
    recut,
    sent,
)
from stratagem.v1 import tensor_pb2

IDLE_TIMEOUT_S: Final = 30.0
SMALL_CHUNK_BYTES: Final = 64 * 2**10
"""The chunk size for slow streams: one per idle timeout is 2 KB/s; a whole chunk, 70 KB/s."""
_FIRST_CHUNKS: Final = (SMALL_CHUNK_BYTES, 3 * SMALL_CHUNK_BYTES, 12 * SMALL_CHUNK_BYTES)
"""The first chunks of a download: half of its first 2 MiB, so that progress is seen below 70 KB/s.
Three more messages do not slow a fast stream."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The policy of retrying a stream that was cut: attempts without progress, and backoff."""

    max_attempts: int = 5
    first_pause_s: float = 0.1
    max_pause_s: float = 2.0


class CarriesManifest(CarriesChunk, Protocol):
    """A response message of a download, with the fields `manifest` and `chunk`."""

    @property
    def manifest(self) -> tensor_pb2.Manifest: ...


M = TypeVar("M", bound=CarriesManifest)
R = TypeVar("R")

KeepUp = Callable[[], Awaitable[None]]

FrameSource = Callable[[int], Iterator[bytes]]
"""A function that yields content from an offset on, as serialized messages that carry chunks."""

SizeOf = Callable[[Any, Manifest], int]
"""A function that returns the number of bytes of a stream, given its first message and manifest."""

Accept = Callable[[Manifest], Sink | memoryview]
"""A function called once with the checked manifest: it returns where to write bytes, or raises."""


# ---- The side that serves ----


async def serve_get(
    make: Callable[[], M],
    manifest: Manifest,
    content: Source | Sequence[memoryview],
    offset: int = 0,
    check: Callable[[int, bytes], None] | None = None,
    num_bytes: int | None = None,
    *,
    is_counted: bool = False,
) -> AsyncIterator[M]:
    """Yield the responses of a download: the manifest, then the content from `offset` on.

    check: called with each frame and its offset before it is sent. num_bytes: the size of the
    content, if it is less than what the manifest describes. is_counted: the caller has already
    counted the bytes as sent. The content is yielded serialized; servers of `rpc.server` pass it on
    unchanged.
    """
    size_bytes = manifest.total_bytes if num_bytes is None else num_bytes
    check_offset(offset, size_bytes)
    first = make()
    first.manifest.CopyFrom(to_proto(manifest))
    yield first
    source = content if callable(content) else from_buffers(content, piece_bytes(size_bytes))
    flow = sent(manifest.purpose)
    begin = offset
    for piece in source(offset):
        size = len(piece) if isinstance(piece, bytes | memoryview) else sum(map(len, piece))
        (frame,) = iter_frames((piece,), offset)
        if check is not None:
            check(offset, frame)
        for part in recut(frame, _FIRST_CHUNKS) if offset == begin else (frame,):
            flow.num_bytes += 0 if is_counted else len(part)
            yield cast(M, part)
        offset += size


async def receive_header(
    requests: AsyncIterator[Any], idle_timeout_s: float = IDLE_TIMEOUT_S
) -> Any:
    """Receive and return the first request of an upload, which must be the header."""
    request = await _next(requests, idle_timeout_s)
    if request is None or _kind(request) != "header":
        raise InvalidInputError.at("message", "the first one of a stream must be the header")
    bind_ids(request.header)
    return request


async def receive_upload(
    requests: AsyncIterator[Any],
    make: Callable[..., R],
    writer: ChunkWriter,
    commit: Callable[[], Awaitable[None]],
    idle_timeout_s: float = IDLE_TIMEOUT_S,
) -> AsyncIterator[R]:
    """Write the chunks of an upload whose header has been accepted; yield the responses.

    `writer` is at the offset where the sender continues; `commit` checks the digest and makes the
    content visible. After an error the caller decides about the received part.
    """
    yield make(resume_offset=writer.received)
    await receive_chunks(requests, writer, idle_timeout_s)
    await commit()
    yield make(committed=True)


async def receive_chunks(
    messages: AsyncIterator[Any],
    writer: ChunkWriter,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    keep_up: KeepUp | None = None,
) -> None:
    """Write the chunks in messages until the writer is complete; for uploads and downloads. keep_up
    is awaited after each chunk, so that a slow sink can hold up the stream."""
    read = aiter(messages).__anext__
    async with StallTimeout(idle_timeout_s) as peer:
        while not writer.is_complete:
            try:
                with peer.waiting():
                    message = await read()
            except StopAsyncIteration:
                writer.finish()
                return
            if type(message) is not ChunkFrame and (kind := _kind(message)) != "chunk":
                raise InvalidInputError.at("message", f"{kind} stands where a chunk must be")
            writer.write(message.chunk)
            if keep_up is not None:
                await keep_up()


async def _next(messages: AsyncIterator[R], idle_timeout_s: float) -> R | None:
    async with StallTimeout(idle_timeout_s) as peer:
        with peer.waiting():
            return await anext(messages, None)


def _kind(message: Any) -> str:
    return message.WhichOneof("message") or "nothing"


# ---- The side that calls ----


def all_of_it(_first: Any, manifest: Manifest) -> int:
    """Return the size of a stream that carries all data of its manifest (the default `size_of`)."""
    return manifest.total_bytes


async def pull(  # noqa: PLR0913  (all but two have the usual defaults)
    open_call: Callable[[int], grpc.aio.UnaryStreamCall[Any, Any]],
    accept: Accept,
    *,
    limits: Limits = DEFAULT_LIMITS,
    purpose: Purpose | None = None,
    offset: int = 0,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    retry: Retry = Retry(),
    keep_up: KeepUp | None = None,
    codecs: Collection[str] = ("",),
    size_of: SizeOf = all_of_it,
    near: Near | None = None,
) -> Manifest:
    """Download a tensor stream to the destination that `accept` returns; resume after a cut.

    `open_call(offset)` starts the call; `offset` > 0 continues a download of an earlier process.
    `size_of` computes the size of the stream from the first message of each call. `near` is tried
    once, before `open_call`. Raises a StratagemError; the sink then has an unusable part.
    """
    download = _Download(accept, limits, purpose, offset, codecs, size_of)
    if offset:  # a download of an earlier process continues as a stream
        near = None

    async def received_by(call: Any, near: Near | None) -> bool:
        try:
            return await _receive(call, download, idle_timeout_s, keep_up, near)
        finally:
            call.cancel()  # does nothing to a call that has ended

    async def attempt() -> None:
        nonlocal near
        asked, near = near, None
        if asked is not None and await received_by(asked.open_call(), asked):
            return
        await received_by(open_call(download.received), None)

    await _persist(attempt, lambda: download.received, retry)
    assert download.manifest is not None
    return download.manifest


class _Download:
    """The progress of one download over all its attempts: the manifest and the bytes received."""

    def __init__(
        self,
        accept: Accept,
        limits: Limits,
        purpose: Purpose | None,
        offset: int,
        codecs: Collection[str],
        size_of: SizeOf,
    ) -> None:
        self._accept, self._limits, self._purpose, self._offset = accept, limits, purpose, offset
        self._codecs, self._size_of = codecs, size_of
        self.manifest: Manifest | None = None
        self.writer: ChunkWriter | None = None

    @property
    def received(self) -> int:
        return self.writer.received if self.writer else self._offset

    @property
    def purpose(self) -> Purpose:
        assert self.manifest is not None
        return self.manifest.purpose

    def begin(self, first: CarriesManifest) -> ChunkWriter:
        manifest = from_proto(first.manifest, self._limits, self._purpose, self._codecs)
        num_bytes = self._size_of(first, manifest)
        if self.writer is None:
            self.writer = ChunkWriter(
                num_bytes, self._accept(manifest), self._offset, manifest.purpose
            )
            self.manifest = manifest
        elif manifest != self.manifest:
            raise ConflictError("the content of the stream changed while it was resumed")
        return self.writer


async def _receive(
    call: Any,
    download: _Download,
    idle_timeout_s: float,
    keep_up: KeepUp | None,
    near: Near | None,
) -> bool:
    """Receive the content of a download call; return False for an unreadable offered file."""
    messages = aiter(call)
    first = await _next(messages, idle_timeout_s)
    if first is None or _kind(first) != "manifest":
        raise InvalidInputError.at("message", "the first one of a stream must be the manifest")
    writer = download.begin(first)
    if near is not None and (file := offered(first)) is not None:
        return await take_offered(near, file, writer, download.purpose)
    await receive_chunks(messages, writer, idle_timeout_s, keep_up)
    if await _next(messages, idle_timeout_s) is not None:
        raise InvalidInputError.at("message", "the stream goes on behind its announced end")
    return True


async def push(
    method: Callable[[], grpc.aio.StreamStreamCall[Any, Any]],
    header: Any,
    manifest: Manifest,
    content: Source | Sequence[memoryview],
    *,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    retry: Retry = Retry(),
) -> None:
    """Upload a tensor stream through `method` (such as `stub.SetState`); return once it is
    committed.

    `header` is the first request. The receiver names the offset from which it needs the bytes, so a
    cut stream continues there. Raises a StratagemError.
    """
    pieces = piece_bytes(manifest.total_bytes)
    source = content if callable(content) else from_buffers(content, pieces)
    await push_frames(
        method,
        header,
        manifest,
        lambda offset: iter_frames(source(offset), offset),
        idle_timeout_s=idle_timeout_s,
        retry=retry,
    )


async def push_frames(
    method: Callable[[], grpc.aio.StreamStreamCall[Any, Any]],
    header: Any,
    manifest: Manifest,
    frames: FrameSource,
    *,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    retry: Retry = Retry(),
) -> None:
    """Upload as `push` does, from serialized chunks, which several receivers may share."""
    agreed = 0  # the offset that the receiver named last
    is_slow = False

    async def attempt() -> None:
        nonlocal agreed, is_slow
        call = method()
        try:
            agreed = await _handshake(call, header, manifest.total_bytes, idle_timeout_s)
            content = _small(frames(agreed)) if is_slow else frames(agreed)
            await _send(call, content, sent(manifest.purpose), idle_timeout_s)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            is_slow |= _is_stall(error)
            raise
        finally:
            call.cancel()  # does nothing to a call that has ended

    await _persist(attempt, lambda: agreed, retry)


async def _handshake(call: Any, header: Any, total_bytes: int, idle_timeout_s: float) -> int:
    async with asyncio.timeout(idle_timeout_s):
        await call.wait_for_connection()
        await write_message(call, header)
        answer = await call.read()
    if answer is grpc.aio.EOF:
        raise ConflictError("the receiver ended the upload before it began")
    check_offset(answer.resume_offset, total_bytes)
    return int(answer.resume_offset)


async def _send(call: Any, frames: Iterator[bytes], flow: Flow, idle_timeout_s: float) -> None:
    async with StallTimeout(idle_timeout_s) as peer:
        for frame in frames:
            with peer.waiting():
                await write_message(call, frame)
            flow.num_bytes += len(frame)
        with peer.waiting():
            await call.done_writing()
            answer = await call.read()
        if answer is grpc.aio.EOF or not answer.committed:
            raise ConflictError("the receiver ended the upload without committing it")


def _small(frames: Iterator[bytes]) -> Iterator[bytes]:
    for frame in frames:
        yield from recut(frame, repeat(SMALL_CHUNK_BYTES))


async def _persist(
    attempt: Callable[[], Awaitable[Any]], progress: Callable[[], int], retry: Retry
) -> None:
    """Retry `attempt` with backoff until it succeeds, fails for good, or makes no progress."""
    failures, reached = 0, progress()
    backoff = Backoff(retry.first_pause_s, retry.max_pause_s)
    while True:
        try:
            await attempt()
            return
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            failures += 1
            if progress() > reached:
                failures, reached = 0, progress()
                backoff.reset()
            if not _is_cut(error) or failures >= retry.max_attempts:
                raise _translated(error) from error
        await backoff.pause()


def _is_cut(error: grpc.aio.AioRpcError | TimeoutError) -> bool:
    """Return whether the connection or the peer was lost, as opposed to refusing the call.

    gRPC reports a write into a stream that the peer has just ended as INTERNAL, and loses the
    peer's reason; the next attempt will receive it.
    """
    if _is_stall(error):
        return True
    assert isinstance(error, grpc.aio.AioRpcError)
    is_away = error.code() is grpc.StatusCode.UNAVAILABLE
    return is_away or error.details() == "Internal error from Core"


def _is_stall(error: grpc.aio.AioRpcError | TimeoutError) -> bool:
    """Return whether an error is the idle timeout, the only deadline here, of either side."""
    return isinstance(error, TimeoutError) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _translated(error: grpc.aio.AioRpcError | TimeoutError) -> Exception:
    if isinstance(error, TimeoutError):
        return UnavailableError(str(error) or "the peer was silent for too long")
    return from_rpc_error(error)
