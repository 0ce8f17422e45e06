"""AggregateRound: fold the accepted updates, in client order, into the next global state."""

import threading
from dataclasses import replace

from stratagem.common.errors import IntegrityError
from stratagem.common.failpoints import failpoint
from stratagem.common.ids import Digest
from stratagem.common.tensors.manifest import Manifest
from stratagem.common.tensors.safefile import header_bytes, header_of
from stratagem.coordinator.aggregation.fold import fold_weighted_mean
from stratagem.coordinator.aggregation.rebasing import Rebasing
from stratagem.coordinator.aggregation.server_optimizers import server_optimizer
from stratagem.coordinator.aggregation.server_step import ServerStep
from stratagem.coordinator.aggregation.state_reader import AVERAGED_KEY
from stratagem.coordinator.core.effects import AggregateRound
from stratagem.coordinator.core.facts import SegmentCommitted
from stratagem.coordinator.effects.env import Env
from stratagem.coordinator.spool.spool import SpoolKey
from stratagem.coordinator.spool.upload import SpoolEntry
from stratagem.coordinator.strategies.federated_run import spec_of
from stratagem.coordinator.strategies.late_updates import max_staleness, weight


async def aggregate_round(env: Env, effect: AggregateRound) -> None:
    """Fold in a thread, commit the blob, report SegmentCommitted, and empty the round's spool."""
    entries = await env.in_thread(lambda: _entries(env, effect))
    cancelled = threading.Event()
    try:
        folded = await env.in_thread(lambda: _fold(env, effect, entries, cancelled))
        digest, slots, manifest = folded
    except (IntegrityError, FileNotFoundError):
        env.spool.distrust(entries)  # where there is an object store, they are fetched again
        raise
    finally:
        cancelled.set()
    failpoint("coordinator.round.folded")
    _bring_ahead(env, effect, digest)
    fact = SegmentCommitted(
        party=effect.party,
        segment=effect.round_num,
        step=effect.round_num,
        digest=digest,
        size_bytes=manifest.total_bytes,
        metrics={},
        server_state=slots,
        max_staleness=max_staleness(env.job_of(effect.run_id, effect.party)),
    )
    await env.report(effect.run_id, fact)


def _bring_ahead(env: Env, effect: AggregateRound, digest: Digest) -> None:
    """Send the new state to the run's workers while its fact is being journaled.

    It is content under its own name, so a worker that gets it for nothing has lost nothing.
    """
    run = env.state.runs.get(effect.run_id)
    if run is None or run.ended is not None:
        return
    if effect.round_num >= spec_of(env.job_of(effect.run_id, effect.party)).rounds:
        return
    for member in run.touched:
        worker = env.state.workers.get(member.worker_id)
        if worker is not None and worker.member == member and worker.is_usable:
            env.start_push(member, effect.run_id, digest)


def _entries(env: Env, effect: AggregateRound) -> list[SpoolEntry]:
    """The spooled updates that the journal accepted, in client order."""
    entries = []
    for accepted in effect.accepted:
        round_num = effect.round_num - accepted.staleness
        key = SpoolKey(effect.run_id, effect.party, round_num, accepted.client)
        entry = env.spool.entry(key, accepted.digest)
        if entry is None or entry.digest != accepted.digest:
            where = f"round {round_num}, client {accepted.client}"
            raise IntegrityError(f"{where}: the accepted update is not in the spool")
        entries.append(entry)
    return entries


def _fold(
    env: Env, effect: AggregateRound, entries: list[SpoolEntry], cancelled: threading.Event
) -> tuple[Digest, tuple[Digest, ...], Manifest]:
    with env.blobs.open(effect.base.digest) as base:
        manifest, _ = header_of(base, effect.base.digest)
    metadata = {"format": "1", "round": str(effect.round_num)}
    if AVERAGED_KEY in manifest.metadata:
        metadata[AVERAGED_KEY] = manifest.metadata[AVERAGED_KEY]
    manifest = replace(manifest, metadata=metadata)
    job = env.job_of(effect.run_id, effect.party)
    optimizer = server_optimizer(spec_of(job))
    server = None
    if optimizer is not None:
        of_round = {"round": str(effect.round_num)}
        slots = effect.server_state
        server = ServerStep(optimizer, env.blobs, effect.base.digest, slots, of_round)
    weights = [weight(job, accepted) for accepted in effect.accepted]
    rebasing = _rebasing(env, effect)
    # The last thing before the fold, which leaves nothing of it behind when it fails.
    writer = env.blobs.writer(len(header_bytes(manifest)) + manifest.total_bytes)
    digest, slots = fold_weighted_mean(
        entries,
        weights,
        manifest,
        writer,
        should_stop=cancelled.is_set,
        server=server,
        rebasing=rebasing,
    )
    return digest, slots, manifest


def _rebasing(env: Env, effect: AggregateRound) -> Rebasing | None:
    bases = {index: each.base for index, each in enumerate(effect.accepted) if each.base}
    return Rebasing(env.blobs, effect.base.digest, bases) if bases else None
