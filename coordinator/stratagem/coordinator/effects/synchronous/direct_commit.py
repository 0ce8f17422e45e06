"""Has the members of a party write the leaves of a snapshot into the store by themselves.

Each writes its share, and says the digest of each leaf when it is durable. When all leaves are
there the coordinator makes the list of them durable, and with it the state is there: whoever dies
before that leaves files that nothing names. What a member cannot do any more, the others do. One
leaf is read again: a wrong one shows a worker that writes other bytes than it has.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio
import structlog

from stratagem.common.base.errors import InvalidInputError, StratagemError, UnavailableError
from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.stall_timeout import StallTimeout
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose, from_proto
from stratagem.common.tensors.state_leaves import leaves_of
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.state_writing import (
    kept_states,
    leaves_in,
    may_see_leaves,
)
from stratagem.coordinator.runtime.tasks.task_group import task_group
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.store.leaves.leaf_blobs import LeafBlobs
from stratagem.coordinator.store.leaves.leaf_upload import DirectUpload
from stratagem.coordinator.updates.members.merge_parts import ContradictionError
from stratagem.v1 import worker_pb2

NUM_IDLE_TIMEOUTS: Final = 4
"""Of a stream: a leaf takes longer than a chunk."""
_DIGEST_BYTES: Final = 32

log = structlog.get_logger()


async def written_by_members(
    env: EffectContext, sessions: Sequence[WorkerSession], segment: int
) -> tuple[Digest, Manifest] | None:
    """Return digest and manifest of a snapshot that the sessions have, once it is durable in the
    store; None where states are files, or no member can write leaves.

    Raises ContradictionError where members hold other tensors than others.
    """
    leaves = leaves_in(env)
    writers = [at for at in sessions if may_see_leaves(env, at.member)]
    if leaves is None or not writers:
        return None
    with await _begun(env, leaves, sessions[0]) as upload:
        told = _Told(Limits(max_total_bytes=env.settings.max_state_bytes))
        while writers and not told.is_complete:
            failed = await _ask_all(env, _Asked(leaves.store_id, upload, segment), writers, told)
            failed += await env.in_thread(lambda: _wrong(upload, told))
            writers = [at for at in writers if at.member.worker_id not in failed]
        if not told.is_complete:
            return None
        failpoint("coordinator.leaves.gathered")
        manifest = told.whole()
        digest = await env.in_thread(lambda: upload.commit(manifest, told.in_order()))
    return digest, manifest


@dataclass(slots=True)
class _Told:
    """What members have said about the leaves of one state."""

    limits: Limits
    manifest: Manifest | None = None
    num_leaves: int = 0
    digests: dict[int, Digest] = field(default_factory=dict)
    written: dict[WorkerId, dict[int, Digest]] = field(default_factory=dict)
    """What each member has written now, of what has not been read again."""

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None and len(self.digests) == self.num_leaves

    def whole(self) -> Manifest:
        assert self.manifest is not None
        return self.manifest

    def in_order(self) -> list[Digest]:
        return [self.digests[number] for number in range(self.num_leaves)]

    def begin(self, manifest: Manifest, worker_id: WorkerId) -> None:
        if self.manifest is None:
            self.manifest, self.num_leaves = manifest, len(leaves_of(manifest))
        elif manifest != self.manifest:
            raise ContradictionError(f"worker {worker_id} has other tensors than other members")

    def add(self, leaf: worker_pb2.WrittenLeaf, asked: worker_pb2.WriteLeavesRequest) -> Digest:
        """Check and take in one leaf; return its digest."""
        is_asked = leaf.number % asked.num_ranks == asked.rank and leaf.number < self.num_leaves
        if not is_asked or len(leaf.digest) != _DIGEST_BYTES:
            raise InvalidInputError.at("leaf", f"{leaf.number} was not asked of rank {asked.rank}")
        digest = self.digests[leaf.number] = Digest(leaf.digest.hex())
        return digest


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is the same for all members that are asked."""

    store_id: str
    upload: DirectUpload
    segment: int


async def _begun(env: EffectContext, leaves: LeafBlobs, at: WorkerSession) -> DirectUpload:
    """Begin an upload; one that nobody waits for any more ends at once."""
    kept = kept_states(env, at.run_id)
    begun = asyncio.ensure_future(env.in_thread(lambda: leaves.upload(kept)))
    try:
        return await asyncio.shield(begun)
    except asyncio.CancelledError:
        begun.add_done_callback(_end)
        raise


def _end(begun: asyncio.Future[DirectUpload]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result().end()


async def _ask_all(
    env: EffectContext, asked: _Asked, writers: Sequence[WorkerSession], told: _Told
) -> list[WorkerId]:
    """Have each member write its share; return those that have not."""
    failed: list[WorkerId] = []
    contradictions: list[ContradictionError] = []
    have = [bytes.fromhex(leaf) for leaf in sorted(asked.upload.have | {*told.digests.values()})]

    async def ask(rank: int, at: WorkerSession) -> None:
        request = worker_pb2.WriteLeavesRequest(
            fence=env.links.to(at.member, env.state).fence(at.membership),
            session=at.ref,
            snapshot=asked.segment,
            store_id=asked.store_id,
            upload=asked.upload.name,
            rank=rank,
            num_ranks=len(writers),
            have=have,
        )
        try:
            await _ask(env, at.member, request, told)
        except ContradictionError as error:
            contradictions.append(error)
        except StratagemError as error:
            worker_id = at.member.worker_id
            log.info("no leaves from here", worker_id=worker_id, reason=str(error))
            failed.append(worker_id)

    async with task_group() as group:
        for rank, at in enumerate(writers):
            group.create_task(ask(rank, at))
    if contradictions:
        raise contradictions[0]
    return failed


async def _ask(
    env: EffectContext, member: Member, request: worker_pb2.WriteLeavesRequest, told: _Told
) -> None:
    stall_s = NUM_IDLE_TIMEOUTS * env.settings.stream_idle_timeout_s
    call: Any = env.links.to(member, env.state).stub.WriteLeaves(request)
    written = told.written.setdefault(member.worker_id, {})
    num_told = 0
    try:
        async with StallTimeout(stall_s, _is_silent(member)) as peer:
            while True:
                with peer.waiting():
                    message = await call.read()
                if message is grpc.aio.EOF:
                    break
                if message.WhichOneof("message") == "manifest":
                    manifest = from_proto(message.manifest, told.limits, Purpose.STATE)
                    told.begin(manifest, member.worker_id)
                    continue
                digest = told.add(message.leaf, request)
                num_told += 1
                if message.leaf.written:
                    written[message.leaf.number] = digest
        await _end_of(call)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
    if num_told != len(range(request.rank, told.num_leaves, request.num_ranks)):
        raise UnavailableError(f"worker {member.worker_id} has not written all of its leaves")


async def _end_of(call: Any) -> None:
    """Raise UnavailableError where a stream has not ended well."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise UnavailableError(f"{code.name}: {await call.details()}")


def _is_silent(member: Member) -> Callable[[float], Exception]:
    return lambda stall_s: UnavailableError(
        f"worker {member.worker_id} has written no leaf for {stall_s:g} s"
    )


def _wrong(upload: DirectUpload, told: _Told) -> list[WorkerId]:
    """Read one of the leaves that were written now; where it has other bytes, forget all that its
    worker has written, and return the worker."""
    written = [(who, number) for who, leaves in told.written.items() for number in leaves]
    if not written:
        return []
    worker_id, number = secrets.choice(written)
    leaves = told.written[worker_id]
    is_right = upload.check(leaves[number])
    if not is_right:
        log.error("a leaf has other bytes", worker_id=worker_id, leaf=leaves[number])
        for each in leaves:
            told.digests.pop(each, None)
    told.written.clear()
    return [] if is_right else [worker_id]
