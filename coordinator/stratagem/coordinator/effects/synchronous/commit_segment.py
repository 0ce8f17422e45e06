"""CommitSegment: pull the snapshot of a finished segment from members that have it.

The members train on meanwhile. Of members that hold the same bits any one suffices; where the state
is divided among members, every part is pulled, and the parts become one blob.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from stratagem.common.base.ids import Digest
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.manifest import Limits
from stratagem.common.tensors.safetensors_file import header_bytes
from stratagem.coordinator.core.effects import CommitSegment
from stratagem.coordinator.core.facts import Member, PartyFailed, SegmentCommitted
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.synchronous.snapshot import from_any, pull_part, pull_snapshot
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.updates.members.merge_parts import (
    ContradictionError,
    StatePart,
    joined_rows,
    merged_manifest,
    write_merged,
)
from stratagem.coordinator.updates.members.merge_slices import are_sliced, joined_slices


async def commit_segment(env: EffectContext, effect: CommitSegment) -> None:
    """Make the segment's state durable and report SegmentCommitted."""
    if len(effect.parts) == 1:
        digest, manifest = await from_any(
            effect.parts[0],
            lambda member: pull_snapshot(env, _session(effect, member), effect.segment),
        )
        size_bytes = manifest.total_bytes
    else:
        try:
            pulls = [partial(_part, env, effect, members) for members in effect.parts]
            digest, size_bytes = await merged(env, pulls)
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


async def merged(
    env: EffectContext,
    pulls_of: Sequence[Callable[[], Awaitable[StatePart]]],
    *,
    joins_rows: bool = False,
) -> tuple[Digest, int]:
    """Pull all parts and write them as one blob; its digest and size in bytes.

    joins_rows: see `joined_rows`. Raises ContradictionError for parts that make no whole.
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
        return await env.in_thread(lambda: _write(env, parts, cancelled, joins_rows=joins_rows))
    finally:
        cancelled.set()
        for part in parts:
            part.data.close()


async def _part(
    env: EffectContext, effect: CommitSegment, members: tuple[Member, ...]
) -> StatePart:
    async with env.pulls:
        return await from_any(
            members, lambda member: pull_part(env, _session(effect, member), effect.segment)
        )


def _session(effect: CommitSegment, member: Member) -> WorkerSession:
    return WorkerSession(member, effect.run_id, effect.party, effect.membership)


def _write(
    env: EffectContext, parts: list[StatePart], cancelled: threading.Event, *, joins_rows: bool
) -> tuple[Digest, int]:
    limits = Limits(max_total_bytes=env.settings.max_state_bytes)
    manifests, sources = [part.manifest for part in parts], None
    if are_sliced(manifests):
        manifest, sources = joined_slices(manifests, limits)
    else:
        manifest = merged_manifest(manifests, limits)
    shown = joined_rows(manifest) if joins_rows else manifest
    writer = env.blobs.writer(len(header_bytes(shown)) + manifest.total_bytes)
    try:
        digest = write_merged(
            manifest, parts, writer, cancelled.is_set, described_as=shown, sources=sources
        )
    finally:
        writer.abort()
    return digest, manifest.total_bytes
