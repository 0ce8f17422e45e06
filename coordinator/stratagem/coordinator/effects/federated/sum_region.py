"""SumRegion: makes the sums over the clients of a region its update of the round."""

import threading
from contextlib import ExitStack, closing

from stratagem.common.base.errors import IntegrityError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.manifest import TensorSpec
from stratagem.coordinator.core.effects import SumRegion
from stratagem.coordinator.core.facts import Accepted, UpdateReceived
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.client_failures import reject
from stratagem.coordinator.effects.federated.late_counts import report_update
from stratagem.coordinator.updates.folding.region_sums import sums_manifest, write_sum
from stratagem.coordinator.updates.numpy_floats import Raw
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import open_state
from stratagem.coordinator.updates.update_checks import UpdateRejectedError


async def sum_region(env: EffectContext, effect: SumRegion) -> None:
    """Add up in a thread, and report UpdateReceived; UpdateRejected where the sums are not
    finite."""
    cancelled = threading.Event()
    try:
        entry = await env.in_thread(lambda: _summed(env, effect, cancelled))
    except UpdateRejectedError as error:
        await reject(env, effect, error.cause, error.reason)
        return
    finally:
        cancelled.set()
    failpoint("coordinator.region.summed")
    received = UpdateReceived(
        party=effect.party,
        round_num=effect.round_num,
        client=effect.client,
        digest=entry.digest,
        num_samples=entry.num_samples,
        loss=effect.loss,
        seconds=0.0,
        metrics=dict(effect.metrics),
        num_steps=effect.num_steps,
    )
    await report_update(env, effect, received)


def _summed(env: EffectContext, effect: SumRegion, cancelled: threading.Event) -> SpoolEntry:
    """Return the sums in the spool; those that a crash left there complete are taken as they
    are."""
    key = env.spool_key(effect.run_id, effect.party, effect.round_num, effect.client)
    done, _ = env.spool.look(key)
    if done is not None:
        return done
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
    key = env.spool_key(effect.run_id, effect.inside, effect.round_inside, accepted.client)
    entry = env.spool.entry(key, accepted.digest)
    if entry is None or entry.digest != accepted.digest:
        where = f"round {effect.round_inside} of region {effect.client}, client {accepted.client}"
        raise IntegrityError(f"{where}: the accepted update is not in the spool")
    return entry
