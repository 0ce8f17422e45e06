"""Has the members of a party write the leaves of a snapshot that all of them have, each its share
by number. See `leaf_orders` for how they are asked."""

from collections.abc import Sequence
from functools import partial

from stratagem.common.base.ids import Digest
from stratagem.common.tensors.manifest import Limits, Manifest
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.state_writing import leaves_in, may_write_leaves
from stratagem.coordinator.effects.synchronous.leaf_orders import (
    LeafOrder,
    ToldLeaves,
    begun_upload,
    order_of,
    written_leaves,
)
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.store.leaves.leaf_upload import DirectUpload


async def written_by_members(
    env: EffectContext, sessions: Sequence[WorkerSession], segment: int
) -> tuple[Digest, Manifest] | None:
    """Return digest and manifest of a snapshot that the sessions have, once it is durable in the
    store; None where states are files, or no member can write leaves.

    Raises ContradictionError where members hold other tensors than others.
    """
    leaves = leaves_in(env)
    if leaves is None:
        return None
    writers = [at for at in sessions if may_write_leaves(env, leaves, at.member)]
    if not writers:
        return None
    with await begun_upload(env, leaves, sessions[0]) as upload:
        told = ToldLeaves(Limits(max_total_bytes=env.settings.max_state_bytes))
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
