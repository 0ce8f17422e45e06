"""AggregateRound: fold the accepted updates, in client order, into the next global state."""

import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.privacy.noise import SecretLostError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.core.effects import AggregateRound, JudgeUpdates, TrainClient
from stratagem.coordinator.core.facts import RoundRestarted, RunFailed, SegmentCommitted
from stratagem.coordinator.core.state_machine.strategy_boundary import value_of
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.account_round import PrivateRound
from stratagem.coordinator.effects.federated.combined_updates import combined_updates
from stratagem.coordinator.effects.federated.spooled_updates import accepted_entry
from stratagem.coordinator.effects.secure_aggregation.masked_sum import OpenedMasks
from stratagem.coordinator.effects.secure_aggregation.open_masks import opened_masks
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun, spec_of
from stratagem.coordinator.strategies.federated.late_updates import max_staleness
from stratagem.coordinator.strategies.federated.round_decisions import next_trainers
from stratagem.coordinator.updates.folding.finite_result import fold_rule, server_rule
from stratagem.coordinator.updates.folding.fold import Folded, fold_weighted_mean
from stratagem.coordinator.updates.folding.global_average import global_average
from stratagem.coordinator.updates.folding.rebasing import Rebasing
from stratagem.coordinator.updates.folding.server_optimizers import server_optimizer
from stratagem.coordinator.updates.folding.server_step import ServerStep
from stratagem.coordinator.updates.privacy.round_noise import FROZEN_KEY
from stratagem.coordinator.updates.secure.secure_mean import SumError
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import AVERAGED_KEY, StateReader
from stratagem.coordinator.updates.update_decoding import UpdateDecoding

Header = tuple[Manifest, int]
"""What a state's file is made of, and where its data start."""
_KEPT_METADATA: Final = (AVERAGED_KEY, FROZEN_KEY)


async def aggregate_round(env: EffectContext, effect: AggregateRound) -> None:
    """Fold in a thread, commit the blob, report SegmentCommitted, and empty the round's spool."""
    masks = await opened_masks(env, effect) if effect.secure is not None else None
    if isinstance(masks, RoundRestarted | RunFailed):
        await env.report(effect.run_id, masks)
        return
    try:
        folded, header, clip_norm = await _folded(env, effect, masks)
    except SumError as error:
        await env.report(effect.run_id, RunFailed(reason=f"round {effect.round_num}: {error}"))
        return
    except SecretLostError as error:
        await env.report(effect.run_id, RunFailed(reason=f"round {effect.round_num}: {error}"))
        return
    digest = folded.state
    failpoint("coordinator.round.folded")
    env.keep_header(digest, header)
    _bring_ahead(env, effect, digest)
    fact = SegmentCommitted(
        party=effect.party,
        segment=effect.round_num,
        step=effect.round_num,
        digest=digest,
        size_bytes=header[0].total_bytes,
        metrics=dict(effect.metrics),
        server_state=folded.slots,
        average=folded.average,
        max_staleness=max_staleness(env.job_of(effect.run_id, effect.party)),
        clip_norm=clip_norm,
    )
    await env.report(effect.run_id, fact)


async def _folded(
    env: EffectContext, effect: AggregateRound, masks: OpenedMasks | None
) -> tuple[Folded, Header, float | None]:
    """Return what the fold has written, and the clipping norm of the next round of a private
    run."""
    entries = await env.in_thread(lambda: accepted_entries(env, effect))
    base = await env.header(effect.base.digest)
    cancelled = threading.Event()
    try:
        return await env.in_thread(lambda: _fold(env, effect, base, entries, masks, cancelled))
    except (IntegrityError, FileNotFoundError):
        env.spool.distrust(entries)  # where there is an object store, they are fetched again
        raise
    finally:
        cancelled.set()


def _bring_ahead(env: EffectContext, effect: AggregateRound, digest: Digest) -> None:
    """Send the new state to the workers of the next round while its fact is being journaled.

    It is content under its own name, so a worker that gets it for nothing has lost no more than the
    time of its link; who is not guessed asks for it.
    """
    run = env.state.runs.get(effect.run_id)
    if run is None or run.ended is not None:
        return
    job = env.job_of(effect.run_id, effect.party)
    if effect.round_num >= spec_of(job).rounds:
        return
    names, value = {member.worker_id for member in run.touched}, value_of(run, effect.party)
    if isinstance(value, FederatedRun):
        names &= next_trainers(job, value)
    for member in run.touched:
        worker = env.state.workers.get(member.worker_id)
        is_there = worker is not None and worker.member == member and worker.is_usable
        if is_there and member.worker_id in names:
            env.start_push(member, effect.run_id, digest)


def accepted_entries(env: EffectContext, effect: AggregateRound | JudgeUpdates) -> list[SpoolEntry]:
    """Return the spooled updates that the journal accepted, in client order."""
    entries = []
    for accepted in effect.accepted:
        round_num = effect.round_num - accepted.staleness
        attempt = 0
        if isinstance(effect, AggregateRound) and effect.secure is not None:
            attempt = effect.secure.attempt
        key = env.spool_key(effect.run_id, effect.party, round_num, accepted.client, attempt)
        entries.append(accepted_entry(env, key, accepted.digest))
    return entries


def _fold(
    env: EffectContext,
    effect: AggregateRound,
    base: Header,
    entries: list[SpoolEntry],
    masks: OpenedMasks | None,
    cancelled: threading.Event,
) -> tuple[Folded, Header, float | None]:
    """Write the next state; for a thread."""
    job = env.job_of(effect.run_id, effect.party)
    manifest = _next_manifest(base[0], effect)
    header = header_bytes(manifest)
    before, round_num = effect.base.average, effect.round_num
    average = global_average(job.weight_average, env.blobs, before, manifest, round_num)
    bases = [update.base or effect.base.digest for update in effect.accepted]
    decoding = decoding_of(env, effect, manifest, bases)
    private = None if effect.privacy is None else PrivateRound.of(env, effect, effect.privacy)
    with ExitStack() as files:
        file = files.enter_context(env.blobs.open(effect.base.digest))
        state = StateReader(file, base[1])
        updates = combined_updates(env, effect, entries, private or masks, manifest, state)
        server = _server_step(env, effect)
        # The last thing before the fold, which leaves nothing of it behind when it fails.
        writer = env.blobs.writer(len(header) + manifest.total_bytes)
        folded = fold_weighted_mean(
            updates.entries,
            updates.weights,
            manifest,
            writer,
            should_stop=cancelled.is_set,
            server=server,
            average=average,
            rebasing=_rebasing(env, effect),
            decoding=decoding,
            combination=updates.rule,
            rule=fold_rule(job, spec_of(job)),
            base=state,
            numerics=env.numerics_of(effect.run_id),
        )
    clip_norm = None if private is None else private.next_norm(job, entries)
    return folded, (manifest, len(header)), clip_norm


def _next_manifest(base: Manifest, effect: AggregateRound) -> Manifest:
    """Return the layout of the next state, which is that of the round's base."""
    metadata = {"format": "1", "round": str(effect.round_num)}
    kept = {key: base.metadata[key] for key in _KEPT_METADATA if key in base.metadata}
    return replace(base, metadata={**metadata, **kept}, is_in_leaves=False)


def _server_step(env: EffectContext, effect: AggregateRound) -> ServerStep | None:
    spec = spec_of(env.job_of(effect.run_id, effect.party))
    optimizer = server_optimizer(spec)
    if optimizer is None:
        return None
    base, slots, of_round = effect.base.digest, effect.server_state, str(effect.round_num)
    rule = server_rule(spec)
    return ServerStep(optimizer, env.blobs, base, slots, {"round": of_round}, rule)


def _rebasing(env: EffectContext, effect: AggregateRound) -> Rebasing | None:
    bases = {index: update.base for index, update in enumerate(effect.accepted) if update.base}
    return Rebasing(env.blobs, effect.base.digest, bases) if bases else None


def decoding_of(
    env: EffectContext,
    effect: AggregateRound | JudgeUpdates | TrainClient,
    expected: Manifest,
    bases: list[Digest],
) -> UpdateDecoding:
    """Return what reads updates of the effect's job that began from these states."""
    job, numerics = env.job_of(effect.run_id, effect.party), env.numerics_of(effect.run_id)
    return UpdateDecoding(job, numerics, env.blobs, expected, bases)
