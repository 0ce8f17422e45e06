"""TrainClient performs one client's part of a federated round.

The worker trains from the global state; then its slot is free and the update is pulled into the
spool and checked while it arrives. A client whose update is wrong is rejected alone, with the
reason.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from stratagem.common.base.errors import InvalidInputError, LimitError, OutOfRangeError
from stratagem.common.base.ids import Party, child_party, is_within
from stratagem.common.compression.table import update_key
from stratagem.common.numerics.verification import VERIFIER
from stratagem.common.privacy.noise import SecretLostError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.tensor_transfer import pull
from stratagem.common.tensors.local_files import UnreadableFileError, offered, readable_copy
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose, from_proto
from stratagem.common.tensors.stream import Sink, received
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.facts import RunFailed, UpdateReceived
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.effects.aggregate import decoding_of
from stratagem.coordinator.effects.client_reports import (
    client_state_ref,
    count_if_late,
    defect,
    defect_before,
    kept_rounds,
    kept_state,
    reject,
    reject_for_error,
    report_lost_state,
    report_update,
    row_privacy,
    spent_of,
    state_defect,
)
from stratagem.coordinator.effects.context import EffectContext, LiveRuns, WorkerCalls
from stratagem.coordinator.effects.execute import PlanListener, attend, record_of
from stratagem.coordinator.effects.secure import masked_manifest
from stratagem.coordinator.effects.segment import TrainedSteps, of_training, parts_of, rows_of
from stratagem.coordinator.observe.history import SegmentTail, TailKey
from stratagem.coordinator.runtime.links import WorkerLink, WorkerSession, state_ref
from stratagem.coordinator.store.step_history import HistoryRow
from stratagem.coordinator.strategies.federated.run import spec_of
from stratagem.coordinator.updates.floats import Offload
from stratagem.coordinator.updates.reading import UpdateDecoding, codec_of
from stratagem.coordinator.updates.spool import Spool, SpoolKey
from stratagem.coordinator.updates.upload import SpoolEntry, SpoolWriter, UpdateRejectedError
from stratagem.v1 import tensor_pb2, worker_pb2

# ---- Step history ----
#
# The step history of a client's part is taken in during training and stored with its update. The
# worker determines how many steps a row stands for, as it alone knows how many rows of data the
# client has.

MAX_STRIDE = 1 << 52
"""The largest stride of the step history, so that any number of steps is counted exactly."""


def party_of(effect: TrainClient) -> Party:
    """Return the party of a client, which identifies its session and history."""
    again = f"-{effect.attempt}" if effect.attempt else ""  # each attempt has other masks
    return child_party(effect.party, f"client{effect.client}{again}")


class RecordedRound:
    """The step history of a client in a round. Not thread-safe: runs on the event loop."""

    def __init__(
        self, env: EffectContext, effect: TrainClient, request: worker_pb2.ExecuteRequest
    ) -> None:
        self._env, self._effect, self._request = env, effect, request
        recording = env.runs.job_of(effect.run_id, effect.party).recording
        is_asked = recording is not None and recording.client_steps
        self._is_on = is_asked and not is_within(effect.party, VERIFIER)
        self._key = TailKey(effect.run_id, party_of(effect), 0)
        self._stride = 0
        self._from_step = 0

    @property
    def listener(self) -> PlanListener:
        """Return the listener that records the parts of the history."""
        return PlanListener(history=self._take_in if self._is_on else None)

    def _take_in(self, part: worker_pb2.HistoryPart) -> None:
        stride = int(part.stride)
        if part.party or not 0 < stride <= MAX_STRIDE or stride & (stride - 1):
            return  # it is damaged, and the others are not whole without it
        self._stride, self._from_step = stride, int(part.from_step)
        begun = SegmentTail(self._effect.round_num, stride, self._effect.membership)
        self._env.runs.history.add(self._key, begun, part)

    async def rows(self, result: worker_pb2.ClientRoundResult) -> list[HistoryRow]:
        """Return the history rows of the steps that made an update."""
        effect = self._effect
        if not self._stride:
            return []
        parts = await parts_of(
            self._env, self._key, effect.round_num, effect.member, self._request, result
        )
        to_step = self._from_step + int(result.num_steps)
        of_round = (effect.round_num, self._stride, to_step)
        trained = TrainedSteps(effect.run_id, self._key.party, *of_round)
        return await rows_of(trained, parts)

    def end(self) -> None:
        """Forget the recorded parts: they are stored, or the client's part of the round is over."""
        if self._stride:
            self._env.runs.history.end(self._key.run_id, self._key.party)


# ---- TrainClient ----


async def train_client(env: EffectContext, effect: TrainClient) -> None:
    """Have the client train, pull its update, and report UpdateReceived or UpdateRejected."""
    client, num_clients = effect.share or (effect.client, effect.num_clients)
    mask = worker_pb2.SecureMask(attempt=effect.attempt, routed=effect.routed)
    plan = worker_pb2.ClientRoundPlan(
        base=state_ref(effect.base),
        client=client,
        num_clients=num_clients,
        local_epochs=effect.local_epochs,
        num_lr_reductions=effect.num_lr_reductions,
        clip_norm=effect.clip_norm,
        state=client_state_ref(effect.state),
        kept_rounds=kept_rounds(env.runs, effect),
        secure_mask=mask if effect.routed else None,
        place=env.workers.link(effect.member).place,
    )
    if effect.rows is not None:
        try:
            plan.rows.CopyFrom(await asyncio.to_thread(row_privacy, env.runs, effect))
        except (SecretLostError, InvalidInputError) as error:
            reason = f"round {effect.round_num}: {error}"
            await env.runs.report(effect.run_id, RunFailed(reason=reason))
            return
    at = _session(effect)
    request = env.workers.request(effect.party, at, effect.round_num, client_round=plan)
    looked = _look(env.runs, env.transfers.spool, effect)
    steps = RecordedRound(env, effect, request)
    try:
        result = await _trained(env, effect, request, steps)
        match result.WhichOneof("outcome"):
            case "error":
                _close(env.runs, env.workers, effect)
                await reject_for_error(env.runs, effect, record_of(result.error))
            case "client_round":
                env.workers.yield_slots(effect)
                done = result.client_round
                if wrong := _defect(env.runs, effect, done):
                    _close(env.runs, env.workers, effect)
                    await reject(env.runs, effect, *wrong)
                else:
                    await report_lost_state(env.runs, effect, done)
                    await _collect(env, effect, done, looked, steps)
            case _:
                await env.workers.end_early(effect.run_id, effect.member, result)
    finally:
        steps.end()


def _defect(
    runs: LiveRuns, effect: TrainClient, done: worker_pb2.ClientRoundResult
) -> tuple[Cause, str] | None:
    """Return the cause and reason to reject the update; None if it counts."""
    q = spec_of(runs.job_of(effect.run_id, effect.party)).options.q
    wrong = defect(done.loss, done.num_steps, of_training(done.metrics))
    return wrong or defect_before(q, _loss_before(done)) or state_defect(runs, effect, done)


def _loss_before(done: worker_pb2.ClientRoundResult) -> float | None:
    return done.loss_before if done.HasField("loss_before") else None


async def _trained(
    env: EffectContext,
    effect: TrainClient,
    request: worker_pb2.ExecuteRequest,
    steps: RecordedRound,
) -> worker_pb2.ExecuteResult:
    """Have the client train; return the result. Abort if the round closes meanwhile."""
    base = effect.base.digest
    try:
        return await attend(env, effect.member, request, steps.listener, base=base)
    except asyncio.CancelledError:
        if not env.runs.is_due(effect):
            # The round has closed without the client, or the client has moved elsewhere.
            count_if_late(env.runs, effect)
            _abort(env.runs, env.workers, effect)
        raise


def _abort(runs: LiveRuns, workers: WorkerCalls, effect: TrainClient) -> None:
    """Have the worker abort the client's training and drop the update that it offers."""

    async def abort() -> None:
        await workers.link(effect.member).abort(_session(effect))

    runs.chores.do(abort(), "abort the training of a client")


Looked = asyncio.Future[tuple[SpoolEntry | None, int]]
"""The complete update left by a crash, if any, and the offset at which to resume."""


def _look(runs: LiveRuns, spool: Spool, effect: TrainClient) -> Looked:
    """Look for an earlier upload in the spool, and make the round's folder, while training."""
    key, source = _key(runs, effect), effect.member.incarnation
    looked: Looked = asyncio.ensure_future(asyncio.to_thread(spool.look, key, source))
    looked.add_done_callback(lambda done: done.cancelled() or done.exception())  # may not be asked
    return looked


def _key(runs: LiveRuns, effect: TrainClient) -> SpoolKey:
    of_round = effect.run_id, effect.party, effect.round_num
    return runs.spool_key(*of_round, effect.client, effect.attempt)


async def _collect(
    env: EffectContext,
    effect: TrainClient,
    result: worker_pb2.ClientRoundResult,
    looked: Looked,
    steps: RecordedRound,
) -> None:
    try:
        async with env.transfers.pulls:
            of_round = effect.run_id, effect.party, effect.round_num
            with env.transfers.together.member(of_round) as writing:
                entry = await _pull(env, effect, result, looked)
                state_digest = await kept_state(env, effect, _session(effect), result.state_digest)
        await writing.all_done()
        histories = await steps.rows(result)
    except asyncio.CancelledError:
        count_if_late(env.runs, effect)
        if not env.runs.is_due(effect):
            _abort(env.runs, env.workers, effect)
        raise
    except UpdateRejectedError as error:
        _close(env.runs, env.workers, effect)
        await reject(env.runs, effect, error.cause, error.reason)
        return
    failpoint("coordinator.round.pulled")
    _close(env.runs, env.workers, effect)
    received = UpdateReceived(
        party=effect.party,
        round_num=effect.round_num,
        client=effect.client,
        digest=entry.digest,
        num_samples=entry.num_samples,
        loss=math.nan if result.is_loss_withheld else result.loss,
        seconds=result.seconds,
        traffic=dict(sorted(result.traffic.items())),
        metrics=of_training(result.metrics),
        num_steps=max(1, result.num_steps),
        loss_before=_loss_before(result),
        num_applied_steps=(
            result.num_applied_steps if result.HasField("num_applied_steps") else None
        ),
        spent=spent_of(result),
        client_state=state_digest,
        attempt=effect.attempt,
    )
    await report_update(env.runs, effect, received, histories)


def _close(runs: LiveRuns, workers: WorkerCalls, effect: TrainClient) -> None:
    """Close the client's session: otherwise the worker keeps an update per simulated client."""
    closing = workers.link(effect.member).close_session(effect.run_id, _session(effect).ref)
    runs.chores.do(closing, "close the session of a client")


async def _pull(
    env: EffectContext,
    effect: TrainClient,
    result: worker_pb2.ClientRoundResult,
    looked: Looked,
) -> SpoolEntry:
    """Pull the update into the spool, unless a crash has left it there; return its entry."""
    done, offset = await looked
    if done is not None:
        return done
    expected, _ = await env.transfers.header(effect.base.digest)
    if effect.routed:
        job = env.runs.job_of(effect.run_id, effect.party)
        expected = masked_manifest(job, expected, effect.num_members)
    blobs, bases = env.transfers.blobs, [effect.base.digest]
    with closing(decoding_of(env.runs, blobs, effect, expected, bases)) as decoding:
        return await _pull_to_spool(env, effect, result, decoding, offset)


def _session(effect: TrainClient) -> WorkerSession:
    return WorkerSession(effect.member, effect.run_id, party_of(effect), effect.membership)


@contextmanager
def _announced(offset: int, manifests: list[Manifest]) -> Iterator[None]:
    """Context manager that rejects the update on an error in its manifest, which a retry would
    repeat. manifests: those received so far; the manifest comes first."""
    try:
        yield
    except (InvalidInputError, LimitError) as error:
        if manifests or offset or isinstance(error, OutOfRangeError):
            raise
        cause = Cause.SIZE if isinstance(error, LimitError) else Cause.LAYOUT
        raise UpdateRejectedError(cause, f"its manifest: {error}") from error


async def _pull_to_spool(
    env: EffectContext,
    effect: TrainClient,
    result: worker_pb2.ClientRoundResult,
    decoding: UpdateDecoding,
    offset: int,
) -> SpoolEntry:
    link = env.workers.link(effect.member)
    manifests: list[Manifest] = []
    writers: list[SpoolWriter] = []
    spool, limits = env.transfers.spool, env.transfers.limits

    def writer() -> SpoolWriter:  # opened in the thread that writes
        if not writers:
            source = effect.member.incarnation
            key, manifest = _key(env.runs, effect), manifests[0]
            writers.append(spool.open(key, manifest, source=source, before=decoding.known))
        return writers[0]

    def commit(writer: SpoolWriter) -> SpoolEntry:
        return writer.commit(decoding.expected, result.num_samples, decoding.check)

    offload = Offload(lambda offset, data: writer().write_at(offset, data))

    def accept(manifest: Manifest) -> Sink:
        manifests.append(manifest)
        decoding.check_size(manifest)
        return offload.write

    codecs = ("", codec_of(decoding.job))
    try:
        with _announced(offset, manifests):
            offered = None if offset else offered_update(link, result, limits, codecs)
            if offered is not None:
                accept(offered.manifest)
                await offload.take(0, offered.pieces)
                received(Purpose.UPDATE).num_bytes += offered.manifest.total_bytes
            else:
                calls = link.snapshot(_session(effect), effect.round_num)
                await pull(
                    calls,
                    accept,
                    limits=limits,
                    purpose=Purpose.UPDATE,
                    offset=offset,
                    codecs=codecs,
                    keep_up=offload.keep_up,
                    near=calls.near(offload.take),
                )
        await offload.finish()
        key = _key(env.runs, effect)
        return await asyncio.to_thread(
            lambda: commit_update(writer(), decoding, spool, key, commit)
        )
    finally:
        await offload.close()
        for opened in writers:
            if opened.is_open:  # the update is not whole; make durable the bytes that are here
                await asyncio.to_thread(opened.close)


# ---- Updates offered in files ----
#
# A worker on this machine offers the update together with the result of a client's round.


class OfferedUpdate(NamedTuple):
    """An update offered by a worker: its checked manifest, and its bytes, read on demand."""

    manifest: Manifest
    pieces: Iterator[memoryview]


def offered_update(
    link: WorkerLink, result: worker_pb2.ClientRoundResult, limits: Limits, codecs: Collection[str]
) -> OfferedUpdate | None:
    """Return the offered update; None if there is none, or it cannot be read from here.

    Raises InvalidInputError and LimitError for a manifest that breaks a rule or a limit.
    """
    file = offered(result) if link.place else None  # no other machine was asked for files
    if file is None:
        return None
    try:
        message = tensor_pb2.Manifest.FromString(result.manifest)
    except DecodeError as error:
        raise InvalidInputError.at("manifest", f"is none: {error}") from error
    manifest = from_proto(message, limits, Purpose.UPDATE, codecs)
    try:
        pieces = readable_copy(file, manifest.total_bytes)
    except UnreadableFileError:
        link.leave()
        return None
    return None if pieces is None else OfferedUpdate(manifest, pieces)


# ---- Committing an update ----
#
# An update in the spool is committed as it was sent, or decoded.
#
# Updates of the vsa codec have no windows and are therefore decoded. Such an update is small and
# is held in memory; the decoded data take its place, so the fold treats it as an update that was
# not coded.

Commit = Callable[[SpoolWriter], SpoolEntry]


def commit_update(
    arrived: SpoolWriter, decoding: UpdateDecoding, spool: Spool, key: SpoolKey, commit: Commit
) -> SpoolEntry:
    """Check and commit the update `key`, the only one of `decoding`, to the spool. Blocks.

    Raises UpdateRejectedError, after which nothing of the update remains.
    """
    if not arrived.upload.manifest.codec or decoding.has_windows:
        return commit(arrived)
    data, expected = arrived.read_back(), decoding.expected
    try:
        layout = decoding.layout(arrived.upload.manifest)
        begin, size = layout.payload.offset, layout.payload.size_bytes
        with np.errstate(all="ignore"):  # the spool rejects numbers that are not finite
            payload_key = update_key(decoding.job, key.round_num, key.client)
            decoded = layout.codec.decode(data[begin : begin + size], payload_key)
    except UpdateRejectedError:
        arrived.discard()
        raise
    except ValueError as error:
        arrived.discard()
        raise UpdateRejectedError(Cause.CODEC, str(error)) from error
    arrived.close()
    moves = dict(zip(layout.places, decoded, strict=True))
    manifest = replace(expected, purpose=Purpose.UPDATE, metadata={}, digest="")
    source = f"decoded {arrived.upload.source}"
    writer = spool.open(key, manifest, source=source, before=decoding.known)
    try:
        for spec in expected.stored():
            if spec.name in moves:
                before = decoding.before(0, spec.offset, spec.size_bytes).view("<f4")
                with np.errstate(all="ignore"):
                    after = (before + moves[spec.name]).view(np.uint8)
            else:
                given = layout.given[spec.name]
                after = data[given.offset : given.offset + given.size_bytes]
            writer.write_at(spec.offset, after.data)
        return commit(writer)
    finally:
        writer.close()
