"""SumRegion: makes the sums over the clients of a region its update of the round."""

import threading
from contextlib import ExitStack, closing

from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.manifest import TensorSpec, dtype_named
from stratagem.coordinator.core.effects import SumRegion
from stratagem.coordinator.core.facts import Accepted
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.spooled_updates import (
    accepted_entry,
    report_spooled,
    spooled,
)
from stratagem.coordinator.updates.folding.region_sums import sums_manifest, write_sum
from stratagem.coordinator.updates.numpy_floats import Raw
from stratagem.coordinator.updates.spool_keys import SpoolKey
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import open_state


async def sum_region(env: EffectContext, effect: SumRegion) -> None:
    """Add up in a thread, and report UpdateReceived; UpdateRejected where the sums are not
    finite."""
    cancelled = threading.Event()
    try:
        entry = await spooled(env, effect, lambda key: _summed(env, effect, key, cancelled))
    finally:
        cancelled.set()
    if entry is not None:
        failpoint("coordinator.region.summed")
        await report_spooled(env, effect, entry, traffic={})


def _summed(
    env: EffectContext, effect: SumRegion, key: SpoolKey, cancelled: threading.Event
) -> SpoolEntry:
    """Write the sums into the spool."""
    entries = [_entry(env, effect, accepted) for accepted in effect.accepted]
    with ExitStack() as files:
        model, base = open_state(files, env.blobs, effect.base.digest)
        wanted, by_name = sums_manifest(model), {spec.name: spec for spec in model.tensors}

        def before(spec: TensorSpec, offset: int, num_bytes: int) -> Raw:
            own = by_name[spec.name]
            item_bytes, num = dtype_named(own.dtype).item_bytes, num_bytes // 8
            return base.read(own.dtype, own.offset + offset // 8 * item_bytes, num)

        source = " ".join(accepted.digest for accepted in effect.accepted)
        with closing(env.spool.open(key, wanted, source=source, before=before)) as writer:
            written = 0

            def write(data: memoryview) -> None:
                nonlocal written
                writer.write_at(written, data)
                written += len(data)

            weights = [float(accepted.num_samples) for accepted in effect.accepted]
            write_sum(entries, weights, model, write, cancelled.is_set)
            return writer.commit(wanted, sum(each.num_samples for each in effect.accepted))


def _entry(env: EffectContext, effect: SumRegion, accepted: Accepted) -> SpoolEntry:
    """Return the update of a client of the region."""
    key = env.spool_key(effect.run_id, effect.inside, effect.round_inside, accepted.client)
    return accepted_entry(env, key, accepted.digest)
