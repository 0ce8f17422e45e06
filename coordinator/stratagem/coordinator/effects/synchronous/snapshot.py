"""Pulls snapshots of sessions into the blob store: whole ones, or parts that make a whole."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import structlog

from stratagem.common.base.errors import StratagemError
from stratagem.common.base.ids import Digest
from stratagem.common.rpc.tensor_transfer import pull
from stratagem.common.tensors.chunks import Sink
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose
from stratagem.common.tensors.safetensors_file import header_bytes
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.store.blobs.blob_store import BlobWriter
from stratagem.coordinator.updates.members.merge_parts import StatePart
from stratagem.coordinator.updates.stream_offload import Offload

log = structlog.get_logger()
T = TypeVar("T")
Ask = Callable[[int], grpc.aio.UnaryStreamCall[Any, Any]]
"""Requests a stream of tensors from an offset on."""


async def from_any(members: tuple[Member, ...], pull_from: Callable[[Member], Awaitable[T]]) -> T:
    """Return the result of the first member that has it; raise the error of the last one when none
    has."""
    assert members, "nobody has the snapshot"
    for member in members[:-1]:
        try:
            return await pull_from(member)
        except StratagemError as error:
            log.info("no snapshot here", worker_id=member.worker_id, reason=str(error))
    return await pull_from(members[-1])


async def pull_snapshot(
    env: EffectContext, at: WorkerSession, segment: int, *, of_outputs: bool = False
) -> tuple[Digest, Manifest]:
    """Pull the snapshot that a member took at the end of a segment; it is durable in the store.

    of_outputs: pull what it has kept beside it instead.
    """
    writers: list[BlobWriter] = []

    def accept(manifest: Manifest) -> Callable[[bytes], None]:
        header = header_bytes(manifest)
        writer = env.blobs.writer(len(header) + manifest.total_bytes)
        writers.append(writer)
        writer.write(header)
        return writer.write

    try:
        link = env.links.to(at.member, env.state)
        ask = (link.outputs if of_outputs else link.snapshot)(at, segment)
        manifest = await _pull(env, ask, accept)
        digest = await env.in_thread(writers[0].commit)
    finally:
        for writer in writers:
            writer.abort()
    return digest, manifest


async def pull_part(
    env: EffectContext, at: WorkerSession, segment: int, *, of_outputs: bool = False
) -> StatePart:
    """Pull a member's part of the state at the end of a segment, into a scratch file of the
    caller's.

    of_outputs: pull what it has kept for the user's own metrics instead.
    """
    link = env.links.to(at.member, env.state)
    return await _scratched(env, (link.outputs if of_outputs else link.snapshot)(at, segment))


async def pull_kept(env: EffectContext, at: WorkerSession, segment: int) -> StatePart:
    """Pull the file in which a member has kept what it alone had at the end of a segment."""
    return await _scratched(env, env.links.to(at.member, env.state).kept(at, segment))


async def _scratched(env: EffectContext, ask: Ask) -> StatePart:
    scratch = env.blobs.scratch()
    try:
        manifest = await _pull(env, ask, lambda _: scratch.write)
    except BaseException:
        scratch.close()
        raise
    return StatePart(manifest, scratch)


async def _pull(
    env: EffectContext,
    ask: Ask,
    begin: Callable[[Manifest], Callable[[bytes], None]],
) -> Manifest:
    """Download into the sink that `begin` answers, which gets all bytes in order."""
    sinks: list[Callable[[bytes], None]] = []
    offload = Offload(lambda _offset, data: sinks[0](data))

    def accept(manifest: Manifest) -> Sink:
        sinks.append(begin(manifest))
        return offload.write

    try:
        manifest = await pull(
            ask,
            accept,
            limits=Limits(max_total_bytes=env.settings.max_state_bytes),
            purpose=Purpose.STATE,
            keep_up=offload.keep_up,
        )
        await offload.finish()
    finally:
        await offload.close()
    return manifest
