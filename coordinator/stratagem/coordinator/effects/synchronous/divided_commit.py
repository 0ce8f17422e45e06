"""Has the members of a party write the leaves of a state of which each holds a part.

Members say the manifests of their parts, and the coordinator says of which pieces each leaf of the
whole is made, and who writes it: its writer gets what others hold from these. So no byte of the
state comes here, and the leaves are those of a state that was never divided.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from stratagem.common.base.errors import StratagemError
from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.manifest import Limits, Manifest
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.state_writing import leaves_in, may_write_leaves
from stratagem.coordinator.effects.synchronous.leaf_orders import (
    DescribedPart,
    LeafOrder,
    ToldLeaves,
    begun_upload,
    described_parts,
    order_of,
    written_leaves,
)
from stratagem.coordinator.effects.synchronous.snapshot import PartHolder
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.updates.members.leaf_pieces import (
    PiecedLeaf,
    pieced_leaves,
    shared_out,
)
from stratagem.coordinator.updates.members.merge_slices import WholeState, whole_of
from stratagem.v1 import worker_pb2

log = structlog.get_logger()


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
    leaves = leaves_in(env)
    if leaves is None:
        return None
    able = [
        [each for each in part if may_write_leaves(env, leaves, each.at.member)] for part in parts
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
        limits = Limits(max_total_bytes=env.settings.max_state_bytes)
        manifests = [part.manifest for part in known]
        whole = await env.in_thread(lambda: whole_of(manifests, limits))
        pieced = await env.in_thread(lambda: _pieced(whole))
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
    return worker_pb2.PartHolder(address=env.links.to(at.member, env.state).address, name=name)
