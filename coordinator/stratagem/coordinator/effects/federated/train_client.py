"""TrainClient: one client's part of a federated round.

The worker trains from the global state; then its slot is free and the update is pulled into the
spool, checked while it arrives. A client whose update is wrong is rejected alone, with the reason.
"""

import asyncio
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager

from stratagem.common.base.errors import InvalidInputError, LimitError, OutOfRangeError
from stratagem.common.privacy.noise import SecretLostError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.tensor_transfer import pull
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose
from stratagem.common.tensors.stream import Sink, received
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.facts import RunFailed, UpdateReceived
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.execute_plan import attend, record_of
from stratagem.coordinator.effects.federated.aggregate_round import decoding_of
from stratagem.coordinator.effects.federated.client_failures import (
    defect,
    defect_before,
    reject,
    reject_for_error,
)
from stratagem.coordinator.effects.federated.client_rows import row_privacy, spent_of
from stratagem.coordinator.effects.federated.client_states import (
    client_state_ref,
    kept_rounds,
    kept_state,
    report_lost_state,
    state_defect,
)
from stratagem.coordinator.effects.federated.client_steps import RecordedRound, party_of
from stratagem.coordinator.effects.federated.coded_client_update import commit_update
from stratagem.coordinator.effects.federated.late_counts import count_if_late, report_update
from stratagem.coordinator.effects.federated.offered_update import offered_update
from stratagem.coordinator.effects.secure_aggregation.masked_sum import masked_manifest
from stratagem.coordinator.effects.synchronous.coded_gradients import codec_of
from stratagem.coordinator.effects.synchronous.run_segment import of_training
from stratagem.coordinator.runtime.worker_links import WorkerSession, state_ref
from stratagem.coordinator.strategies.federated.federated_run import spec_of
from stratagem.coordinator.updates.spool_keys import SpoolKey
from stratagem.coordinator.updates.spool_upload import SpoolEntry, SpoolWriter
from stratagem.coordinator.updates.stream_offload import Offload
from stratagem.coordinator.updates.update_checks import UpdateRejectedError
from stratagem.coordinator.updates.update_decoding import UpdateDecoding
from stratagem.v1 import worker_pb2


async def train_client(env: EffectContext, effect: TrainClient) -> None:
    """Train, pull, and report UpdateReceived or UpdateRejected."""
    client, num_clients = effect.share or (effect.client, effect.num_clients)
    plan = worker_pb2.ClientRoundPlan(
        base=state_ref(effect.base),
        client=client,
        num_clients=num_clients,
        local_epochs=effect.local_epochs,
        num_lr_reductions=effect.num_lr_reductions,
        clip_norm=effect.clip_norm,
        state=client_state_ref(effect.state),
        kept_rounds=kept_rounds(env, effect),
        secure_mask=_secure_mask(effect),
        place=env.links.to(effect.member, env.state).place,
    )
    if effect.rows is not None:
        try:
            plan.rows.CopyFrom(await env.in_thread(lambda: row_privacy(env, effect)))
        except (SecretLostError, InvalidInputError) as error:
            reason = f"round {effect.round_num}: {error}"
            await env.report(effect.run_id, RunFailed(reason=reason))
            return
    request = env.request(effect.party, _session(effect), effect.round_num, client_round=plan)
    looked, steps = _look(env, effect), RecordedRound(env, effect, request)
    try:
        result = await _trained(env, effect, request, steps)
        match result.WhichOneof("outcome"):
            case "error":
                _close(env, effect)
                await reject_for_error(env, effect, record_of(result.error))
            case "client_round":
                env.yield_slots(effect)
                done = result.client_round
                if wrong := _defect(env, effect, done):
                    _close(env, effect)
                    await reject(env, effect, *wrong)
                else:
                    await report_lost_state(env, effect, done)
                    await _collect(env, effect, done, looked, steps)
            case _:
                await env.end_early(effect.run_id, effect.member, result)
    finally:
        steps.end()


def _defect(
    env: EffectContext, effect: TrainClient, done: worker_pb2.ClientRoundResult
) -> tuple[Cause, str] | None:
    """Return why the update cannot count."""
    q = spec_of(env.job_of(effect.run_id, effect.party)).options.q
    wrong = defect(done.loss, done.num_steps, of_training(done.metrics))
    return wrong or defect_before(q, _loss_before(done)) or state_defect(env, effect, done)


def _loss_before(done: worker_pb2.ClientRoundResult) -> float | None:
    return done.loss_before if done.HasField("loss_before") else None


def _secure_mask(effect: TrainClient) -> worker_pb2.SecureMask | None:
    if not effect.routed:
        return None
    return worker_pb2.SecureMask(attempt=effect.attempt, routed=effect.routed)


async def _trained(
    env: EffectContext,
    effect: TrainClient,
    request: worker_pb2.ExecuteRequest,
    steps: RecordedRound,
) -> worker_pb2.ExecuteResult:
    """Return what has become of the client's training."""
    base = effect.base.digest
    try:
        return await attend(env, effect.member, request, steps.listener, base=base)
    except asyncio.CancelledError:
        if not env.is_due(effect):  # the round has closed without it, or it has moved elsewhere
            count_if_late(env, effect)
            _abort(env, effect)
        raise


def _abort(env: EffectContext, effect: TrainClient) -> None:
    """Have the worker end the client's training, and close the update that it offers."""

    async def abort() -> None:
        await env.links.to(effect.member, env.state).abort(_session(effect))

    env.chores.do(abort(), "abort the training of a client")


Looked = asyncio.Future[tuple[SpoolEntry | None, int]]
"""The update, where a crash has left it in the spool complete; and the offset to request it
from."""


def _look(env: EffectContext, effect: TrainClient) -> Looked:
    """Look into the spool, and make the round's folder, while the client trains."""
    key, source = _key(env, effect), effect.member.incarnation
    looked: Looked = asyncio.ensure_future(env.in_thread(lambda: env.spool.look(key, source)))
    looked.add_done_callback(lambda done: done.cancelled() or done.exception())  # may not be asked
    return looked


def _key(env: EffectContext, effect: TrainClient) -> SpoolKey:
    of_round = effect.run_id, effect.party, effect.round_num
    return env.spool_key(*of_round, effect.client, effect.attempt)


async def _collect(
    env: EffectContext,
    effect: TrainClient,
    result: worker_pb2.ClientRoundResult,
    looked: Looked,
    steps: RecordedRound,
) -> None:
    try:
        async with env.pulls:
            of_round = effect.run_id, effect.party, effect.round_num
            with env.together.member(of_round) as writing:
                entry = await _pull(env, effect, result, looked)
                kept = await kept_state(env, effect, _session(effect), result.state_digest)
        await writing.all_done()
        histories = await steps.rows(result)
    except asyncio.CancelledError:
        count_if_late(env, effect)
        if not env.is_due(effect):
            _abort(env, effect)
        raise
    except UpdateRejectedError as error:
        _close(env, effect)
        await reject(env, effect, error.cause, error.reason)
        return
    failpoint("coordinator.round.pulled")
    _close(env, effect)
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
        client_state=kept,
        attempt=effect.attempt,
    )
    await report_update(env, effect, received, histories)


def _close(env: EffectContext, effect: TrainClient) -> None:
    """Close the client's session: the worker would keep one update of every client that it
    plays."""
    link = env.links.to(effect.member, env.state)
    env.chores.do(
        link.close_session(effect.run_id, _session(effect).ref), "close the session of a client"
    )


async def _pull(
    env: EffectContext,
    effect: TrainClient,
    result: worker_pb2.ClientRoundResult,
    looked: Looked,
) -> SpoolEntry:
    """Return the update in the spool; one that a crash left there complete is taken as it is."""
    done, offset = await looked
    if done is not None:
        return done
    expected, _ = await env.header(effect.base.digest)
    if effect.routed:
        expected = masked_manifest(env, effect.run_id, effect.party, expected, effect.num_members)
    with closing(decoding_of(env, effect, expected, [effect.base.digest])) as decoding:
        return await _pull_to_spool(env, effect, result, decoding, offset)


def _session(effect: TrainClient) -> WorkerSession:
    return WorkerSession(effect.member, effect.run_id, party_of(effect), effect.membership)


@contextmanager
def _announced(offset: int, manifests: list[Manifest]) -> Iterator[None]:
    """Refuses an update whose manifest, the first thing that comes, breaks a rule or a limit: it
    would do so again. manifests: those that have come."""
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
    link = env.links.to(effect.member, env.state)
    manifests: list[Manifest] = []
    writers: list[SpoolWriter] = []

    def writer() -> SpoolWriter:  # opened in the thread that writes
        if not writers:
            source = effect.member.incarnation
            key, manifest = _key(env, effect), manifests[0]
            writers.append(env.spool.open(key, manifest, source=source, before=decoding.known))
        return writers[0]

    def commit(writer: SpoolWriter) -> SpoolEntry:
        return writer.commit(decoding.expected, result.num_samples, decoding.check)

    offload = Offload(lambda offset, data: writer().write_at(offset, data))

    def accept(manifest: Manifest) -> Sink:
        manifests.append(manifest)
        decoding.check_size(manifest)
        return offload.write

    limits = Limits(max_total_bytes=env.settings.max_state_bytes)
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
        key = _key(env, effect)
        return await env.in_thread(
            lambda: commit_update(writer(), decoding, env.spool, key, commit)
        )
    finally:
        await offload.close()
        for opened in writers:
            if opened.is_open:  # the update is not whole, and what is here is made durable
                await env.in_thread(opened.close)
