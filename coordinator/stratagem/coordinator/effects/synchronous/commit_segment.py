"""CommitSegment: store the snapshot of a finished segment, of members that have it.

The members train on meanwhile. Of members that hold the same bits any one suffices; where the state
is divided among members, every part is pulled, and the parts become one blob.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from stratagem.common.base.ids import Digest
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.manifest import Limits, Manifest
from stratagem.coordinator.core.effects import CommitSegment
from stratagem.coordinator.core.facts import Member, PartyFailed, SegmentCommitted
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.state_writing import state_writer
from stratagem.coordinator.effects.synchronous.direct_commit import written_by_members
from stratagem.coordinator.effects.synchronous.divided_commit import written_by_owners
from stratagem.coordinator.effects.synchronous.snapshot import (
    PartHolder,
    from_any,
    pull_part,
    pull_snapshot,
)
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.store.blobs.blob_store import StateWriter, file_writer
from stratagem.coordinator.updates.members.merge_parts import (
    ContradictionError,
    StatePart,
    joined_rows,
    write_merged,
)
from stratagem.coordinator.updates.members.merge_slices import whole_of


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
        await env.report(effect.run_id, PartyFailed(party=effect.party, reason=reason))
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
    await env.report(effect.run_id, fact)


async def _divided(env: EffectContext, effect: CommitSegment) -> tuple[Digest, int]:
    """Store a state of which members hold parts; its digest and size in bytes."""
    parts = _holders(effect)
    written = await written_by_owners(env, parts, effect.segment)
    if written is not None:
        return written
    pulls = [partial(_part, env, holders, effect.segment) for holders in parts]
    return await merged(env, pulls, partial(state_writer, env, effect.run_id))


def _holders(effect: CommitSegment) -> list[list[PartHolder]]:
    """Return by part who has it: those whose own it is, and then those with a mirror of it."""
    mirrors = effect.mirrors or ((),) * len(effect.parts)
    return [
        [PartHolder(_session(effect, member)) for member in own]
        + [PartHolder(_session(effect, member), of_mirror=True) for member in also]
        for own, also in zip(effect.parts, mirrors, strict=True)
    ]


async def stored_snapshot(
    env: EffectContext, sessions: Sequence[WorkerSession], segment: int
) -> tuple[Digest, Manifest]:
    """Store the snapshot that all of the sessions have; return its digest and its manifest.

    Raises ContradictionError where they have not the same one.
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
    """Pull all parts and write them as one blob; its digest and size in bytes.

    writer_of: of the blob; unless given, it is one file. joins_rows: see `joined_rows`. Raises
    ContradictionError for parts that make no whole.
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
        begin = writer_of or partial(file_writer, env.blobs)
        return await env.in_thread(
            lambda: _write(env, parts, cancelled, begin, joins_rows=joins_rows)
        )
    finally:
        cancelled.set()
        for part in parts:
            part.data.close()


async def _part(env: EffectContext, holders: Sequence[PartHolder], segment: int) -> StatePart:
    async with env.pulls:
        return await from_any(holders, lambda holder: pull_part(env, holder, segment))


def _session(effect: CommitSegment, member: Member) -> WorkerSession:
    return WorkerSession(member, effect.run_id, effect.party, effect.membership)


def _write(
    env: EffectContext,
    parts: list[StatePart],
    cancelled: threading.Event,
    writer_of: Callable[[Manifest], StateWriter],
    *,
    joins_rows: bool,
) -> tuple[Digest, int]:
    limits = Limits(max_total_bytes=env.settings.max_state_bytes)
    manifest, sources = whole_of([part.manifest for part in parts], limits)
    writer = writer_of(joined_rows(manifest) if joins_rows else manifest)
    try:
        digest = write_merged(manifest, parts, writer, sources, cancelled.is_set)
    finally:
        writer.abort()
    return digest, manifest.total_bytes
