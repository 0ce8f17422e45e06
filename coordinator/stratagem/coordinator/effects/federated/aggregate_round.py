"""AggregateRound: fold the accepted updates, in client order, into the next global state."""

import io
import threading
from contextlib import ExitStack
from dataclasses import replace

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.job import JobSpec
from stratagem.common.privacy.privacy_secret import SecretLostError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import FedProx
from stratagem.common.tensors.manifest import Manifest
from stratagem.common.tensors.safetensors_file import header_bytes, header_of, parse_header
from stratagem.coordinator.core.effects import AggregateRound, JudgeUpdates, TrainClient
from stratagem.coordinator.core.facts import RoundRestarted, RunFailed, SegmentCommitted
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.account_round import PrivateRound
from stratagem.coordinator.effects.secure_aggregation.masked_sum import OpenedMasks
from stratagem.coordinator.effects.secure_aggregation.open_masks import opened_masks
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun, spec_of
from stratagem.coordinator.strategies.federated.late_updates import max_staleness, weight
from stratagem.coordinator.strategies.federated.round_decisions import next_trainers
from stratagem.coordinator.updates.folding.fold import (
    Combination,
    Folded,
    fold_weighted_mean,
    mean_factors,
)
from stratagem.coordinator.updates.folding.global_average import global_average
from stratagem.coordinator.updates.folding.rebasing import Rebasing
from stratagem.coordinator.updates.folding.region_sums import MeanOfSums
from stratagem.coordinator.updates.folding.regional_mean import RegionalMean
from stratagem.coordinator.updates.folding.server_optimizers import server_optimizer
from stratagem.coordinator.updates.folding.server_step import ServerStep
from stratagem.coordinator.updates.privacy.round_noise import FROZEN_KEY
from stratagem.coordinator.updates.robust.rules import combination, places_read
from stratagem.coordinator.updates.secure.secure_mean import SecureMean, SumError
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import AVERAGED_KEY, open_state
from stratagem.coordinator.updates.update_decoding import UpdateDecoding
from stratagem.coordinator.updates.weighing.controlled_mean import ControlledMean
from stratagem.coordinator.updates.weighing.normalized_steps import length_of_steps, nova_factors
from stratagem.coordinator.updates.weighing.scaled_changes import ScaledChanges, Shares

Header = tuple[Manifest, int]
"""What a state's file is made of, and where its data start."""


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
    cancelled = threading.Event()
    try:
        return await env.in_thread(lambda: _fold(env, effect, entries, masks, cancelled))
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
    names = {member.worker_id for member in run.touched}
    if isinstance(run.value, FederatedRun):
        names &= next_trainers(job, run.value)
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
        entry = env.spool.entry(key, accepted.digest)
        if entry is None or entry.digest != accepted.digest:
            where = f"round {round_num}, client {accepted.client}"
            raise IntegrityError(f"{where}: the accepted update is not in the spool")
        entries.append(entry)
    return entries


def _fold(
    env: EffectContext,
    effect: AggregateRound,
    entries: list[SpoolEntry],
    masks: OpenedMasks | None,
    cancelled: threading.Event,
) -> tuple[Folded, Header, float | None]:
    """Write the next state; for a thread."""
    with env.blobs.open(effect.base.digest) as base:
        manifest, _ = header_of(base, effect.base.digest)
    metadata = {"format": "1", "round": str(effect.round_num)}
    if AVERAGED_KEY in manifest.metadata:
        metadata[AVERAGED_KEY] = manifest.metadata[AVERAGED_KEY]
    if FROZEN_KEY in manifest.metadata:
        metadata[FROZEN_KEY] = manifest.metadata[FROZEN_KEY]
    manifest = replace(manifest, metadata=metadata)
    header = header_bytes(manifest)
    job = env.job_of(effect.run_id, effect.party)
    optimizer = server_optimizer(spec_of(job))
    server = None
    if optimizer is not None:
        of_round = {"round": str(effect.round_num)}
        slots = effect.server_state
        server = ServerStep(optimizer, env.blobs, effect.base.digest, slots, of_round)
    before = effect.base.average
    average = global_average(job.weight_average, env.blobs, before, manifest, effect.round_num)
    weights = [weight(job, accepted) for accepted in effect.accepted]
    rebasing = _rebasing(env, effect)
    bases = [update.base or effect.base.digest for update in effect.accepted]
    decoding = decoding_of(env, effect, manifest, bases)
    private = None if effect.privacy is None else PrivateRound.of(env, effect, effect.privacy)
    with ExitStack() as files:
        combined: Combination | None = None
        _, state = open_state(files, env.blobs, effect.base.digest)
        if private is not None:
            combined = private.mean(manifest, state)
        elif masks is not None:
            rule = masks.rule(env.job_of(effect.run_id, effect.party))
            combined = SecureMean(entries, masks.keys, rule, manifest, state)
            entries, weights = [], []
        elif robust := spec_of(job).options.robust:
            places = places_read(robust, len(entries), effect.weights)
            entries, weights = [entries[i] for i in places], [1.0] * len(places)
            counted = [effect.weights[i] for i in places] if effect.weights else weights
            combined = combination(robust, counted, state)
        elif spec_of(job).options.q is not None or spec_of(job).options.normalize is not None:
            shares = _shares(job, effect, weights, env.numerics_of(effect.run_id))
            combined = ScaledChanges(shares, manifest, state)
        elif spec_of(job).options.control is not None:
            num_clients, is_anew = spec_of(job).num_clients, effect.is_control_anew
            combined = ControlledMean(weights, num_clients, manifest, state, begins_anew=is_anew)
        elif effect.integers_of is not None:
            combined = MeanOfSums(entries, weights, manifest, effect.integers_of)
            entries, weights = [], []
        elif effect.regions:
            combined = RegionalMean(effect.regions, weights)
        # The last thing before the fold, which leaves nothing of it behind when it fails.
        writer = env.blobs.writer(len(header) + manifest.total_bytes)
        folded = fold_weighted_mean(
            entries,
            weights,
            manifest,
            writer,
            should_stop=cancelled.is_set,
            server=server,
            average=average,
            rebasing=rebasing,
            decoding=decoding,
            combination=combined,
            numerics=env.numerics_of(effect.run_id),
        )
    clip_norm = None if private is None else private.next_norm(job, entries)
    return folded, parse_header(io.BytesIO(header), folded.state), clip_norm


def _shares(job: JobSpec, effect: AggregateRound, rows: list[float], numerics: int) -> Shares:
    """Return what the changes count: by losses, buffers by the same in shares of one; or by rows
    and steps, buffers by rows."""
    largest = rows.index(max(rows))
    if spec_of(job).options.normalize is not None:
        lengths = [_length(job, number) for number in effect.num_steps]
        return Shares(nova_factors(rows, lengths), *mean_factors(rows, numerics), largest)
    factors = effect.weights
    means = mean_factors(factors if any(factors) else [1.0] * len(factors), numerics)
    return Shares(factors, *means, largest)


def _length(job: JobSpec, num_steps: int) -> float:
    """Return how far so many steps of a client go under a gradient of one."""
    assert job.optimizer is not None, "the job was checked"
    aggregation = spec_of(job).aggregation
    pull = job.optimizer.lr * aggregation.mu if isinstance(aggregation, FedProx) else 0.0
    return length_of_steps(num_steps, job.optimizer.kwargs.get("momentum", 0.0), pull)


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
