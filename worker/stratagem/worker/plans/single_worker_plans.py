"""The plans that need no party: build, and one client's round.

Each is a function from a plan to its result, run in the torch thread.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Final

from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, RefusedBySiteError
from stratagem.common.base.ids import Party
from stratagem.common.base.wording import values_text
from stratagem.common.job import InitialSpec, JobSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.common.secure_aggregation.transcripts import SecureRound
from stratagem.common.strategy import Federated
from stratagem.common.tensors.manifest import WITHIN_NORM, Purpose
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.data.data_sources import rows_to_compare
from stratagem.worker.engine import ClientRunner
from stratagem.worker.engine.privacy.clip_update import clipped_change
from stratagem.worker.engine.privacy.row_checks import check_rows_apart
from stratagem.worker.engine.step.state_format import (
    given_model_state,
    load_model_state,
    model_state,
)
from stratagem.worker.engine.trainers.federated_client import ClientRound, RoundSettings
from stratagem.worker.plans.built_job_checks import check_built, check_resumed_state
from stratagem.worker.plans.client_history import ClientHistory
from stratagem.worker.plans.client_state import (
    check_personal,
    keep,
    kept_state,
    own_model,
    personal,
    shared,
)
from stratagem.worker.plans.client_update_codec import coded_update
from stratagem.worker.plans.row_round import begin_rows
from stratagem.worker.plans.structural_fields import structural
from stratagem.worker.secure_aggregation.masked_update import masked_update
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.profiling import StepRecorder
from stratagem.worker.session.session_states import Frozen, freeze
from stratagem.worker.session.work_statistics import ClientSteps

_MODEL: Final = "model/"
NUM_UPDATES: Final = 1
"""A worker may play many clients, so each keeps its latest update only."""
MAX_RUNNERS: Final = 4
"""Jobs of one run that keep a model for their clients: each costs one."""


def build(work: ExecutionContext, plan: pb.BuildPlan) -> pb.BuildResult:
    """Build the model from the seed, or load the state that the job begins from; its state waits
    as the snapshot of segment 0."""
    work.set_activity("building")
    initial = work.job.initial
    make = work.new_inference if work.job.only_evaluates else work.new_trainer
    built = make(fresh=initial is None)
    check_built(work.job, built.model, built.setup.num_rows)
    check_rows_apart(work.job, built.model)
    check_personal(work.job, built.model)
    if initial is not None:
        metadata = _begin_from(work, initial, built.model)
        if initial.resume:
            check_resumed_state(work.job, initial, metadata, built.num_steps)
    tensors, metadata = built.copy_state()
    if isinstance(work.job.strategy, Federated):
        tensors = shared(work.job, tensors)
        metadata |= averaged(built.model, tensors)
        if work.job.privacy is not None and work.job.privacy.unit == "client":
            metadata |= frozen(built.model)
    work.post(work.states.keep, work.segment, freeze(tensors, metadata))
    failpoint("worker.build.done")
    return pb.BuildResult(
        num_rows=built.setup.num_rows,
        num_parameters=sum(param.numel() for param in built.model.parameters()),
        layout_digest=layout_digest(tensors),
        structural=structural(work, built.model, plan.variants),
        rows=rows_to_compare(work.job, work.entrypoints, built.setup.data, work.numerics),
    )


def _begin_from(
    work: ExecutionContext, initial: InitialSpec, model: nn.Module
) -> Mapping[str, str]:
    """Load the model of the state that the job begins from; return the metadata of the state."""
    assert initial.digest is not None  # the client has found it
    tensors, metadata = work.blob(initial.digest)
    given = given_model_state(tensors, model)
    if lacking := personal(work.job, model_state(model)):
        given = {**lacking, **given}  # the result of such a run has none of them
    try:
        load_model_state(model, given, where="initial")
    except InvalidInputError as error:
        if initial.trained_with is None:
            raise
        why = f"the state was trained with {values_text(initial.trained_with)}; give the job these"
        violations = [
            replace(violation, message=f"{violation.message}; {why}")
            for violation in error.violations
        ]
        raise InvalidInputError(violations=violations) from None
    return metadata


def client_round(work: ExecutionContext, plan: pb.ClientRoundPlan) -> pb.ClientRoundResult:
    """Train one client from the base; the update waits as the snapshot of the round."""
    started_s = time.monotonic()
    work.set_activity("training")
    base, _ = work.blob(plan.base.digest)
    loss_before = _loss_before(work, base, plan)
    kept = kept_state(work, plan, base)
    with StepRecorder(work) as recorder:
        steps, timer = count(1), ClientSteps(work.host.stats)

        def before_step() -> None:
            work.control.check()
            number = next(steps)
            recorder.begin(number, 2)
            timer.begin_step()
            work.host.last_words.step(number)

        runner = _runner(work)
        own = None
        if work.job.privacy is not None and work.job.privacy.unit == "row":
            own = begin_rows(work, plan, runner.num_rows(plan.client, plan.num_clients))
        history = ClientHistory(work, runner.steps_in_round(plan.client, plan.num_clients))
        done = runner.run(
            kept.start,
            plan.client,
            plan.num_clients,
            work.segment,
            before_step,
            after_step=history.add,
            settings=RoundSettings(plan.num_lr_reductions, None if own is None else own.noise),
        )
        model = own_model(work, runner, plan, base, kept)
        timer.end(done.num_samples * _local_epochs(work.job))
    work.control.check()
    done, state_digest = keep(work, done, plan, model)
    if isinstance(work.job.strategy, Federated) and work.job.strategy.options.secure_aggregation:
        update, result = _masked(work, done, base, plan), _nothing_of(done)
    elif plan.clip_norm:
        update, result = _private(done, base, plan, work.segment), _nothing_of(done)
    elif own is not None:
        update, result = _plain(work, done, plan), own.result(done)
    else:
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
    if work.admission is not None:
        costs = {} if own is None else own.costs
        work.admission.update(update.manifest, update.buffers, done.num_samples, costs)
    work.post(work.states.keep, work.segment, update, NUM_UPDATES)
    result.state_digest, result.state_lost = state_digest, kept.lost
    result.num_history_parts, result.history_digest = history.end()
    failpoint("worker.round.trained")
    return result


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


def averaged(model: nn.Module, sent: Mapping[str, Tensor]) -> dict[str, str]:
    """Return metadata that name the floating-point tensors of those that are sent that no server
    optimizer may change.

    These are buffers and frozen parameters. Empty where there are none.
    """
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    names = [
        f"{_MODEL}{name}"
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.is_floating_point() and name not in trained and not tensor.requires_grad
    ]
    names = [name for name in names if name in sent]
    return {"averaged": json.dumps(sorted(names))} if names else {}


def frozen(model: nn.Module) -> dict[str, str]:
    """Return metadata that name the parameters that no client changes: they get no noise. Empty
    where there are none."""
    live = model.state_dict(keep_vars=True)
    names = [
        f"{_MODEL}{name}"
        for name, tensor in live.items()
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    ]
    return {"frozen": json.dumps(sorted(names))} if names else {}


def layout_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the model's layout: name, dtype and shape of all its tensors, sorted."""
    lines = [
        f"{name.removeprefix(_MODEL)} {str(tensor.dtype).removeprefix('torch.')} "
        f"{tuple(tensor.shape)}"
        for name, tensor in sorted(tensors.items())
        if name.startswith(_MODEL)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
