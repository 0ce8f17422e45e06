"""Make the updates of clients that are parties themselves (silos or regions), and merge the metrics
of clients.

CollectUpdate handles silos, SumRegion handles regions, and MergeMetrics handles the metrics that
clients report as states.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from stratagem.common.base.errors import IntegrityError, InvalidInputError
from stratagem.common.base.ids import NO_DIGEST, Digest, WorkerId, child_party
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import header_of
from stratagem.common.tensors.manifest import Manifest, Purpose, TensorSpec, dtype_named
from stratagem.coordinator.core.effects import CollectUpdate, MergeMetrics, SumRegion
from stratagem.coordinator.core.facts import Accepted, MetricsMerged, UpdateReceived
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.effects.client_reports import defect, reject, report_update
from stratagem.coordinator.effects.context import EffectContext, LiveRuns, Transfers
from stratagem.coordinator.effects.execute import attend, record_of
from stratagem.coordinator.effects.snapshot import stored_bytes
from stratagem.coordinator.runtime.links import WorkerSession
from stratagem.coordinator.store.blobs import BlobStore
from stratagem.coordinator.store.shared_blobs import read_pieces
from stratagem.coordinator.strategies.federated.rejections import reason_of
from stratagem.coordinator.updates.floats import Raw
from stratagem.coordinator.updates.reading import open_state
from stratagem.coordinator.updates.spool import Spool, SpoolKey
from stratagem.coordinator.updates.upload import SpoolEntry, UpdateRejectedError
from stratagem.coordinator.updates.weighing import sums_manifest, write_sum
from stratagem.v1 import worker_pb2 as pb

# ---- CollectUpdate ----
#
# The tensors of the global state are copied from the client's committed state into the spool, and
# checked as those of any client. The state of the client's optimizer is left out.


async def collect_update(runs: LiveRuns, transfers: Transfers, effect: CollectUpdate) -> None:
    """Copy a silo's state into the spool as its update; report UpdateReceived or UpdateRejected."""
    if wrong := defect(effect.loss, effect.num_steps, dict(effect.metrics)):
        await reject(runs, effect, *wrong)
        return
    entry = await spooled(runs, transfers.spool, effect, partial(_collect, transfers, effect))
    if entry is not None:
        failpoint("coordinator.silo.collected")
        await report_spooled(runs, effect, entry, dict(effect.traffic))


def _collect(transfers: Transfers, effect: CollectUpdate, key: SpoolKey) -> SpoolEntry:
    """Copy a silo's committed state into the spool as its update."""
    with ExitStack() as files:
        expected, base = open_state(files, transfers.blobs, effect.base.digest)
        manifest = replace(expected, purpose=Purpose.UPDATE, metadata={}, digest="")
        file = files.enter_context(transfers.blobs.open(effect.digest))
        given, data_start = header_of(file, effect.digest)

        def before(spec: TensorSpec, offset: int, num_bytes: int) -> Raw:
            return base.read_raw("uint8", spec.offset + offset, num_bytes)

        upload = transfers.spool.open(key, manifest, source=effect.digest, before=before)
        with closing(upload) as writer:
            for spec, stored in _pairs(manifest, given):
                begin = data_start + stored.offset
                skipped = max(0, writer.offset - spec.offset)
                file.seek(begin + skipped)
                for piece in read_pieces(file, stored.size_bytes - skipped):
                    writer.write(piece)
            return writer.commit(expected, effect.num_samples)


def _pairs(wanted: Manifest, given: Manifest) -> list[tuple[TensorSpec, TensorSpec]]:
    """Pair each wanted tensor that owns data with the matching tensor of the given file."""
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


# ---- Spooled updates ----
#
# The updates that the coordinator makes go into the spool and from there into the journal.


async def spooled(
    runs: LiveRuns,
    spool: Spool,
    effect: CollectUpdate | SumRegion,
    make: Callable[[SpoolKey], SpoolEntry],
) -> SpoolEntry | None:
    """Return the update that `make` writes into the spool in a thread, or a complete one left by a
    crash. Return None if the update is rejected, which has then been reported."""
    key = runs.spool_key(effect.run_id, effect.party, effect.round_num, effect.client)

    def found_or_made() -> SpoolEntry:
        entry, _ = spool.look(key)
        return make(key) if entry is None else entry

    try:
        return await asyncio.to_thread(found_or_made)
    except UpdateRejectedError as error:
        await reject(runs, effect, error.cause, error.reason)
        return None


async def report_spooled(
    runs: LiveRuns,
    effect: CollectUpdate | SumRegion,
    entry: SpoolEntry,
    traffic: Mapping[str, int],
) -> None:
    """Report UpdateReceived for an update that is complete in the spool."""
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
    await report_update(runs, effect, received)


def accepted_entry(spool: Spool, key: SpoolKey, digest: Digest) -> SpoolEntry:
    """Return an update that the journal has accepted. Raises IntegrityError if it is missing."""
    entry = spool.entry(key, digest)
    if entry is None or entry.digest != digest:
        where = f"{key.party}, " if key.party else ""
        where += f"round {key.round_num}, client {key.client}"
        raise IntegrityError(f"{where}: the accepted update is not in the spool")
    return entry


# ---- SumRegion ----
#
# The sums over the clients of a region become its update of the round.


async def sum_region(runs: LiveRuns, transfers: Transfers, effect: SumRegion) -> None:
    """Sum a region's updates in a thread; report UpdateReceived, or UpdateRejected if a sum is not
    finite."""
    cancelled = threading.Event()
    try:
        make = partial(_summed, runs, transfers, effect, cancelled)
        entry = await spooled(runs, transfers.spool, effect, make)
    finally:
        cancelled.set()
    if entry is not None:
        failpoint("coordinator.region.summed")
        await report_spooled(runs, effect, entry, traffic={})


def _summed(
    runs: LiveRuns,
    transfers: Transfers,
    effect: SumRegion,
    cancelled: threading.Event,
    key: SpoolKey,
) -> SpoolEntry:
    """Write the sum of a region's updates into the spool, as the region's own update."""
    entries = [_entry(runs, transfers.spool, effect, accepted) for accepted in effect.accepted]
    with ExitStack() as files:
        model, base = open_state(files, transfers.blobs, effect.base.digest)
        wanted, by_name = sums_manifest(model), {spec.name: spec for spec in model.tensors}

        def before(spec: TensorSpec, offset: int, num_bytes: int) -> Raw:
            tensor = by_name[spec.name]
            item_bytes, num = dtype_named(tensor.dtype).item_bytes, num_bytes // 8
            return base.read(tensor.dtype, tensor.offset + offset // 8 * item_bytes, num)

        source = " ".join(accepted.digest for accepted in effect.accepted)
        with closing(transfers.spool.open(key, wanted, source=source, before=before)) as writer:
            written = 0

            def write(data: memoryview) -> None:
                nonlocal written
                writer.write_at(written, data)
                written += len(data)

            weights = [float(accepted.num_samples) for accepted in effect.accepted]
            write_sum(entries, weights, model, write, cancelled.is_set)
            return writer.commit(wanted, sum(accepted.num_samples for accepted in effect.accepted))


def _entry(runs: LiveRuns, spool: Spool, effect: SumRegion, accepted: Accepted) -> SpoolEntry:
    """Return the spooled update of one client of the region."""
    key = runs.spool_key(effect.run_id, effect.inside, effect.round_inside, accepted.client)
    return accepted_entry(spool, key, accepted.digest)


# ---- Sums of metric states ----
#
# The states of the user's own metrics are added over clients, in the order given.
#
# Counts are added in int64 and other numbers in float64, so the sums are those of one loop over
# all clients. This code does not depend on the metric; a worker computes the values from the
# sums.

States: TypeAlias = Mapping[tuple[str, str], np.ndarray]
"""A client's metric states, int64 or float64 arrays, keyed by metric and name of the state."""


class UnlikeStatesError(Exception):
    """The states of a client differ in kind from those of the first one."""


class SumsSoFar:
    """The running sums of the metric states of the clients added so far."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str], np.ndarray] = {}
        self._first: int | None = None

    def add(self, client: int, own: States) -> None:
        """Add the metric states of a client.

        Raises UnlikeStatesError, naming the client and the state that does not fit; the sums are
        unusable then.
        """
        if self._first is None:
            self._first = client
            self.totals = {key: values.copy() for key, values in own.items()}
            return
        first = self._first
        if own.keys() != self.totals.keys():
            raise UnlikeStatesError(f"client {client} has other states than client {first}")
        for key, values in own.items():
            total = self.totals[key]
            if (values.dtype, values.shape) != (total.dtype, total.shape):
                said = f"{values.dtype} {values.shape}"
                text = f"state {key[1]} of {key[0]} is {said} at client {client}, and "
                raise UnlikeStatesError(f"{text}{total.dtype} {total.shape} at client {first}")
            self.totals[key] = _sum(client, key, total, values)


def _sum(client: int, key: tuple[str, str], total: np.ndarray, more: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # a loop has infinite sums, too
        summed = np.asarray(total + more)  # numpy makes no array of single numbers
    if summed.dtype == np.int64 and np.any(
        ((total < 0) == (more < 0)) & ((summed < 0) != (total < 0))
    ):
        raise UnlikeStatesError(
            f"state {key[1]} of {key[0]} is too large with that of client {client}"
        )
    return summed


# ---- MergeMetrics ----
#
# The states of metrics that clients have reported are added up, and a worker computes the values
# from the sums, since none of the user's code runs here. A client's states become a blob when it
# has evaluated, once they are valid states.

MAX_NUMBERS: Final = 65_536
"""The number of values in the metric states that a worker may send for one client."""
MAX_DIMENSIONS: Final = 16
PARTY: Final = "measure"
_MAX_REASON_CHARS: Final = 300
_MAX_KIND_CHARS: Final = 80


async def merge_metrics(env: EffectContext, effect: MergeMetrics) -> None:
    """Merge the clients' metrics; report MetricsMerged with the result or the reason for none."""
    sums, unlike = await asyncio.to_thread(_sums, env.transfers.blobs, effect)
    if not sums:
        reason = "; ".join(unlike.values())
        await _report(env.runs, effect, pb.OwnMetrics(), reason=reason, worker_id="")
        return
    failpoint("coordinator.sums.merged")
    splits = sorted({name.partition(".")[0] for name in effect.metrics})
    plan = pb.MeasureSumsPlan(sums=sums, splits=splits, num_clients=len(effect.states))
    at = WorkerSession(effect.member, effect.run_id, child_party(effect.party, PARTY), 0)
    request = env.workers.request(effect.party, at, effect.segment, measure_sums=plan)
    result = await attend(env, effect.member, request)
    match result.WhichOneof("outcome"):
        case "measure_sums":
            failed = {
                metric: kind[:_MAX_KIND_CHARS]
                for metric, kind in sorted(result.measure_sums.unmerged.items())
                if metric in effect.metrics
            }
            await _report(env.runs, effect, result.measure_sums, unmerged=unlike | failed)
        case "error":
            raised = record_of(result.error)
            reason = f"{effect.member.worker_id}: {reason_of(raised) or raised.type}"
            await _report(env.runs, effect, pb.OwnMetrics(), reason=reason)
        case _:
            await env.workers.end_early(effect.run_id, effect.member, result)


async def store_states(blobs: BlobStore, sums: Sequence[pb.MetricState]) -> Digest:
    """Store a client's metric states; return the blob's digest, or "" if there are no states.

    Raises InvalidInputError if the states cannot be summed.
    """
    if not sums:
        return NO_DIGEST
    _decoded(sums)
    data = pb.OwnMetrics(sums=sums).SerializeToString(deterministic=True)
    return await stored_bytes(blobs, data)


def summed(sums: Sequence[pb.MetricState]) -> tuple[str, ...]:
    """Return the names of the metrics that these states belong to."""
    return tuple(sorted({state.metric for state in sums}))


async def _report(
    runs: LiveRuns,
    effect: MergeMetrics,
    measured: pb.OwnMetrics,
    reason: str = "",
    worker_id: str | None = None,
    unmerged: Mapping[str, str] | None = None,
) -> None:
    named = effect.member.worker_id if worker_id is None else WorkerId(worker_id)
    fact = MetricsMerged(
        party=effect.party,
        segment=effect.segment,
        clients=tuple(client for client, _ in effect.states),
        worker_id=named,
        metrics=_of(effect.metrics, measured),
        reason=reason[:_MAX_REASON_CHARS],
        unmerged=unmerged or {},
    )
    await runs.report(effect.run_id, fact)


def _of(metrics: Sequence[str], measured: pb.OwnMetrics) -> dict[str, float]:
    """Keep the values of the requested metrics only, since a worker may send others."""
    return {
        name: value
        for name, value in sorted(measured.metrics.items())
        if any(f"{name}.".startswith(f"{metric}.") for metric in metrics)
    }


def _sums(blobs: BlobStore, effect: MergeMetrics) -> tuple[list[pb.MetricState], dict[str, str]]:
    """Sum the metric states over all clients, in order. Return the sums, and per metric that cannot
    be summed the reason. Call this in a thread."""
    metrics = sorted(effect.metrics)
    sums = {metric: SumsSoFar() for metric in metrics}
    unlike: dict[str, str] = {}
    for client, digest in effect.states:
        of_metric = _by_metric(blobs, digest)
        for metric in [metric for metric in metrics if metric not in unlike]:
            try:
                sums[metric].add(client, of_metric.get(metric, {}))
            except UnlikeStatesError as error:
                unlike[metric] = str(error)[:_MAX_REASON_CHARS]
    states = [
        _encoded(metric, name, values)
        for metric in metrics
        if metric not in unlike
        for (_, name), values in sorted(sums[metric].totals.items())
    ]
    return states, {metric: unlike[metric] for metric in sorted(unlike)}


def _by_metric(blobs: BlobStore, digest: Digest) -> dict[str, dict[tuple[str, str], np.ndarray]]:
    """Return a client's metric states, grouped by metric; its blob is read once for all."""
    with blobs.open(digest) as file:
        said = _decoded(pb.OwnMetrics.FromString(file.read()).sums)
    by_metric: dict[str, dict[tuple[str, str], np.ndarray]] = {}
    for key, values in said.items():
        by_metric.setdefault(key[0], {})[key] = values
    return by_metric


def _decoded(sums: Sequence[pb.MetricState]) -> States:
    states: dict[tuple[str, str], np.ndarray] = {}
    for state in sums:
        values = np.array(state.numbers) if state.numbers else np.array(state.counts, np.int64)
        if len(state.shape) > MAX_DIMENSIONS:
            raise InvalidInputError(f"state {state.name} has {len(state.shape)} dimensions")
        is_both, key = bool(state.numbers and state.counts), (state.metric, state.name)
        num = int(np.prod(state.shape, dtype=object)) if state.shape else 1
        if is_both or not values.size or values.size != num or key in states:
            text = f"state {state.name} of {state.metric} has {values.size} numbers for its shape"
            raise InvalidInputError(f"{text} {tuple(state.shape)}")
        states[key] = values.reshape(tuple(state.shape))
    if sum(values.size for values in states.values()) > MAX_NUMBERS:
        raise InvalidInputError(f"the states of metrics are more than {MAX_NUMBERS} numbers")
    return states


def _encoded(metric: str, name: str, values: np.ndarray) -> pb.MetricState:
    state = pb.MetricState(metric=metric, name=name, shape=values.shape)
    (state.numbers if values.dtype.kind == "f" else state.counts).extend(values.ravel().tolist())
    return state
