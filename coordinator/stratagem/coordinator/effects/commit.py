"""CommitSegment stores the snapshot of a finished segment; UploadCommit completes a commit of which
some parts are only on workers.

The members train on meanwhile. If several members hold the same bits, one of them suffices. If the
state is divided among members, every part is pulled, and the parts become one blob.
"""

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    PermissionDeniedError,
    StratagemError,
    UnavailableError,
)
from stratagem.common.base.ids import Digest
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import header_bytes, header_of
from stratagem.common.tensors.manifest import Limits, Manifest
from stratagem.coordinator.core.effects import CommitSegment, UploadCommit
from stratagem.coordinator.core.facts import (
    CommitUploaded,
    Member,
    PartyFailed,
    SegmentCommitted,
    SoleCopiesLost,
)
from stratagem.coordinator.effects.context import EffectContext
from stratagem.coordinator.effects.direct_commit import written_by_members, written_by_owners
from stratagem.coordinator.effects.execute import state_writer
from stratagem.coordinator.effects.snapshot import (
    PartHolder,
    from_any,
    pull_kept,
    pull_part,
    pull_snapshot,
)
from stratagem.coordinator.runtime.links import WorkerSession
from stratagem.coordinator.store.blobs import StateWriter, file_writer
from stratagem.coordinator.updates.merge import (
    ContradictionError,
    StatePart,
    joined_rows,
    whole_of,
    write_merged,
)

# ---- CommitSegment ----


async def commit_segment(env: EffectContext, effect: CommitSegment) -> None:
    """Make the segment's state durable and report SegmentCommitted."""
    try:
        if len(effect.parts) == 1:
            sessions = [_session(effect, member) for member in effect.parts[0]]
            digest, manifest = await stored_snapshot(env, sessions, effect.segment)
            size_bytes = manifest.total_bytes
        else:
            digest, size_bytes = await _divided(env, effect)
    except ContradictionError as error:
        reason = f"segment {effect.segment} cannot be committed: {error}"
        await env.runs.report(effect.run_id, PartyFailed(party=effect.party, reason=reason))
        return
    failpoint("coordinator.commit.pulled")
    fact = SegmentCommitted(
        party=effect.party,
        segment=effect.segment,
        step=effect.step,
        digest=digest,
        size_bytes=size_bytes,
        metrics=dict(effect.metrics),
        streams=effect.streams,
        is_partial=effect.is_partial,
    )
    await env.runs.report(effect.run_id, fact)


async def _divided(env: EffectContext, effect: CommitSegment) -> tuple[Digest, int]:
    """Store a state that is divided among members; return its digest and size in bytes."""
    parts = _holders(effect)
    written = await written_by_owners(env, parts, effect.segment)
    if written is not None:
        return written
    pulls = [partial(_part, env, holders, effect.segment) for holders in parts]
    return await merged(
        env, pulls, partial(state_writer, env.runs, env.transfers.blobs, effect.run_id)
    )


def _holders(effect: CommitSegment) -> list[list[PartHolder]]:
    """Return the holders of each part: its owners, then the members with a mirror of it."""
    mirrors = effect.mirrors or ((),) * len(effect.parts)
    return [
        [PartHolder(_session(effect, member)) for member in owners]
        + [PartHolder(_session(effect, member), of_mirror=True) for member in mirroring]
        for owners, mirroring in zip(effect.parts, mirrors, strict=True)
    ]


async def stored_snapshot(
    env: EffectContext, sessions: Sequence[WorkerSession], segment: int
) -> tuple[Digest, Manifest]:
    """Store the snapshot that all sessions have in common; return its digest and manifest.

    Raises ContradictionError if the sessions have different snapshots.
    """
    written = await written_by_members(env, sessions, segment)
    if written is not None:
        return written
    holders = [PartHolder(at) for at in sessions]
    return await from_any(holders, lambda holder: pull_snapshot(env, holder.at, segment))


async def merged(
    env: EffectContext,
    pulls_of: Sequence[Callable[[], Awaitable[StatePart]]],
    writer_of: Callable[[Manifest], StateWriter] | None = None,
    *,
    joins_rows: bool = False,
) -> tuple[Digest, int]:
    """Pull all parts of a state and write them as one blob; return its digest and size in bytes.

    pulls_of: pull one part each. writer_of: makes the writer of the blob, by default of one file.
    joins_rows: see `joined_rows`. Raises ContradictionError if the parts make no whole.
    """
    parts: list[StatePart] = []
    cancelled = threading.Event()
    try:
        # Not a task group: what the first part raises must reach the caller as it is.
        pulls = [asyncio.ensure_future(pull()) for pull in pulls_of]
        try:
            await asyncio.gather(*pulls)
        finally:
            for task in pulls:
                task.cancel()
            ended = await asyncio.gather(*pulls, return_exceptions=True)
            parts += [result for result in ended if isinstance(result, StatePart)]
        begin = writer_of or partial(file_writer, env.transfers.blobs)
        return await asyncio.to_thread(
            lambda: _write(env.transfers.limits, parts, cancelled, begin, joins_rows=joins_rows)
        )
    finally:
        cancelled.set()
        for part in parts:
            part.data.close()


async def _part(env: EffectContext, holders: Sequence[PartHolder], segment: int) -> StatePart:
    async with env.transfers.pulls:
        return await from_any(holders, lambda holder: pull_part(env, holder, segment))


def _session(effect: CommitSegment, member: Member) -> WorkerSession:
    return WorkerSession(member, effect.run_id, effect.party, effect.membership)


def _write(
    limits: Limits,
    parts: list[StatePart],
    cancelled: threading.Event,
    writer_of: Callable[[Manifest], StateWriter],
    *,
    joins_rows: bool,
) -> tuple[Digest, int]:
    manifest, sources = whole_of([part.manifest for part in parts], limits)
    writer = writer_of(joined_rows(manifest) if joins_rows else manifest)
    try:
        digest = write_merged(manifest, parts, writer, sources, cancelled.is_set)
    finally:
        writer.abort()
    return digest, manifest.total_bytes


# ---- UploadCommit ----
#
# The files that only single workers have kept are pulled and merged into one blob with the data
# that all of them have. The result is the blob that a complete commit would have made.

PIECE_BYTES: Final = 1 << 20
LOST: Final = (
    *(ContradictionError, IntegrityError, InvalidInputError),
    *(LimitError, NotFoundError, PermissionDeniedError),
)
"""Errors that mean that a worker does not have the file, or has it with other content."""


async def upload_commit(env: EffectContext, effect: UploadCommit) -> None:
    """Complete a commit: report CommitUploaded, or SoleCopiesLost if a worker has lost its file."""
    copies = zip(effect.holders, effect.kept, strict=True)
    pulls = [partial(_sole_copy, env, effect, *copy) for copy in copies]
    try:
        digest, size_bytes = await merged(
            env,
            [partial(_common, env, effect), *pulls],
            partial(state_writer, env.runs, env.transfers.blobs, effect.run_id),
        )
    except StratagemError as error:
        if not _is_lost(env, effect, error):
            raise
        lost = SoleCopiesLost(party=effect.party, segment=effect.segment, reason=str(error))
        await env.runs.report(effect.run_id, lost)
        return
    failpoint("coordinator.upload.merged")
    uploaded = CommitUploaded(
        party=effect.party, segment=effect.segment, digest=digest, size_bytes=size_bytes
    )
    await env.runs.report(effect.run_id, uploaded)


def _is_lost(env: EffectContext, effect: UploadCommit, error: StratagemError) -> bool:
    """Return True if a worker's file will never arrive: the worker does not have it, is lost, or
    has left. After the run has ended, only an unanswered call to a worker that is still present is
    retried."""
    holders = [(holder, env.runs.state.workers.get(holder.worker_id)) for holder in effect.holders]
    are_gone = any(record is None or not record.is_alive for _, record in holders)
    run = env.runs.state.runs.get(effect.run_id)
    if run is None or run.ended is None:
        return isinstance(error, LOST) or (isinstance(error, UnavailableError) and are_gone)
    is_other = any(record is not None and record.member != holder for holder, record in holders)
    return not isinstance(error, UnavailableError) or are_gone or is_other


async def _common(env: EffectContext, effect: UploadCommit) -> StatePart:
    """Return the part of the state that is stored already, which all members have."""

    def copy() -> StatePart:
        limits = env.transfers.limits
        scratch = env.transfers.blobs.scratch()
        try:
            with env.transfers.blobs.open(effect.base.digest) as blob:
                manifest, start = header_of(blob, effect.base.digest, limits)
                blob.seek(start)
                while data := blob.read(PIECE_BYTES):
                    scratch.write(data)
        except BaseException:
            scratch.close()
            raise
        return StatePart(manifest, scratch)

    return await asyncio.to_thread(copy)


async def _sole_copy(
    env: EffectContext, effect: UploadCommit, holder: Member, digest: Digest
) -> StatePart:
    at = WorkerSession(holder, effect.run_id, effect.party, effect.membership)
    async with env.transfers.pulls:
        part = await pull_kept(env, at, effect.segment)
    try:
        actual = await asyncio.to_thread(lambda: _digest_of(part))
        if actual != digest:
            text = f"the file of worker {holder.worker_id} has the digest {actual}, not {digest}"
            raise IntegrityError(text)
    except BaseException:
        part.data.close()
        raise
    return part


def _digest_of(part: StatePart) -> str:
    sha256 = hashlib.sha256(header_bytes(part.manifest))
    for piece in part.data.read(0, part.manifest.total_bytes):
        sha256.update(piece)
    return sha256.hexdigest()
