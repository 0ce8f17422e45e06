"""CollectUpdate: makes the committed state of a client that is a party of its own its update.

Of the committed state the tensors of the global state are copied into the spool, checked as those
of any client; the state of the client's optimizer is left out.
"""

from contextlib import ExitStack, closing
from dataclasses import replace

from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.manifest import Manifest, Purpose, TensorSpec
from stratagem.common.tensors.safetensors_file import header_of
from stratagem.coordinator.core.effects import CollectUpdate
from stratagem.coordinator.core.facts import UpdateReceived
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.client_failures import defect, reject
from stratagem.coordinator.effects.federated.late_counts import report_update
from stratagem.coordinator.store.blobs.shared_blobs import read_pieces
from stratagem.coordinator.updates.numpy_floats import Raw
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import open_state
from stratagem.coordinator.updates.update_checks import UpdateRejectedError


async def collect_update(env: EffectContext, effect: CollectUpdate) -> None:
    """Copy, check, and report UpdateReceived or UpdateRejected."""
    if wrong := defect(effect.loss, effect.num_steps, dict(effect.metrics)):
        await reject(env, effect, *wrong)
        return
    try:
        entry = await env.in_thread(lambda: _collect(env, effect))
    except UpdateRejectedError as error:
        await reject(env, effect, error.cause, error.reason)
        return
    failpoint("coordinator.silo.collected")
    received = UpdateReceived(
        party=effect.party,
        round_num=effect.round_num,
        client=effect.client,
        digest=entry.digest,
        num_samples=entry.num_samples,
        loss=effect.loss,
        seconds=0.0,
        traffic=dict(effect.traffic),
        metrics=dict(effect.metrics),
        num_steps=effect.num_steps,
    )
    await report_update(env, effect, received)


def _collect(env: EffectContext, effect: CollectUpdate) -> SpoolEntry:
    """Return the update in the spool; one that a crash left there complete is taken as it is."""
    key = env.spool_key(effect.run_id, effect.party, effect.round_num, effect.client)
    done, _ = env.spool.look(key)
    if done is not None:
        return done
    with ExitStack() as files:
        expected, base = open_state(files, env.blobs, effect.base.digest)
        manifest = replace(expected, purpose=Purpose.UPDATE, metadata={}, digest="")
        file = files.enter_context(env.blobs.open(effect.digest))
        given, data_start = header_of(file, effect.digest)

        def before(spec: TensorSpec, offset: int, num_bytes: int) -> Raw:
            return base.read_raw("uint8", spec.offset + offset, num_bytes)

        with closing(env.spool.open(key, manifest, source=effect.digest, before=before)) as writer:
            for spec, stored in _pairs(manifest, given):
                begin = data_start + stored.offset
                skipped = max(0, writer.offset - spec.offset)
                file.seek(begin + skipped)
                for piece in read_pieces(file, stored.size_bytes - skipped):
                    writer.write(piece)
            return writer.commit(expected, effect.num_samples)


def _pairs(wanted: Manifest, given: Manifest) -> list[tuple[TensorSpec, TensorSpec]]:
    """Each stored tensor that is wanted, with where it stands in what is given."""
    by_name = {spec.name: spec for spec in given.tensors}
    pairs = []
    for spec in wanted.stored():
        stored = by_name.get(spec.name)
        if stored is None or (stored.dtype, stored.shape) != (spec.dtype, spec.shape):
            raise UpdateRejectedError(
                Cause.LAYOUT, f"{spec.name} is missing or has another dtype or shape"
            )
        pairs.append((spec, stored))
    return pairs
