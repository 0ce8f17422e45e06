"""The members of a party write the leaves of a state into the store directly, without sending its
bytes to the coordinator.

Where all members have the whole snapshot, each writes a numbered share of the leaves. Where the
state is divided, the coordinator says of which pieces each leaf is made.
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
from stratagem.coordinator.store.leaf_objects import LeafObjects
from stratagem.coordinator.store.leaves import DirectUpload, LeafBlobs
from stratagem.coordinator.updates.merge import (
    ContradictionError,
    PiecedLeaf,
    WholeState,
    pieced_leaves,
    shared_out,
    whole_of,
)
from stratagem.v1 import worker_pb2

# ---- Calls ----
#
# A member writes its share of the leaves in one call.
#
# Members that see the folder of states need nothing else. Members have no keys of an object
# store: inside the call they ask for a signed request for each leaf, whose name contains its
# digest.

LeafMessage = worker_pb2.WriteLeavesResponse | worker_pb2.PutLeavesResponse


class LeafCall:
    """One call, its messages and the requests that are signed in it."""

    def __init__(
        self, stub: Any, request: worker_pb2.WriteLeavesRequest, signs: LeafObjects | None
    ) -> None:
        """signs: where leaves are objects."""
        self._request = request
        self._call: Any = stub.WriteLeaves(request) if signs is None else stub.PutLeaves()
        self._signing: LeafSigning | None = None
        if signs is not None:
            self._signing = LeafSigning(
                self._call,
                worker_pb2.PutLeavesRequest,
                lambda leaves: signs.signed_puts(leaves, request.upload),
            )

    async def begin(self) -> None:
        """Send the request, where it is the first message of a stream."""
        if self._signing is not None:
            await self._call.wait_for_connection()
            await write_message(self._call, worker_pb2.PutLeavesRequest(header=self._request))

    async def read(self) -> Any:
        """Return the next message; None at a good end. Raises AioRpcError, or UnavailableError for
        an end that is not good."""
        message = await self._call.read()
        if message is not grpc.aio.EOF:
            return message
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise UnavailableError(f"{code.name}: {await self._call.details()}")
        return None

    async def sign(self, asked: Sequence[worker_pb2.AskedLeaf]) -> None:
        """Send a signed request for each leaf that is asked for, which the caller has checked.
        Raises LimitError for too many, and InvalidInputError where there is a folder."""
        if self._signing is None:
            raise InvalidInputError.at("message", "asks for signed requests, and there is a folder")
        leaves = [Digest(leaf.digest.hex()) for leaf in asked]
        await self._signing.answer([leaf.number for leaf in asked], leaves)

    def cancel(self) -> None:
        """End the call; does nothing to one that has ended."""
        self._call.cancel()


# ---- Orders ----
#
# Each member writes the leaves that it is asked for, and reports the digest of each leaf once it
# is durable. When all leaves are there, the coordinator makes their list durable, which completes
# the state. A failure before that leaves only files that nothing names.
#
# What a member can no longer do, the others do. The sizes of the leaves are compared, and one
# leaf is read again: a wrong one reveals a worker that writes other bytes than it has.

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
        failed += await asyncio.to_thread(lambda: _wrong(upload, told))
        writers = [at for at in writers if at.member.worker_id not in failed]
    if not told.is_complete:
        return None
    failpoint("coordinator.leaves.gathered")
    return await asyncio.to_thread(lambda: upload.commit(told.whole(), told.in_order()))


async def begun_upload(env: EffectContext, leaves: LeafBlobs, at: WorkerSession) -> DirectUpload:
    """Begin an upload; one that nobody waits for any more ends at once."""
    kept = kept_states(env.runs, at.run_id)
    begun = asyncio.ensure_future(asyncio.to_thread(lambda: leaves.upload(kept)))
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
        fence=env.workers.link(at.member).fence(at.membership),
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
    limits = env.transfers.limits
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
    stall_s = NUM_IDLE_TIMEOUTS * env.transfers.settings.stream_idle_timeout_s
    leaves = leaves_in(env.transfers.blobs)
    signs = None if leaves is None else leaves.signs
    call = LeafCall(env.workers.link(member).stub, request, signs)
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


# ---- Whole snapshots ----


async def written_by_members(
    env: EffectContext, sessions: Sequence[WorkerSession], segment: int
) -> tuple[Digest, Manifest] | None:
    """Return digest and manifest of a snapshot that the sessions have, once it is durable in the
    store; None where states are files, or no member can write leaves.

    Raises ContradictionError where members hold other tensors than others.
    """
    leaves = leaves_in(env.transfers.blobs)
    if leaves is None:
        return None
    writers = [at for at in sessions if may_write_leaves(env.runs, leaves, at.member)]
    if not writers:
        return None
    with await begun_upload(env, leaves, sessions[0]) as upload:
        told = ToldLeaves(env.transfers.limits)
        orders = partial(_shares, env, leaves.store_id, upload, segment)
        digest = await written_leaves(env, upload, writers, told, orders)
    return None if digest is None else (digest, told.whole())


def _shares(
    env: EffectContext,
    store_id: str,
    upload: DirectUpload,
    segment: int,
    writers: Sequence[WorkerSession],
    _: ToldLeaves,
) -> list[LeafOrder]:
    """Give each member its share by number, of a state that all of them have."""
    orders = []
    for rank, at in enumerate(writers):
        order = order_of(env, at, store_id, upload, segment)
        order.request.rank, order.request.num_ranks = rank, len(writers)
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
    """A part of the state, and who has it under which name of a snapshot."""

    manifest: Manifest
    sources: Mapping[WorkerId, tuple[WorkerSession, str]]


async def written_by_owners(
    env: EffectContext, parts: Sequence[Sequence[PartHolder]], segment: int
) -> tuple[Digest, int] | None:
    """Return digest and size in bytes of the state whose parts these members hold, once it is
    durable in the store; None where states are files, or a part is with nobody that can write.

    parts: per part, the members any of which has it. Raises ContradictionError where the parts
    make no whole.
    """
    leaves = leaves_in(env.transfers.blobs)
    if leaves is None:
        return None
    able = [
        [each for each in part if may_write_leaves(env.runs, leaves, each.at.member)]
        for part in parts
    ]
    if not all(able):
        return None
    sessions = {each.at.member.worker_id: each.at for part in able for each in part}
    with await begun_upload(env, leaves, able[0][0].at) as upload:
        order = partial(order_of, env, store_id=leaves.store_id, upload=upload, segment=segment)
        asked = (_described(env, order(at)) for at in sessions.values())
        said = dict(zip(sessions, await asyncio.gather(*asked), strict=True))
        held = [_part_of(holders, said) for holders in able]
        known = [part for part in held if part is not None]
        if len(known) < len(held):
            return None
        failpoint("coordinator.parts.described")
        limits = env.transfers.limits
        manifests = [part.manifest for part in known]
        whole = await asyncio.to_thread(lambda: whole_of(manifests, limits))
        pieced = await asyncio.to_thread(lambda: _pieced(whole))
        told = ToldLeaves.of(whole.manifest, limits)
        orders = partial(_orders, env, _Divided(order, known, pieced))
        writers = [at for who, at in sessions.items() if said[who]]
        digest = await written_leaves(env, upload, writers, told, orders)
    return None if digest is None else (digest, whole.manifest.total_bytes)


def _pieced(whole: WholeState) -> dict[int, PiecedLeaf]:
    return dict(enumerate(pieced_leaves(whole.manifest, whole.sources)))


async def _described(env: EffectContext, order: LeafOrder) -> list[DescribedPart]:
    """Return the parts that a member has; none where it does not say."""
    order.request.describe = True
    try:
        return await described_parts(env, order.at.member, order.request)
    except StratagemError as error:
        log.info("no part from here", worker_id=order.at.member.worker_id, reason=str(error))
        return []


def _part_of(
    holders: Sequence[PartHolder], said: Mapping[WorkerId, Sequence[DescribedPart]]
) -> _Part | None:
    """Return a part with those of its holders that have described it; None where none has."""
    found = [
        (holder.at, part)
        for holder in holders
        for part in said[holder.at.member.worker_id]
        if part.of_mirror == holder.of_mirror
    ]
    if not found:
        return None
    manifest = found[0][1].manifest
    alike = [(at, part.name) for at, part in found if part.manifest == manifest]
    if len(alike) < len(found):
        log.warning("a mirror of a part has other tensors, and is left out")
    return _Part(manifest, {at.member.worker_id: (at, name) for at, name in alike})


@dataclass(frozen=True, slots=True)
class _Divided:
    """What orders to write leaves of one divided state are made of."""

    order: Callable[[WorkerSession], LeafOrder]
    parts: Sequence[_Part]
    leaves: Mapping[int, PiecedLeaf] = field(repr=False)


def _orders(
    env: EffectContext, divided: _Divided, writers: Sequence[WorkerSession], told: ToldLeaves
) -> list[LeafOrder]:
    """Share the leaves that are not told yet out among the members that write."""
    due = {n: leaf for n, leaf in divided.leaves.items() if n not in told.digests}
    ids = [at.member.worker_id for at in writers]
    held = [[n for n, part in enumerate(divided.parts) if who in part.sources] for who in ids]
    orders = []
    for at, numbers in zip(writers, shared_out(due, held), strict=True):
        if not numbers:
            continue
        order = replace(divided.order(at), numbers=numbers)
        for part in divided.parts:
            order.request.holders.append(_holder(env, part, at, ids))
        for number in numbers:
            leaf = order.request.leaves.add(number=number)
            for piece in due[number]:
                leaf.pieces.add(holder=piece.part, offset=piece.offset, size=piece.size)
        orders.append(order)
    return orders


def _holder(
    env: EffectContext, part: _Part, writer: WorkerSession, writing: Collection[WorkerId]
) -> worker_pb2.PartHolder:
    """Return from whom a writer gets a part: itself, else one that has not failed, if any."""
    own = part.sources.get(writer.member.worker_id)
    if own is not None:
        return worker_pb2.PartHolder(name=own[1])
    good = [source for who, source in part.sources.items() if who in writing]
    at, name = (good or list(part.sources.values()))[0]
    return worker_pb2.PartHolder(address=env.workers.link(at.member).address, name=name)
