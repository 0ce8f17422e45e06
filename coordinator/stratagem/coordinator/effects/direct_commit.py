"""The members of a party write the leaves of a state into the store directly, without sending its
bytes to the coordinator. A leaf is a content-addressed piece of a state.

If all members have the whole snapshot, each writes a numbered share of the leaves. If the state is
divided, the coordinator says of which pieces each leaf is made.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, Self

import grpc.aio
import structlog

from stratagem.common.base.errors import InvalidInputError, StratagemError, UnavailableError
from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.channel import write_message
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.rpc.streams import StallTimeout
from stratagem.common.tensors.leaves import leaves_of
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose, from_proto
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects.context import EffectContext, LeafSigning
from stratagem.coordinator.effects.execute import kept_states, leaves_in, may_write_leaves
from stratagem.coordinator.effects.snapshot import PartHolder
from stratagem.coordinator.runtime.links import WorkerSession
from stratagem.coordinator.runtime.supervisor import task_group
from stratagem.coordinator.store.leaves import DirectUpload, LeafBlobs
from stratagem.coordinator.updates.merge import (
    ContradictionError,
    PiecedLeaf,
    pieced_leaves,
    shared_out,
    whole_of,
)
from stratagem.v1 import worker_pb2

# ---- Orders ----
#
# Each member writes its leaves in one call, and reports the digest of each leaf once it is
# durable. When all leaves are there, the coordinator makes their list durable, which completes the
# state. A failure before that leaves only files that nothing names.
#
# Members that see the folder of states need nothing else. Members have no keys of an object
# store: inside the call they ask for a signed request for each leaf, whose name contains its
# digest.
#
# If a member fails, the others write its leaves. The sizes of the leaves are compared, and one
# leaf is read again: a wrong one reveals a worker that writes other bytes than it has.

NUM_IDLE_TIMEOUTS: Final = 4
"""Stream idle timeouts that a call may take: several, as a leaf takes longer than a chunk."""
_DIGEST_BYTES: Final = 32

log = structlog.get_logger()


@dataclass(slots=True)
class ReportedLeaves:
    """The leaves (stored pieces) of one state, with the digests that members have reported."""

    limits: Limits
    manifest: Manifest | None = None
    sizes: Sequence[int] = ()
    """The size of each leaf, in order."""
    digests: dict[int, Digest] = field(default_factory=dict)
    written: dict[WorkerId, dict[int, Digest]] = field(default_factory=dict)
    """The leaves that each member has newly written since leaves were last verified."""

    @classmethod
    def of(cls, manifest: Manifest, limits: Limits) -> Self:
        """Return an empty report for a state with a known manifest, of which members hold parts."""
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

    def begin(self, manifest: Manifest, worker_id: WorkerId) -> None:
        """Take the manifest that a member with the whole state sends; all must send the same."""
        if self.manifest is None:
            self.manifest, self.sizes = manifest, [leaf.size for leaf in leaves_of(manifest)]
        elif manifest != self.manifest:
            raise ContradictionError(f"worker {worker_id} has other tensors than other members")


def _checked(
    leaf: worker_pb2.WrittenLeaf | worker_pb2.AskedLeaf, numbers: Collection[int]
) -> tuple[int, Digest]:
    """Return number and digest of a reported leaf. Raises InvalidInputError for one not ordered."""
    if leaf.number not in numbers or len(leaf.digest) != _DIGEST_BYTES:
        raise InvalidInputError.at("leaf", f"{leaf.number} was not asked of this worker")
    return leaf.number, Digest(leaf.digest.hex())


@dataclass(frozen=True, slots=True)
class LeafOrder:
    """An order to one member to write some leaves, i.e. stored pieces, of a snapshot."""

    at: WorkerSession
    header: worker_pb2.WriteLeavesHeader
    numbers: Collection[int] | None = None
    """The numbers of the leaves to write; None if they follow from the rank in the header."""

    def numbers_of(self, num_leaves: int) -> Collection[int]:
        """Return the numbers of the leaves that this order covers, in a state of num_leaves."""
        if self.numbers is not None:
            return self.numbers
        return range(self.header.rank, num_leaves, self.header.num_ranks)


OrdersOf = Callable[[Sequence[WorkerSession], ReportedLeaves], Sequence[LeafOrder]]
"""Divides the leaves that no member has reported yet among members, with one order for each."""


async def written_leaves(
    env: EffectContext,
    upload: DirectUpload,
    writers: Sequence[WorkerSession],
    reported: ReportedLeaves,
    orders_of: OrdersOf,
) -> Digest | None:
    """Have members write all leaves of a state, and make the list of leaves durable. Return the
    digest of the state; None if every writer has failed."""
    while writers and not reported.is_complete:
        have = [bytes.fromhex(leaf) for leaf in sorted(upload.have | {*reported.digests.values()})]
        orders = orders_of(writers, reported)
        for order in orders:
            order.header.have.extend(have)
        failed = await _ask_all(env, orders, reported)
        failed += await asyncio.to_thread(lambda: _wrong(upload, reported))
        writers = [at for at in writers if at.member.worker_id not in failed]
    if not reported.is_complete:
        return None
    failpoint("coordinator.leaves.gathered")
    digests = [reported.digests[number] for number in range(reported.num_leaves)]
    return await asyncio.to_thread(lambda: upload.commit(reported.whole(), digests))


async def begun_upload(env: EffectContext, leaves: LeafBlobs, at: WorkerSession) -> DirectUpload:
    """Begin an upload of leaves; if the caller is cancelled meanwhile, the upload ends at once."""
    states = kept_states(env.runs, at.run_id)
    begun = asyncio.ensure_future(asyncio.to_thread(lambda: leaves.upload(states)))
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
    """Return an order to write the snapshot of a segment, without the numbers of leaves yet."""
    header = worker_pb2.WriteLeavesHeader(
        fence=env.workers.link(at.member).fence(at.membership),
        session=at.ref,
        snapshot=segment,
        store_id=store_id,
        upload=upload.name,
    )
    return LeafOrder(at, header)


async def _ask_all(
    env: EffectContext, orders: Sequence[LeafOrder], reported: ReportedLeaves
) -> list[WorkerId]:
    """Have each member write its leaves; return the workers that have failed."""
    failed: list[WorkerId] = []
    contradictions: list[ContradictionError] = []

    async def ask(order: LeafOrder) -> None:
        try:
            await _ask(env, order, reported)
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


async def _ask(env: EffectContext, order: LeafOrder, reported: ReportedLeaves) -> None:
    member = order.at.member
    written = reported.written.setdefault(member.worker_id, {})
    num_reported = 0

    def numbers() -> Collection[int]:
        return order.numbers_of(reported.num_leaves)

    def take(message: worker_pb2.WriteLeavesResponse) -> None:
        nonlocal num_reported
        if message.WhichOneof("message") == "manifest":
            if order.numbers is None:
                manifest = from_proto(message.manifest, reported.limits, Purpose.STATE)
                reported.begin(manifest, member.worker_id)
            return
        number, digest = _checked(message.leaf, numbers())
        reported.digests[number] = digest
        num_reported += 1
        if message.leaf.written:
            written[number] = digest

    await _call(env, member, order.header, take, numbers)
    if num_reported != len(numbers()):
        raise UnavailableError(f"worker {member.worker_id} has not written all of its leaves")


async def _call(
    env: EffectContext,
    member: Member,
    header: worker_pb2.WriteLeavesHeader,
    take: Callable[[worker_pb2.WriteLeavesResponse], None],
    numbers: Callable[[], Collection[int]],
) -> None:
    """Make one WriteLeaves call to its end, and sign the requests that the member asks for. take:
    called with each other message. numbers: returns the leaves that may be asked for."""
    stall_s = NUM_IDLE_TIMEOUTS * env.transfers.settings.stream_idle_timeout_s

    def silent(stall_s: float) -> Exception:
        text = f"worker {member.worker_id} has written no leaf for {stall_s:g} s"
        return UnavailableError(text)

    call: Any = env.workers.link(member).stub.WriteLeaves()
    signing = LeafSigning(call, worker_pb2.WriteLeavesRequest, partial(_signed, env, header.upload))
    try:
        async with StallTimeout(stall_s, silent) as peer:
            await call.wait_for_connection()
            await write_message(call, worker_pb2.WriteLeavesRequest(header=header))
            while True:
                with peer.waiting():
                    message = await call.read()
                if message is grpc.aio.EOF:
                    break
                if message.WhichOneof("message") != "asked":
                    take(message)
                    continue
                asked = [_checked(leaf, numbers()) for leaf in message.asked.leaves]
                await signing.answer([n for n, _ in asked], [leaf for _, leaf in asked])
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise UnavailableError(f"{code.name}: {await call.details()}")
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


def _signed(env: EffectContext, upload: str, leaves: Sequence[Digest]) -> Sequence[str]:
    """Return signed URLs with which a member may write these leaves of an upload."""
    blobs = leaves_in(env.transfers.blobs)
    if blobs is None or blobs.signs is None:
        raise InvalidInputError.at("message", "asks for signed requests, and there is a folder")
    return blobs.signs.signed_puts(leaves, upload)


def _wrong(upload: DirectUpload, reported: ReportedLeaves) -> list[WorkerId]:
    """Verify newly written leaves: compare all sizes, and read one leaf at random. Return the
    workers that wrote a wrong leaf, and discard all of their new leaves."""
    written = [(who, number) for who, leaves in reported.written.items() for number in leaves]
    if not written:
        return []
    sizes = {reported.written[who][number]: reported.sizes[number] for who, number in written}
    lacking = upload.lacking(sizes)
    worker_id, number = secrets.choice(written)
    leaf = reported.written[worker_id][number]
    if leaf not in lacking and not upload.check(leaf):
        lacking.add(leaf)
    wrong = [who for who, leaves in reported.written.items() if lacking & {*leaves.values()}]
    for who in wrong:
        leaf = min(lacking & {*reported.written[who].values()})
        log.error("a leaf has other bytes", worker_id=who, leaf=leaf)
        for number in reported.written[who]:
            reported.digests.pop(number, None)
    reported.written.clear()
    return wrong


# ---- Whole snapshots ----


async def written_by_members(
    env: EffectContext, sessions: Sequence[WorkerSession], segment: int
) -> tuple[Digest, Manifest] | None:
    """Have the sessions write their common snapshot into the store; return its digest and manifest.

    Return None if states are stored as files, or no member can write leaves. Raises
    ContradictionError if members hold different tensors.
    """
    leaves = leaves_in(env.transfers.blobs)
    if leaves is None:
        return None
    writers = [at for at in sessions if may_write_leaves(env.runs, leaves, at.member)]
    if not writers:
        return None
    with await begun_upload(env, leaves, sessions[0]) as upload:
        reported = ReportedLeaves(env.transfers.limits)
        orders = partial(_shares, env, leaves.store_id, upload, segment)
        digest = await written_leaves(env, upload, writers, reported, orders)
    return None if digest is None else (digest, reported.whole())


def _shares(
    env: EffectContext,
    store_id: str,
    upload: DirectUpload,
    segment: int,
    writers: Sequence[WorkerSession],
    _: ReportedLeaves,
) -> list[LeafOrder]:
    """Divide the leaves evenly by number among members, which all have the whole state."""
    orders = []
    for rank, at in enumerate(writers):
        order = order_of(env, at, store_id, upload, segment)
        order.header.rank, order.header.num_ranks = rank, len(writers)
        orders.append(order)
    return orders


# ---- Divided states ----
#
# Members send the manifests of their parts. The coordinator determines of which pieces each leaf
# of the whole is made and who writes it; the writer gets the missing pieces from the members that
# hold them. No byte of the state comes to the coordinator, and the leaves are those of a state
# that was never divided.


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a divided state, and per worker the session and snapshot name under which the
    worker has it."""

    manifest: Manifest
    sources: Mapping[WorkerId, tuple[WorkerSession, str]]


async def written_by_owners(
    env: EffectContext, parts: Sequence[Sequence[PartHolder]], segment: int
) -> tuple[Digest, int] | None:
    """Have the holders of a divided state write it into the store; return its digest and size in
    bytes.

    parts: the holders of each part. Return None if states are stored as files, or no holder of some
    part can write. Raises ContradictionError if the parts make no whole.
    """
    leaves = leaves_in(env.transfers.blobs)
    if leaves is None:
        return None
    able = [
        [it for it in part if may_write_leaves(env.runs, leaves, it.at.member)] for part in parts
    ]
    if not all(able):
        return None
    sessions = {it.at.member.worker_id: it.at for part in able for it in part}
    with await begun_upload(env, leaves, able[0][0].at) as upload:
        order = partial(order_of, env, store_id=leaves.store_id, upload=upload, segment=segment)
        asked = (_described(env, order(at)) for at in sessions.values())
        described = dict(zip(sessions, await asyncio.gather(*asked), strict=True))
        candidates = (_part_of(holders, described) for holders in able)
        present = [part for part in candidates if part is not None]
        if len(present) < len(able):
            return None
        failpoint("coordinator.parts.described")
        limits = env.transfers.limits
        manifests = [part.manifest for part in present]
        whole = await asyncio.to_thread(lambda: whole_of(manifests, limits))
        pieced = await asyncio.to_thread(lambda: dict(enumerate(pieced_leaves(*whole))))
        reported = ReportedLeaves.of(whole.manifest, limits)
        orders = partial(_orders, env, _Divided(order, present, pieced))
        writers = [at for who, at in sessions.items() if described[who]]
        digest = await written_leaves(env, upload, writers, reported, orders)
    return None if digest is None else (digest, whole.manifest.total_bytes)


class DescribedPart(NamedTuple):
    """A part of a state, as its holder describes it. name: the name of its snapshot."""

    manifest: Manifest
    name: str
    of_mirror: bool


async def _described(env: EffectContext, order: LeafOrder) -> list[DescribedPart]:
    """Ask a member to describe its parts; return them, or an empty list if the call fails."""
    limits = env.transfers.limits
    parts: list[DescribedPart] = []

    def take(message: worker_pb2.WriteLeavesResponse) -> None:
        manifest = from_proto(message.manifest, limits, Purpose.STATE)
        if message.name and len(parts) < 2:
            parts.append(DescribedPart(manifest, message.name, message.of_mirror))

    order.header.describe = True
    try:
        await _call(env, order.at.member, order.header, take, tuple)
    except StratagemError as error:
        log.info("no part from here", worker_id=order.at.member.worker_id, reason=str(error))
        return []
    return parts


def _part_of(
    holders: Sequence[PartHolder], described: Mapping[WorkerId, Sequence[DescribedPart]]
) -> _Part | None:
    """Return a part with the holders that have described it; None if no holder has."""
    candidates = [
        (holder.at, part)
        for holder in holders
        for part in described[holder.at.member.worker_id]
        if part.of_mirror == holder.of_mirror
    ]
    if not candidates:
        return None
    manifest = candidates[0][1].manifest
    alike = [(at, part.name) for at, part in candidates if part.manifest == manifest]
    if len(alike) < len(candidates):
        log.warning("a mirror of a part has other tensors, and is left out")
    return _Part(manifest, {at.member.worker_id: (at, name) for at, name in alike})


@dataclass(frozen=True, slots=True)
class _Divided:
    """The parts and leaves of one divided state, from which orders are made."""

    order: Callable[[WorkerSession], LeafOrder]
    parts: Sequence[_Part]
    leaves: Mapping[int, PiecedLeaf] = field(repr=False)


def _orders(
    env: EffectContext,
    divided: _Divided,
    writers: Sequence[WorkerSession],
    reported: ReportedLeaves,
) -> list[LeafOrder]:
    """Return orders for the leaves not reported yet, with the pieces that each is made of."""
    due = {n: leaf for n, leaf in divided.leaves.items() if n not in reported.digests}
    ids = [at.member.worker_id for at in writers]
    parts_of = [[n for n, part in enumerate(divided.parts) if who in part.sources] for who in ids]
    orders = []
    for at, numbers in zip(writers, shared_out(due, parts_of), strict=True):
        if not numbers:
            continue
        order = replace(divided.order(at), numbers=numbers)
        for part in divided.parts:
            order.header.holders.append(_holder(env, part, at, ids))
        for number in numbers:
            leaf = order.header.leaves.add(number=number)
            for piece in due[number]:
                leaf.pieces.add(holder=piece.part, offset=piece.offset, size=piece.size)
        orders.append(order)
    return orders


def _holder(
    env: EffectContext, part: _Part, writer: WorkerSession, writing: Collection[WorkerId]
) -> worker_pb2.PartHolder:
    """Return the member that gives a writer a part: the writer itself, else one that has not
    failed, if any."""
    here = part.sources.get(writer.member.worker_id)
    if here is not None:
        return worker_pb2.PartHolder(name=here[1])
    good = [source for who, source in part.sources.items() if who in writing]
    at, name = (good or list(part.sources.values()))[0]
    return worker_pb2.PartHolder(address=env.workers.link(at.member).address, name=name)
