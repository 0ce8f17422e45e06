"""Pulls a snapshot of a session into the blob store."""

from stratagem.common.ids import Digest
from stratagem.common.tensors.chunks import Sink
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose
from stratagem.common.tensors.safefile import header_bytes
from stratagem.common.tensors.transfer import pull
from stratagem.coordinator.blobs import BlobWriter
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects.env import Env
from stratagem.coordinator.offload import Offload
from stratagem.v1 import types_pb2, worker_pb2


async def pull_snapshot(
    env: Env, member: Member, session_ref: types_pb2.SessionRef, membership: int, segment: int
) -> tuple[Digest, Manifest]:
    """The snapshot that a member took at the end of a segment, durable in the store."""
    link = env.links.to(member, env.state)
    writers: list[BlobWriter] = []
    offload = Offload(lambda _offset, data: writers[0].write(data))

    def accept(manifest: Manifest) -> Sink:
        header = header_bytes(manifest)
        writer = env.blobs.writer(len(header) + manifest.total_bytes)
        writers.append(writer)
        writer.write(header)
        return offload.write

    def request(offset: int) -> worker_pb2.GetStateRequest:
        return worker_pb2.GetStateRequest(
            fence=link.fence(membership), session=session_ref, snapshot=segment, offset=offset
        )

    try:
        manifest = await pull(
            lambda offset: link.stub.GetState(request(offset)),
            accept,
            limits=Limits(max_total_bytes=env.settings.max_state_bytes),
            purpose=Purpose.STATE,
            keep_up=offload.keep_up,
        )
        await offload.finish()
        digest = await env.in_thread(writers[0].commit)
    finally:
        await offload.close()
        for writer in writers:
            writer.abort()
    return digest, manifest
