"""CollectUpdate: makes the committed state of a client that is a party of its own its update.

Of the committed state the tensors of the global state are copied into the spool, checked as those
of any client; the state of the client's optimizer is left out.
"""

from contextlib import ExitStack, closing
from dataclasses import replace

from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import header_of
from stratagem.common.tensors.manifest import Manifest, Purpose, TensorSpec
from stratagem.coordinator.core.effects import CollectUpdate
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.client_failures import defect, reject
from stratagem.coordinator.effects.federated.spooled_updates import report_spooled, spooled
from stratagem.coordinator.store.blobs.shared_blobs import read_pieces
from stratagem.coordinator.updates.numpy_floats import Raw
from stratagem.coordinator.updates.spool_keys import SpoolKey
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import open_state
from stratagem.coordinator.updates.update_checks import UpdateRejectedError


async def collect_update(env: EffectContext, effect: CollectUpdate) -> None:
    """Copy, check, and report UpdateReceived or UpdateRejected."""
    if wrong := defect(effect.loss, effect.num_steps, dict(effect.metrics)):
        await reject(env, effect, *wrong)
        return
    entry = await spooled(env, effect, lambda key: _collect(env, effect, key))
    if entry is not None:
        failpoint("coordinator.silo.collected")
        await report_spooled(env, effect, entry, dict(effect.traffic))


def _collect(env: EffectContext, effect: CollectUpdate, key: SpoolKey) -> SpoolEntry:
    """Copy the update into the spool."""
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
