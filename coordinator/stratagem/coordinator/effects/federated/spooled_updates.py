"""The updates of clients that are parties of their own, which the coordinator makes itself: into
the spool, and from there into the journal. And those that the journal has accepted.
"""

from collections.abc import Callable, Mapping

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.coordinator.core.effects import CollectUpdate, SumRegion
from stratagem.coordinator.core.facts import UpdateReceived
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.client_failures import reject
from stratagem.coordinator.effects.federated.late_counts import report_update
from stratagem.coordinator.updates.spool_keys import SpoolKey
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.update_checks import UpdateRejectedError


async def spooled(
    env: EffectContext, effect: CollectUpdate | SumRegion, make: Callable[[SpoolKey], SpoolEntry]
) -> SpoolEntry | None:
    """Return the update that `make` writes into the spool, in a thread; one that a crash left
    there complete is taken as it is. None: it may not be accepted, which has been reported."""
    key = env.spool_key(effect.run_id, effect.party, effect.round_num, effect.client)

    def found_or_made() -> SpoolEntry:
        found, _ = env.spool.look(key)
        return make(key) if found is None else found

    try:
        return await env.in_thread(found_or_made)
    except UpdateRejectedError as error:
        await reject(env, effect, error.cause, error.reason)
        return None


async def report_spooled(
    env: EffectContext,
    effect: CollectUpdate | SumRegion,
    entry: SpoolEntry,
    traffic: Mapping[str, int],
) -> None:
    """Report UpdateReceived of an update that is complete in the spool."""
    received = UpdateReceived(
        party=effect.party,
        round_num=effect.round_num,
        client=effect.client,
        digest=entry.digest,
        num_samples=entry.num_samples,
        loss=effect.loss,
        seconds=0.0,
        traffic=dict(traffic),
        metrics=dict(effect.metrics),
        num_steps=effect.num_steps,
    )
    await report_update(env, effect, received)


def accepted_entry(env: EffectContext, key: SpoolKey, digest: Digest) -> SpoolEntry:
    """Return an update that the journal has accepted. Raises IntegrityError if the spool does not
    have it."""
    entry = env.spool.entry(key, digest)
    if entry is None or entry.digest != digest:
        where = f"{key.party}, " if key.party else ""
        where += f"round {key.round_num}, client {key.client}"
        raise IntegrityError(f"{where}: the accepted update is not in the spool")
    return entry
