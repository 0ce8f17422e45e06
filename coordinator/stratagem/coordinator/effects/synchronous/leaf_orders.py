"""Has members write leaves of a state into the store by themselves.

Each writes those that it is asked for, and says the digest of each leaf when it is durable. When
all leaves are there the coordinator makes the list of them durable, and with it the state is there:
whoever dies before that leaves files that nothing names. What a member cannot do any more, the
others do. Their sizes are compared, and one leaf is read again: a wrong one shows a worker that
writes other bytes than it has. A folder is seen by members; for a leaf of an object store a member
asks inside its call for a signed request.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import grpc.aio
import structlog

from stratagem.common.base.errors import InvalidInputError, StratagemError, UnavailableError
from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.rpc.streams import StallTimeout
from stratagem.common.tensors.leaves import leaves_of
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose, from_proto
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.leaf_call import LeafCall, LeafMessage
from stratagem.coordinator.effects.execution.state_writing import kept_states, leaves_in
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


@dataclass(slots=True)
class ToldLeaves:
    """What members have said about the leaves of one state."""

    limits: Limits
    manifest: Manifest | None = None
    sizes: Sequence[int] = ()
    """Of the leaves, in order."""
    digests: dict[int, Digest] = field(default_factory=dict)
    written: dict[WorkerId, dict[int, Digest]] = field(default_factory=dict)
    """What each member has written now, of what has not been read again."""

    @classmethod
    def of(cls, manifest: Manifest, limits: Limits) -> Self:
        """Begin with a state that is known, of which members hold parts."""
        return cls(limits, manifest, [leaf.size for leaf in leaves_of(manifest)])

    @property
    def num_leaves(self) -> int:
        return len(self.sizes)

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
            self.manifest, self.sizes = manifest, [leaf.size for leaf in leaves_of(manifest)]
        elif manifest != self.manifest:
            raise ContradictionError(f"worker {worker_id} has other tensors than other members")

    def add(self, leaf: worker_pb2.WrittenLeaf, asked: Collection[int]) -> Digest:
        """Check and take in one leaf; return its digest."""
        _check_leaf(leaf, asked)
        digest = self.digests[leaf.number] = Digest(leaf.digest.hex())
        return digest


def _check_leaf(
    leaf: worker_pb2.WrittenLeaf | worker_pb2.AskedLeaf, asked: Collection[int]
) -> None:
    if leaf.number not in asked or len(leaf.digest) != _DIGEST_BYTES:
        raise InvalidInputError.at("leaf", f"{leaf.number} was not asked of this worker")


@dataclass(frozen=True, slots=True)
class LeafOrder:
    """What one member is asked to write."""

    at: WorkerSession
    request: worker_pb2.WriteLeavesRequest
    numbers: Collection[int] | None = None
    """Of the leaves; None where they follow from the rank that the request names."""

    def asked(self, num_leaves: int) -> Collection[int]:
        """Return the numbers of the leaves, of so many that there are."""
        if self.numbers is not None:
            return self.numbers
        return range(self.request.rank, num_leaves, self.request.num_ranks)


OrdersOf = Callable[[Sequence[WorkerSession], ToldLeaves], Sequence[LeafOrder]]
"""Returns what is asked of members that write, for all that has not been told yet."""


async def written_leaves(
    env: EffectContext,
    upload: DirectUpload,
    writers: Sequence[WorkerSession],
    told: ToldLeaves,
    orders_of: OrdersOf,
) -> Digest | None:
    """Have members write all leaves of a state, and make the list of them durable; return the
    digest of the state, or None where no member is left that can write."""
    while writers and not told.is_complete:
        have = [bytes.fromhex(leaf) for leaf in sorted(upload.have | {*told.digests.values()})]
        orders = orders_of(writers, told)
        for order in orders:
            order.request.have.extend(have)
        failed = await _ask_all(env, orders, told)
        failed += await env.in_thread(lambda: _wrong(upload, told))
        writers = [at for at in writers if at.member.worker_id not in failed]
    if not told.is_complete:
        return None
    failpoint("coordinator.leaves.gathered")
    return await env.in_thread(lambda: upload.commit(told.whole(), told.in_order()))


async def begun_upload(env: EffectContext, leaves: LeafBlobs, at: WorkerSession) -> DirectUpload:
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


def order_of(
    env: EffectContext, at: WorkerSession, store_id: str, upload: DirectUpload, segment: int
) -> LeafOrder:
    """Return an order about a snapshot that names no leaves yet."""
    request = worker_pb2.WriteLeavesRequest(
        fence=env.links.to(at.member, env.state).fence(at.membership),
        session=at.ref,
        snapshot=segment,
        store_id=store_id,
        upload=upload.name,
    )
    return LeafOrder(at, request)


async def _ask_all(
    env: EffectContext, orders: Sequence[LeafOrder], told: ToldLeaves
) -> list[WorkerId]:
    """Have each member write what it is asked for; return those that have not."""
    failed: list[WorkerId] = []
    contradictions: list[ContradictionError] = []

    async def ask(order: LeafOrder) -> None:
        try:
            await _ask(env, order, told)
        except ContradictionError as error:
            contradictions.append(error)
        except StratagemError as error:
            worker_id = order.at.member.worker_id
            log.info("no leaves from here", worker_id=worker_id, reason=str(error))
            failed.append(worker_id)

    async with task_group() as group:
        for order in orders:
            group.create_task(ask(order))
    if contradictions:
        raise contradictions[0]
    return failed


async def _ask(env: EffectContext, order: LeafOrder, told: ToldLeaves) -> None:
    member = order.at.member
    written = told.written.setdefault(member.worker_id, {})
    num_told = 0

    def take(message: LeafMessage) -> None:
        nonlocal num_told
        if message.WhichOneof("message") == "manifest":
            if order.numbers is None:
                manifest = from_proto(message.manifest, told.limits, Purpose.STATE)
                told.begin(manifest, member.worker_id)
            return
        digest = told.add(message.leaf, order.asked(told.num_leaves))
        num_told += 1
        if message.leaf.written:
            written[message.leaf.number] = digest

    await _call(env, member, order.request, take, lambda: order.asked(told.num_leaves))
    if num_told != len(order.asked(told.num_leaves)):
        raise UnavailableError(f"worker {member.worker_id} has not written all of its leaves")


class DescribedPart(NamedTuple):
    """A part of a state as the member that has it describes it; name: of the snapshot that it
    is."""

    manifest: Manifest
    name: str
    of_mirror: bool


async def described_parts(
    env: EffectContext, member: Member, request: worker_pb2.WriteLeavesRequest
) -> list[DescribedPart]:
    """Return what a member has of the snapshot that a request is about."""
    limits = Limits(max_total_bytes=env.settings.max_state_bytes)
    found: list[DescribedPart] = []

    def take(message: LeafMessage) -> None:
        manifest = from_proto(message.manifest, limits, Purpose.STATE)
        if message.name and len(found) < 2:
            found.append(DescribedPart(manifest, message.name, message.of_mirror))

    await _call(env, member, request, take, tuple)
    return found


async def _call(
    env: EffectContext,
    member: Member,
    request: worker_pb2.WriteLeavesRequest,
    take: Callable[[LeafMessage], None],
    asked: Callable[[], Collection[int]],
) -> None:
    """Make a call to its end; asked: which leaves are asked for, of which requests are signed."""
    stall_s = NUM_IDLE_TIMEOUTS * env.settings.stream_idle_timeout_s
    leaves = leaves_in(env)
    signs = None if leaves is None else leaves.signs
    call = LeafCall(env.links.to(member, env.state).stub, request, signs)
    try:
        async with StallTimeout(stall_s, _is_silent(member)) as peer:
            await call.begin()
            while True:
                with peer.waiting():
                    message = await call.read()
                if message is None:
                    break
                if message.WhichOneof("message") != "asked":
                    take(message)
                    continue
                for leaf in message.asked.leaves:
                    _check_leaf(leaf, asked())
                await call.sign(message.asked.leaves)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


def _is_silent(member: Member) -> Callable[[float], Exception]:
    return lambda stall_s: UnavailableError(
        f"worker {member.worker_id} has written no leaf for {stall_s:g} s"
    )


def _wrong(upload: DirectUpload, told: ToldLeaves) -> list[WorkerId]:
    """Compare the sizes of the leaves that were written now, and read one of them; where one has
    other bytes, forget all that its worker has written, and return such workers."""
    written = [(who, number) for who, leaves in told.written.items() for number in leaves]
    if not written:
        return []
    sizes = {told.written[who][number]: told.sizes[number] for who, number in written}
    lacking = upload.lacking(sizes)
    worker_id, number = secrets.choice(written)
    leaf = told.written[worker_id][number]
    if leaf not in lacking and not upload.check(leaf):
        lacking.add(leaf)
    wrong = [who for who, leaves in told.written.items() if lacking & {*leaves.values()}]
    for who in wrong:
        leaf = min(lacking & {*told.written[who].values()})
        log.error("a leaf has other bytes", worker_id=who, leaf=leaf)
        for each in told.written[who]:
            told.digests.pop(each, None)
    told.written.clear()
    return wrong
