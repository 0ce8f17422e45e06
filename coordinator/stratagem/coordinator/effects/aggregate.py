"""AggregateRound folds the accepted updates, in client order, into the next global state.

JudgeUpdates runs before it if the job has a robust rule or weighs clients by their loss.
"""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Final

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.common.privacy.noise import SecretLostError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import (
    Bulyan,
    Federated,
    FedProx,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormBound,
    RobustRule,
)
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.core.effects import AggregateRound, JudgeUpdates, TrainClient
from stratagem.coordinator.core.facts import (
    RoundRestarted,
    RunFailed,
    SegmentCommitted,
    UpdatesJudged,
)
from stratagem.coordinator.core.strategy_calls import value_of
from stratagem.coordinator.effects.context import EffectContext, LiveRuns, Transfers
from stratagem.coordinator.effects.party_updates import accepted_entry
from stratagem.coordinator.effects.private import FROZEN_KEY, PrivateRound
from stratagem.coordinator.effects.secure import OpenedMasks, SecureMean, SumError, opened_masks
from stratagem.coordinator.store.blobs import BlobStore
from stratagem.coordinator.strategies.federated.closing import max_staleness, weight
from stratagem.coordinator.strategies.federated.decisions import next_trainers
from stratagem.coordinator.strategies.federated.run import Federation, spec_of
from stratagem.coordinator.updates.finite_result import fold_rule, server_rule
from stratagem.coordinator.updates.fold import (
    Combination,
    Folded,
    FoldStoppedError,
    Rebasing,
    fold_weighted_mean,
    mean_factors,
)
from stratagem.coordinator.updates.reading import (
    AVERAGED_KEY,
    StateReader,
    UpdateDecoding,
    open_state,
)
from stratagem.coordinator.updates.robust import Verdict, combination, judge, places_read
from stratagem.coordinator.updates.server_optimizer import (
    ServerStep,
    global_average,
    server_optimizer,
)
from stratagem.coordinator.updates.spool import Spool
from stratagem.coordinator.updates.upload import SpoolEntry
from stratagem.coordinator.updates.weighing import (
    ControlledMean,
    Fairness,
    MeanOfSums,
    RegionalMean,
    ScaledChanges,
    Shares,
    length_of_steps,
    nova_factors,
)

# ---- AggregateRound ----

Header = tuple[Manifest, int]
"""The manifest of a state's file, and the offset at which the tensor data start."""
_KEPT_METADATA: Final = (AVERAGED_KEY, FROZEN_KEY)


async def aggregate_round(env: EffectContext, effect: AggregateRound) -> None:
    """Fold a round's updates in a thread, and report SegmentCommitted with the new state."""
    masks = await opened_masks(env, effect) if effect.secure is not None else None
    if isinstance(masks, RoundRestarted | RunFailed):
        await env.runs.report(effect.run_id, masks)
        return
    try:
        folded, header, clip_norm = await _folded(env.runs, env.transfers, effect, masks)
    except (SumError, SecretLostError) as error:
        await env.runs.report(effect.run_id, RunFailed(reason=f"round {effect.round_num}: {error}"))
        return
    digest = folded.state
    failpoint("coordinator.round.folded")
    env.transfers.keep_header(digest, header)
    _bring_ahead(env.runs, env.transfers, effect, digest)
    fact = SegmentCommitted(
        party=effect.party,
        segment=effect.round_num,
        step=effect.round_num,
        digest=digest,
        size_bytes=header[0].total_bytes,
        metrics=dict(effect.metrics),
        server_state=folded.slots,
        average=folded.average,
        max_staleness=max_staleness(env.runs.job_of(effect.run_id, effect.party)),
        clip_norm=clip_norm,
    )
    await env.runs.report(effect.run_id, fact)


async def _folded(
    runs: LiveRuns, transfers: Transfers, effect: AggregateRound, masks: OpenedMasks | None
) -> tuple[Folded, Header, float | None]:
    """Return the blobs of the folded state, its header, and a private run's next clipping norm."""
    entries = await asyncio.to_thread(accepted_entries, runs, transfers.spool, effect)
    base = await transfers.header(effect.base.digest)
    cancelled = threading.Event()
    try:
        return await asyncio.to_thread(
            _fold, runs, transfers.blobs, effect, base, entries, masks, cancelled
        )
    except (IntegrityError, FileNotFoundError):
        transfers.spool.distrust(entries)  # those in an object store are fetched again
        raise
    finally:
        cancelled.set()


def _bring_ahead(
    runs: LiveRuns, transfers: Transfers, effect: AggregateRound, digest: Digest
) -> None:
    """Send the new state to workers of the next round while its commit is being journaled.

    The workers are a guess: one that does not need the state has lost only link time, and one that
    was not guessed asks for the state.
    """
    run = runs.state.runs.get(effect.run_id)
    if run is None or run.ended is not None:
        return
    job = runs.job_of(effect.run_id, effect.party)
    if effect.round_num >= spec_of(job).rounds:
        return
    names, value = {member.worker_id for member in run.touched}, value_of(run, effect.party)
    if isinstance(value, Federation):
        names &= next_trainers(job, value)
    for member in run.touched:
        worker = runs.state.workers.get(member.worker_id)
        is_there = worker is not None and worker.member == member and worker.is_usable
        if is_there and member.worker_id in names:
            transfers.start_push(member, effect.run_id, digest)


def accepted_entries(
    runs: LiveRuns, spool: Spool, effect: AggregateRound | JudgeUpdates
) -> list[SpoolEntry]:
    """Return the spooled updates that the journal accepted, in client order."""
    entries = []
    for accepted in effect.accepted:
        round_num = effect.round_num - accepted.staleness
        attempt = 0
        if isinstance(effect, AggregateRound) and effect.secure is not None:
            attempt = effect.secure.attempt
        key = runs.spool_key(effect.run_id, effect.party, round_num, accepted.client, attempt)
        entries.append(accepted_entry(spool, key, accepted.digest))
    return entries


def _fold(
    runs: LiveRuns,
    blobs: BlobStore,
    effect: AggregateRound,
    base: Header,
    entries: list[SpoolEntry],
    masks: OpenedMasks | None,
    cancelled: threading.Event,
) -> tuple[Folded, Header, float | None]:
    """Write the next state; return its blobs, its header and the next clipping norm. Call in a
    thread."""
    job = runs.job_of(effect.run_id, effect.party)
    manifest = _next_manifest(base[0], effect)
    header = header_bytes(manifest)
    before, round_num = effect.base.average, effect.round_num
    average = global_average(job.weight_average, blobs, before, manifest, round_num)
    bases = [update.base or effect.base.digest for update in effect.accepted]
    decoding = decoding_of(runs, blobs, effect, manifest, bases)
    private = None if effect.privacy is None else PrivateRound.of(runs, effect, effect.privacy)
    with ExitStack() as files:
        file = files.enter_context(blobs.open(effect.base.digest))
        state = StateReader(file, base[1])
        updates = combined_updates(runs, effect, entries, private or masks, manifest, state)
        server = _server_step(blobs, spec_of(job), effect)
        # The last thing before the fold, which leaves nothing of it behind when it fails.
        writer = blobs.writer(len(header) + manifest.total_bytes)
        folded = fold_weighted_mean(
            updates.entries,
            updates.weights,
            manifest,
            writer,
            should_stop=cancelled.is_set,
            server=server,
            average=average,
            rebasing=_rebasing(blobs, effect),
            decoding=decoding,
            combination=updates.rule,
            rule=fold_rule(job, spec_of(job)),
            base=state,
            numerics=runs.numerics_of(effect.run_id),
        )
    clip_norm = None if private is None else private.next_norm(job, entries)
    return folded, (manifest, len(header)), clip_norm


def _next_manifest(base: Manifest, effect: AggregateRound) -> Manifest:
    """Return the manifest of the next state: that of the round's base with new metadata."""
    metadata = {"format": "1", "round": str(effect.round_num)}
    inherited = {key: base.metadata[key] for key in _KEPT_METADATA if key in base.metadata}
    return replace(base, metadata={**metadata, **inherited}, is_in_leaves=False)


def _server_step(blobs: BlobStore, spec: Federated, effect: AggregateRound) -> ServerStep | None:
    optimizer = server_optimizer(spec)
    if optimizer is None:
        return None
    base, slots, of_round = effect.base.digest, effect.server_state, str(effect.round_num)
    rule = server_rule(spec)
    return ServerStep(optimizer, blobs, base, slots, {"round": of_round}, rule)


def _rebasing(blobs: BlobStore, effect: AggregateRound) -> Rebasing | None:
    bases = {index: update.base for index, update in enumerate(effect.accepted) if update.base}
    return Rebasing(blobs, effect.base.digest, bases) if bases else None


def decoding_of(
    runs: LiveRuns,
    blobs: BlobStore,
    effect: AggregateRound | JudgeUpdates | TrainClient,
    expected: Manifest,
    bases: list[Digest],
) -> UpdateDecoding:
    """Return the decoder for updates to the effect's job that began from these base states."""
    job, numerics = runs.job_of(effect.run_id, effect.party), runs.numerics_of(effect.run_id)
    return UpdateDecoding(job, numerics, blobs, expected, bases)


# ---- Rule and weights ----
#
# The job's rule says how the accepted updates of a round become the next state, which of them the
# fold reads, and with what weights.


@dataclass(frozen=True, slots=True)
class CombinedUpdates:
    """The inputs of a fold: the updates, their weights, and the rule that combines them."""

    entries: Sequence[SpoolEntry]
    """The updates that the fold reads; empty if the rule reads them itself."""
    weights: Sequence[float]
    """The weight of each update in `entries`."""
    rule: Combination | None
    """The rule that replaces the weighted mean, if any."""


def combined_updates(
    runs: LiveRuns,
    effect: AggregateRound,
    entries: Sequence[SpoolEntry],
    protection: PrivateRound | OpenedMasks | None,
    manifest: Manifest,
    state: StateReader,
) -> CombinedUpdates:
    """Return the inputs of the round's fold: the rule of the job, and the updates that it reads.

    entries: the accepted updates in client order. protection: the noise of a private round, or the
    opened masks of a secure one. manifest, state: the manifest and the reader of the state that the
    round began from.
    """
    job = runs.job_of(effect.run_id, effect.party)
    options, weights = spec_of(job).options, [weight(job, accepted) for accepted in effect.accepted]
    rule: Combination | None = None
    if isinstance(protection, PrivateRound):
        rule = protection.mean(manifest, state)
    elif protection is not None:
        rule = SecureMean(entries, protection.keys, protection.rule(job), manifest, state)
        return CombinedUpdates((), (), rule)
    elif options.robust is not None:
        places = places_read(options.robust, len(entries), effect.weights)
        entries, weights = [entries[at] for at in places], [1.0] * len(places)
        counted = [effect.weights[at] for at in places] if effect.weights else weights
        rule = combination(options.robust, counted, state)
    elif options.q is not None or options.normalize is not None:
        shares = _shares(job, effect, weights, runs.numerics_of(effect.run_id))
        rule = ScaledChanges(shares, manifest, state)
    elif options.control is not None:
        num_clients, is_anew = spec_of(job).num_clients, effect.is_control_anew
        rule = ControlledMean(weights, num_clients, manifest, state, begins_anew=is_anew)
    elif effect.integers_of is not None:
        rule = MeanOfSums(entries, weights, manifest, effect.integers_of)
        return CombinedUpdates((), (), rule)
    elif effect.regions:
        rule = RegionalMean(effect.regions, weights)
    return CombinedUpdates(entries, weights, rule)


def _shares(job: JobSpec, effect: AggregateRound, rows: list[float], numerics: int) -> Shares:
    """Return the weights of the changes. With `normalize` the weights follow from rows and steps,
    for buffers from rows alone; otherwise they follow from the losses."""
    largest = rows.index(max(rows))
    if spec_of(job).options.normalize is not None:
        lengths = [_length(job, number) for number in effect.num_steps]
        return Shares(nova_factors(rows, lengths), *mean_factors(rows, numerics), largest)
    factors = effect.weights
    means = mean_factors(factors if any(factors) else [1.0] * len(factors), numerics)
    return Shares(factors, *means, largest)


def _length(job: JobSpec, num_steps: int) -> float:
    """Return the distance that a client moves in num_steps steps under a gradient of one."""
    assert job.optimizer is not None, "the job was checked"
    aggregation = spec_of(job).aggregation
    pull = job.optimizer.lr * aggregation.mu if isinstance(aggregation, FedProx) else 0.0
    return length_of_steps(num_steps, job.optimizer.kwargs.get("momentum", 0.0), pull)


# ---- JudgeUpdates ----
#
# JudgeUpdates decides how much each accepted update of a round counts, under a robust rule or by
# loss.
#
# The verdict is a fact before anything is folded. A fold that is repeated, even by another
# machine with a different linear algebra library, therefore combines the same updates.

_MAX_NAMED = 8


async def judge_updates(runs: LiveRuns, transfers: Transfers, effect: JudgeUpdates) -> None:
    """Compare the round's updates in a thread, and report UpdatesJudged with a weight for each."""
    job = runs.job_of(effect.run_id, effect.party)
    entries = await asyncio.to_thread(accepted_entries, runs, transfers.spool, effect)
    cancelled = threading.Event()
    try:
        verdict = await asyncio.to_thread(
            _judge, runs, transfers.blobs, effect, job, entries, cancelled
        )
    except (IntegrityError, FileNotFoundError):
        transfers.spool.distrust(entries)  # those in an object store are fetched again
        raise
    finally:
        cancelled.set()
    failpoint("coordinator.round.judged")
    clients = [accepted.client for accepted in effect.accepted]
    said = _said(spec_of(job).options.robust, effect.losses, clients, verdict)
    fact = UpdatesJudged(
        party=effect.party,
        round_num=effect.round_num,
        weights=verdict.weights,
        scores=verdict.scores,
        reason=f"round {effect.round_num}: {said}",
    )
    await runs.report(effect.run_id, fact)


def _judge(
    runs: LiveRuns,
    blobs: BlobStore,
    effect: JudgeUpdates,
    job: JobSpec,
    entries: Sequence[SpoolEntry],
    cancelled: threading.Event,
) -> Verdict:
    """Return a weight for each update, and the reason for it. Call this in a thread."""

    def should_stop() -> None:
        if cancelled.is_set():
            raise FoldStoppedError("the comparison of updates was stopped")

    with ExitStack() as files:
        manifest, state = open_state(files, blobs, effect.base.digest)
        bases = [effect.base.digest] * len(entries)
        decoding = files.enter_context(closing(decoding_of(runs, blobs, effect, manifest, bases)))
        sources = [decoding.source(place, entry) for place, entry in enumerate(entries)]
        options = spec_of(job).options
        if options.q is not None:
            assert job.optimizer is not None, "the job was checked"
            fairness = Fairness(options.q, job.optimizer.lr, effect.losses)
            return fairness.verdict(sources, manifest, state, should_stop)
        assert options.robust is not None, "no rule asks for a verdict"
        return judge(options.robust, sources, manifest, state, should_stop)


def _said(
    rule: RobustRule | None, losses: Sequence[float], clients: Sequence[int], verdict: Verdict
) -> str:
    """Describe the verdict in a sentence for the run's log."""
    if rule is None:
        return _said_of_losses(losses, clients, sum(verdict.weights))
    pairs = list(zip(clients, verdict.weights, strict=True))
    updates = counted(len(clients), "update")
    match rule:
        case NormBound(norm=norm):
            shortened = [client for client, share in pairs if share < 1.0]
            return f"{len(shortened)} of {updates} longer than {norm:g}{_named(shortened)}"
        case GeometricMedian():
            lightest = min(verdict.weights) * len(clients)
            return f"{updates} weighed, the lightest with {lightest:.2g} of an even share"
        case Krum() | MultiKrum() | Bulyan():
            left_out = [client for client, share in pairs if not share]
            num_chosen = len(clients) - len(left_out)
            return f"{num_chosen} of {updates} chosen; left out{_named(left_out) or ': none'}"
        case _:
            raise TypeError(f"{type(rule).__name__} compares no updates")


def _said_of_losses(losses: Sequence[float], clients: Sequence[int], step: float) -> str:
    """Describe the range of the clients' losses, and the sum of their weights (`step`)."""
    in_order = sorted(zip(losses, clients, strict=True))
    (least, best), (greatest, worst) = in_order[0], in_order[-1]
    return (
        f"losses before training from {least:.4g} (client {best}) to {greatest:.4g} (client "
        f"{worst}); the changes count {step:.3g} in all"
    )


def _named(clients: Sequence[int]) -> str:
    if not clients:
        return ""
    more = f" and {len(clients) - _MAX_NAMED} more" if len(clients) > _MAX_NAMED else ""
    return f": clients {', '.join(map(str, clients[:_MAX_NAMED]))}{more}"
