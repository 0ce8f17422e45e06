"""The plan of one client's round: train from the global state, and keep the update to be fetched.

Run in the torch thread.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from torch import Tensor

from stratagem.common.base.errors import RefusedBySiteError
from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.common.secure.secrets import SecureRound
from stratagem.common.strategy import Federated
from stratagem.common.tensors.local_files import MAX_COPY_BYTES, copy_of, is_near
from stratagem.common.tensors.manifest import WITHIN_NORM, Purpose, to_proto
from stratagem.common.tensors.stream import sent
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine.privacy.clip_update import clipped_change
from stratagem.worker.engine.trainers.federated_client import (
    ClientRound,
    ClientRunner,
    RoundSettings,
)
from stratagem.worker.plans.client_history import ClientHistory
from stratagem.worker.plans.federated.client_state import RoundStart, keep, kept_state, own_model
from stratagem.worker.plans.federated.client_update_codec import coded_update
from stratagem.worker.plans.federated.control_variates import correction, is_controlled
from stratagem.worker.plans.federated.row_round import RowRound, begin_rows
from stratagem.worker.secure_aggregation.masked_update import masked_update
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.profiling import StepRecorder
from stratagem.worker.session.session_states import Frozen, freeze
from stratagem.worker.session.work_statistics import ClientSteps

NUM_UPDATES: Final = 1
"""A worker may play many clients, so each keeps its latest update only."""
MAX_MANIFEST_BYTES: Final = 2**20
"""Of a manifest that is told with a result: a message has its limit."""
MAX_RUNNERS: Final = 4
"""Jobs of one run that keep a model for their clients: each costs one."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """A client's training of a round, of which nothing has been told yet."""

    done: ClientRound
    own_model: Mapping[str, Tensor]
    """The client's own, where clients have one."""
    rows: RowRound | None
    """Of a round whose rows are protected."""
    history: ClientHistory


def client_round(work: ExecutionContext, plan: pb.ClientRoundPlan) -> pb.ClientRoundResult:
    """Train one client from the base; the update waits as the snapshot of the round."""
    started_s = time.monotonic()
    work.set_activity("training")
    federation = work.key.party.rpartition("/")[0]
    work.post(work.host.blobs.note_federation, work.key.run_id, federation)
    base, _ = work.blob(plan.base.digest)
    loss_before = _loss_before(work, base, plan)
    kept = kept_state(work, plan, base)
    trained = _train(work, plan, base, kept)
    work.control.check()
    done, state_digest = keep(work, trained.done, plan, trained.own_model, base, kept)
    told = _told_of_nothing(work, done, base, plan, trained.rows)
    if told is None:
        update, traffic = _coded(work, done, base, plan.client) or (_plain(work, done, plan), {})
        result = pb.ClientRoundResult(
            num_samples=done.num_samples,
            loss=done.loss,
            seconds=time.monotonic() - started_s,
            num_steps=done.num_steps,
            metrics=done.metrics,
            traffic=traffic,
            loss_before=loss_before,
            num_applied_steps=done.num_applied if _is_normalized(work.job) else None,
        )
    else:
        update, result = told
    if work.admission is not None:
        costs = {} if trained.rows is None else trained.rows.costs
        work.admission.update(update.manifest, update.buffers, done.num_samples, costs)
    elif is_near(plan.place):
        update = _offered(update, result)
        work.control.check()  # of an update that nobody waits for no copy stays open
    work.post(work.states.keep, work.segment, update, NUM_UPDATES)
    result.state_digest, result.state_lost = state_digest, kept.lost
    result.num_history_parts, result.history_digest = trained.history.end()
    failpoint("worker.round.trained")
    return result


def _offered(update: Frozen, result: pb.ClientRoundResult) -> Frozen:
    """Offer a small update with the result: nobody has to ask for it then."""
    manifest = to_proto(update.manifest).SerializeToString()
    if update.manifest.total_bytes > MAX_COPY_BYTES or len(manifest) > MAX_MANIFEST_BYTES:
        return update
    copy = copy_of(update.buffers)
    if copy is None:
        return update
    result.manifest = manifest
    result.file.CopyFrom(copy.offer())
    sent(Purpose.UPDATE).num_bytes += update.manifest.total_bytes
    return replace(update, copy=copy)


def _train(
    work: ExecutionContext,
    plan: pb.ClientRoundPlan,
    base: Mapping[str, Tensor],
    kept: RoundStart,
) -> _Trained:
    """Train what is sent, and then the client's own model; kept: what the client begins with."""
    with StepRecorder(work) as recorder:
        timer = ClientSteps(work.host.stats)
        runner, rows = _runner(work), None
        num_clients = plan.num_clients
        if work.job.privacy is not None and work.job.privacy.unit == "row":
            rows = begin_rows(work, plan, runner.num_rows(plan.client, num_clients))
        history = ClientHistory(work, runner.steps_in_round(plan.client, num_clients))
        settings = RoundSettings(
            plan.num_lr_reductions,
            None if rows is None else rows.noise,
            correction=correction(base, kept.own) if is_controlled(work.job) else None,
        )
        done = runner.run(
            kept.start,
            plan.client,
            num_clients,
            work.segment,
            _before_step(work, recorder, timer),
            after_step=history.add,
            settings=settings,
        )
        model = own_model(work, runner, plan, base, kept)
        timer.end(done.num_samples * _local_epochs(work.job))
    return _Trained(done, model, rows, history)


def _before_step(
    work: ExecutionContext, recorder: StepRecorder, timer: ClientSteps
) -> Callable[[], None]:
    """Return what is to be called before each step of a round."""
    steps = count(1)

    def before_step() -> None:
        work.control.check()
        number = next(steps)
        recorder.begin(number, 2)
        timer.begin_step()
        work.host.last_words.step(number)

    return before_step


def _told_of_nothing(
    work: ExecutionContext,
    done: ClientRound,
    base: Mapping[str, Tensor],
    plan: pb.ClientRoundPlan,
    rows: RowRound | None,
) -> tuple[Frozen, pb.ClientRoundResult] | None:
    """Return the update of a masked or protected round, and the result, which tells nothing that
    its rows decide; None of any other round."""
    if isinstance(work.job.strategy, Federated) and work.job.strategy.options.secure_aggregation:
        return _masked(work, done, base, plan), _nothing_of(done)
    if plan.clip_norm:
        return _private(done, base, plan, work.segment), _nothing_of(done)
    if rows is not None:
        return _plain(work, done, plan), rows.result(done)
    return None


def _is_normalized(job: JobSpec) -> bool:
    """Return True where the update is divided by how far its steps go."""
    return isinstance(job.strategy, Federated) and job.strategy.options.normalize is not None


def _loss_before(
    work: ExecutionContext, base: Mapping[str, Tensor], plan: pb.ClientRoundPlan
) -> float | None:
    """Return the loss of the base over the client's rows, where the job weighs updates by it."""
    strategy = work.job.strategy
    if not isinstance(strategy, Federated) or strategy.options.q is None:
        return None
    client, num_clients = plan.client, plan.num_clients
    return _runner(work).loss_before(base, client, num_clients, work.control.check)


def _private(
    done: ClientRound, base: Mapping[str, Tensor], plan: pb.ClientRoundPlan, round_num: int
) -> Frozen:
    """Return the clipped change as the update, and with it that it was clipped or not."""
    change = clipped_change(base, done.tensors, plan.clip_norm)
    metadata = {
        "round": str(round_num),
        "client": str(plan.client),
        WITHIN_NORM: str(int(change.is_within)),
    }
    return freeze(change.tensors, metadata, Purpose.UPDATE, weight=1.0)


def _masked(
    work: ExecutionContext, done: ClientRound, base: Mapping[str, Tensor], plan: pb.ClientRoundPlan
) -> Frozen:
    """Return the masked change as the update. Raises RefusedBySiteError where the client has no
    secrets of this round, or has used them for another update."""
    if not plan.HasField("secure_mask"):
        raise RefusedBySiteError("secure_aggregation: the plan asks for an update without masks")
    party = Party(work.key.party.rpartition("/")[0])
    of_round = SecureRound(work.key.run_id, party, work.segment, plan.secure_mask.attempt)
    routed = tuple(plan.secure_mask.routed)
    secure = work.host.secure
    masking = secure.masking(of_round, plan.client, work.request.job_json, routed)
    weight = masking.spec.weight(done.num_samples)
    masked = masked_update(base, done.tensors, masking, weight)
    secure.keep_update(of_round, plan.client, routed, masked.digest)
    return freeze(masked.tensors, {}, Purpose.UPDATE, weight=1.0)


def _nothing_of(done: ClientRound) -> pb.ClientRoundResult:
    """Return the result of a private or a masked client: its loss, its rows and the time it took
    stay here, and only that it has learned nothing is told, as a loss that is not finite."""
    num_skipped = done.metrics.get("skipped_steps", 0)
    has_learned = math.isfinite(done.loss) and num_skipped < done.num_steps
    loss = 0.0 if has_learned else math.nan
    return pb.ClientRoundResult(num_samples=1, loss=loss, num_steps=1, is_loss_withheld=True)


def _plain(work: ExecutionContext, done: ClientRound, plan: pb.ClientRoundPlan) -> Frozen:
    return freeze(
        {name: tensor.detach().cpu().contiguous() for name, tensor in done.tensors.items()},
        {"round": str(work.segment), "client": str(plan.client)},
        Purpose.UPDATE,
        float(done.num_samples),
    )


def _local_epochs(job: JobSpec) -> int:
    return job.strategy.options.local_epochs if isinstance(job.strategy, Federated) else 1


def _coded(
    work: ExecutionContext, done: ClientRound, base: Mapping[str, Tensor], client: int
) -> tuple[Frozen, dict[str, int]] | None:
    spec = work.job.compression
    if spec is None or spec.codec == "none":
        return None
    return coded_update(work.job, done, base, work.segment, client, work.numerics)


def _runner(work: ExecutionContext) -> ClientRunner:
    """Return the runner of the job: one model and the data serve all its clients on this worker.

    Parties of a run may have jobs of their own: members of a population, with other settings.
    """
    runners, text = work.run_cache.clients, work.request.job_json + work.data_version
    if text not in runners:
        if len(runners) == MAX_RUNNERS:
            runners.popitem(last=False)
        runners[text] = ClientRunner(
            work.job, work.entrypoints, work.host.device, work.sources(), work.numerics
        )
        work.warn(runners[text].notes)
    runners.move_to_end(text)
    return runners[text]
