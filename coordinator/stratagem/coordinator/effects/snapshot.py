"""Pull snapshots of sessions into the blob store: whole ones, or parts that make a whole."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import grpc
import structlog

from stratagem.common.base.errors import (
    ConflictError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StratagemError,
)
from stratagem.common.base.ids import Digest, Party
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.tensor_transfer import SizeOf, all_of_it, pull
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose
from stratagem.common.tensors.same_bytes import SameBytes, check_same, num_changed_bytes
from stratagem.common.tensors.stream import Sink
from stratagem.coordinator.effects.context import EffectContext, PulledSnapshot, Transfers
from stratagem.coordinator.effects.execute import state_writer
from stratagem.coordinator.runtime.links import SnapshotCalls, WorkerSession
from stratagem.coordinator.store.blobs import BlobStore, StateWriter
from stratagem.coordinator.store.files import BlobFile
from stratagem.coordinator.updates.floats import Offload
from stratagem.coordinator.updates.merge import StatePart
from stratagem.v1 import worker_pb2

# ---- Incremental intake ----
#
# A snapshot is written from the data that the worker sends and from the blob of an earlier
# snapshot.
#
# The blob is the one that all of the bytes would have made, and its SHA-256 covers all of them.
# Data from the earlier blob are checked as they are read.

PIECE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class BaseBlob:
    """An earlier snapshot in the store: its open blob, and the offset of its data."""

    name: str
    file: BlobFile
    data_start: int
    data_bytes: int


class SnapshotIntake:
    """Receives one snapshot; call commit or abort. After `accept`, use one thread at a time."""

    def __init__(self, writer_of: Callable[[Manifest], StateWriter], base: BaseBlob | None) -> None:
        self.name = ""
        """The snapshot's name; "" if the worker gives none."""
        self._writer_of, self._base = writer_of, base
        self._same: Sequence[SameBytes] | None = None
        self._next = 0
        """The index of the first range in `_same` that is not copied yet."""
        self._num_written = 0
        self._writer: StateWriter | None = None

    def size_of(self, first: worker_pb2.GetStateResponse, manifest: Manifest) -> int:
        """Return the number of bytes to come, from the first message of the worker's stream.

        Raises ConflictError if a resumed stream omits other unchanged ranges than the stream
        before.
        """
        same = [SameBytes(piece.offset, piece.base_offset, piece.size) for piece in first.same]
        base_bytes = 0 if self._base is None else self._base.data_bytes
        check_same(same, manifest.total_bytes, base_bytes)
        if self._same is not None and (same, first.name) != (self._same, self.name):
            raise ConflictError("another part of the snapshot is left out than before")
        self._same, self.name = same, first.name
        return num_changed_bytes(same, manifest.total_bytes)

    def accept(self, manifest: Manifest) -> Callable[[bytes], None]:
        """Begin the blob; return a function that takes the bytes in order, and b"" at the end."""
        self._writer = self._writer_of(manifest)
        return self._write

    def commit(self) -> Digest:
        """Make the blob durable, and return its digest."""
        assert self._writer is not None
        return self._writer.commit()

    def abort(self) -> None:
        """Delete the unfinished blob; do nothing after a commit."""
        if self._writer is not None:
            self._writer.abort()

    def _write(self, data: bytes) -> None:
        """Write received bytes, and copy the unchanged ranges of the base snapshot around them."""
        assert self._writer is not None
        view = memoryview(data)
        while True:
            until = self._copy_same()
            part = view if until is None else view[: until - self._num_written]
            if not part:
                return
            self._writer.write(part)
            self._num_written += len(part)
            view = view[len(part) :]

    def _copy_same(self) -> int | None:
        """Copy the unchanged ranges that are due; return the offset of the next one, or None."""
        assert self._writer is not None
        assert self._same is not None
        while self._next < len(self._same):
            offset, base_offset, size = self._same[self._next]
            if offset > self._num_written:
                return offset
            assert self._base is not None
            buffer = memoryview(bytearray(min(size, PIECE_BYTES)))
            for start in range(0, size, PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, size - start)]
                self._base.file.read_into(piece, self._base.data_start + base_offset + start)
                self._writer.write(piece)
            self._num_written += size
            self._next += 1
            failpoint("coordinator.snapshot.copied")
        return None


# ---- Pulling snapshots ----

log = structlog.get_logger()
T = TypeVar("T")
Ask = Callable[[int], grpc.aio.UnaryStreamCall[Any, Any]]
"""Opens a stream of tensors that starts at an offset."""
NOT_BY_CHANGES: Final = (ConflictError, IntegrityError, InvalidInputError, NotFoundError)
"""Errors that mean that a snapshot cannot be pulled as changes to an earlier one."""


class PartHolder(NamedTuple):
    """A member that has a part of a state: its own, or the mirror of the previous member's part."""

    at: WorkerSession
    of_mirror: bool = False


async def from_any(
    holders: Sequence[PartHolder], pull_from: Callable[[PartHolder], Awaitable[T]]
) -> T:
    """Return the result of the first holder that succeeds; raise the last error if all fail."""
    assert holders, "nobody has the snapshot"
    for holder in holders[:-1]:
        try:
            return await pull_from(holder)
        except StratagemError as error:
            worker_id = holder.at.member.worker_id
            log.info("no snapshot here", worker_id=worker_id, reason=str(error))
    return await pull_from(holders[-1])


async def pull_snapshot(
    env: EffectContext, at: WorkerSession, segment: int
) -> tuple[Digest, Manifest]:
    """Pull the snapshot that a member took at the end of a segment, durably, into the store.

    Bytes that are unchanged from a stored snapshot of this session are not sent again.
    """
    link = env.workers.link(at.member)
    base = await base_of(env.transfers, at)
    if base is not None:
        with base.file:
            try:
                return await _pulled(env, at, link.snapshot(at, segment, base.name), base)
            except NOT_BY_CHANGES as error:
                log.info("a snapshot is pulled whole", run_id=at.run_id, reason=str(error))
    return await _pulled(env, at, link.snapshot(at, segment))


async def pull_outputs(
    env: EffectContext, at: WorkerSession, segment: int
) -> tuple[Digest, Manifest]:
    """Pull the outputs that a member keeps in addition to its snapshot, durably, into the store."""
    return await _pulled(env, at, env.workers.link(at.member).outputs(at, segment))


async def base_of(transfers: Transfers, at: WorkerSession) -> BaseBlob | None:
    """Open the previous snapshot pulled from this member's session; None if it cannot be read."""
    pulled = transfers.snapshots.get((at.run_id, Party(at.party)))
    if pulled is None or pulled.member != at.member:
        return None
    try:
        manifest, data_start = await transfers.header(pulled.digest)
        file = await asyncio.to_thread(lambda: transfers.blobs.open(pulled.digest))
    except (OSError, StratagemError) as error:
        log.info("no base for a snapshot", run_id=at.run_id, reason=str(error))
        return None
    return BaseBlob(pulled.name, file, data_start, manifest.total_bytes)


async def _pulled(
    env: EffectContext, at: WorkerSession, ask: Ask, base: BaseBlob | None = None
) -> tuple[Digest, Manifest]:
    intake = SnapshotIntake(partial(state_writer, env.runs, env.transfers.blobs, at.run_id), base)
    try:
        manifest = await _pull(env.transfers.limits, ask, intake.accept, intake.size_of)
        digest = await asyncio.to_thread(intake.commit)
    finally:
        intake.abort()
    if intake.name:
        env.transfers.snapshots[at.run_id, Party(at.party)] = PulledSnapshot(
            at.member, intake.name, digest
        )
    return digest, manifest


async def pull_part(env: EffectContext, holder: PartHolder, segment: int) -> StatePart:
    """Pull a member's part of the state at a segment's end into a scratch file for the caller."""
    link = env.workers.link(holder.at.member)
    ask = link.snapshot(holder.at, segment, of_mirror=holder.of_mirror)
    return await _scratched(env.transfers, ask)


async def pull_part_outputs(env: EffectContext, at: WorkerSession, segment: int) -> StatePart:
    """Pull a member's outputs for the user's own metrics into a scratch file for the caller."""
    return await _scratched(env.transfers, env.workers.link(at.member).outputs(at, segment))


async def pull_kept(env: EffectContext, at: WorkerSession, segment: int) -> StatePart:
    """Pull the tensors that only one member had at the end of a segment, into a scratch file."""
    return await _scratched(env.transfers, env.workers.link(at.member).kept(at, segment))


async def _scratched(transfers: Transfers, ask: Ask) -> StatePart:
    scratch = transfers.blobs.scratch()
    try:
        manifest = await _pull(transfers.limits, ask, lambda _: scratch.write)
    except BaseException:
        scratch.close()
        raise
    return StatePart(manifest, scratch)


async def _pull(
    limits: Limits,
    ask: Ask,
    begin: Callable[[Manifest], Callable[[bytes], None]],
    size_of: SizeOf = all_of_it,
) -> Manifest:
    """Download a stream, in order, into the sink that `begin` returns; return its manifest."""
    sinks: list[Callable[[bytes], None]] = []
    offload = Offload(lambda _offset, data: sinks[0](data))

    def accept(manifest: Manifest) -> Sink:
        sinks.append(begin(manifest))
        return offload.write

    try:
        manifest = await pull(
            ask,
            accept,
            limits=limits,
            purpose=Purpose.STATE,
            keep_up=offload.keep_up,
            near=ask.near(offload.take) if isinstance(ask, SnapshotCalls) else None,
            size_of=size_of,
        )
        offload.write(manifest.total_bytes, b"")  # nothing more comes
        await offload.finish()
    finally:
        await offload.close()
    return manifest


# ---- Other bytes ----
#
# A fact may name bytes that are no state of a model; these are stored as a blob, too.


async def stored_bytes(blobs: BlobStore, data: bytes) -> Digest:
    """Store these bytes as a blob, and return its digest once it is durable."""
    return await asyncio.to_thread(_stored, blobs, data)


def _stored(blobs: BlobStore, data: bytes) -> Digest:
    writer = blobs.writer(len(data))
    try:
        writer.write(data)
        return writer.commit()
    except BaseException:
        writer.abort()
        raise
