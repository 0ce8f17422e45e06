"""Has the members of a party write the leaves of a state of which each holds a part.

Members say the manifests of their parts, and the coordinator says of which pieces each leaf of the
whole is made, and who writes it: its writer gets what others hold from these. So no byte of the
state comes here, and the leaves are those of a state that was never divided.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from stratagem.common.base.errors import StratagemError
from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.manifest import Limits, Manifest
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.state_writing import leaves_in, may_see_leaves
from stratagem.coordinator.effects.synchronous.leaf_orders import (
    Order,
    ToldLeaves,
    begun_upload,
    described,
    order_of,
    written_leaves,
)
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.store.leaves.leaf_upload import DirectUpload
from stratagem.coordinator.updates.members.leaf_pieces import (
    PartPiece,
    PiecedLeaf,
    pieced_leaves,
    shared_out,
)
from stratagem.coordinator.updates.members.merge_slices import WholeState, whole_of
from stratagem.v1 import worker_pb2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the state, as a member has described it that holds it."""

    at: WorkerSession
    manifest: Manifest
    name: str
    """Of the snapshot that is the part."""


async def written_by_owners(
    env: EffectContext, parts: Sequence[Sequence[WorkerSession]], segment: int
) -> tuple[Digest, int] | None:
    """Return digest and size in bytes of the state whose parts the sessions hold, once it is
    durable in the store; None where states are files, or a part is with nobody that can write.

    parts: per part, the sessions any of which has it. Raises ContradictionError where the parts
    make no whole.
    """
    leaves = leaves_in(env)
    seeing = [[at for at in each if may_see_leaves(env, at.member)] for each in parts]
    if leaves is None or not all(seeing):
        return None
    with await begun_upload(env, leaves, seeing[0][0]) as upload:
        held = [await _described(env, each, leaves.store_id, upload, segment) for each in seeing]
        known = [part for part in held if part is not None]
        if len(known) < len(held):
            return None
        failpoint("coordinator.parts.described")
        limits = Limits(max_total_bytes=env.settings.max_state_bytes)
        manifests = [part.manifest for part in known]
        whole = await env.in_thread(lambda: whole_of(manifests, limits))
        pieced = await env.in_thread(lambda: _pieced(whole))
        told = ToldLeaves.of(whole.manifest, limits)
        orders = partial(_orders, env, _Divided(leaves.store_id, upload, segment, known, pieced))
        writers = [part.at for part in known]
        digest = await written_leaves(env, upload, writers, told, orders)
    return None if digest is None else (digest, whole.manifest.total_bytes)


def _pieced(whole: WholeState) -> dict[int, PiecedLeaf]:
    return dict(enumerate(pieced_leaves(whole.manifest, whole.sources)))


async def _described(
    env: EffectContext,
    holders: Sequence[WorkerSession],
    store_id: str,
    upload: DirectUpload,
    segment: int,
) -> _Part | None:
    """Return the part that these members hold, as the first of them describes it that can."""
    for at in holders:
        request = order_of(env, at, store_id, upload, segment)
        request.describe = True
        try:
            manifest, name = await described(env, at.member, request)
        except StratagemError as error:
            log.info("no part from here", worker_id=at.member.worker_id, reason=str(error))
            continue
        return _Part(at, manifest, name)
    return None


@dataclass(frozen=True, slots=True)
class _Divided:
    """What orders to write leaves of one divided state are made of."""

    store_id: str
    upload: DirectUpload
    segment: int
    parts: Sequence[_Part]
    leaves: dict[int, PiecedLeaf] = field(repr=False)


def _orders(
    env: EffectContext, divided: _Divided, writers: Sequence[WorkerSession], told: ToldLeaves
) -> list[Order]:
    """Share the leaves that are not told yet out among the members that write."""
    due = {n: leaf for n, leaf in divided.leaves.items() if n not in told.digests}
    ids = [at.member.worker_id for at in writers]
    held = [[n for n, p in enumerate(divided.parts) if p.at.member.worker_id == who] for who in ids]
    orders = []
    for at, numbers in zip(writers, shared_out(due, held), strict=True):
        if numbers:
            request = order_of(env, at, divided.store_id, divided.upload, divided.segment)
            _fill(env, request, divided, at.member.worker_id, {n: due[n] for n in numbers})
            orders.append(Order(at, request, numbers))
    return orders


def _fill(
    env: EffectContext,
    request: worker_pb2.WriteLeavesRequest,
    divided: _Divided,
    writer: WorkerId,
    leaves: dict[int, Sequence[PartPiece]],
) -> None:
    """Say of which pieces the leaves are made, and where these are."""
    for part in divided.parts:
        is_own = part.at.member.worker_id == writer
        address = "" if is_own else env.links.to(part.at.member, env.state).address
        request.holders.add(address=address, name=part.name)
    for number, pieces in leaves.items():
        leaf = request.leaves.add(number=number)
        for each in pieces:
            leaf.pieces.add(holder=each.part, offset=each.offset, size=each.size)
