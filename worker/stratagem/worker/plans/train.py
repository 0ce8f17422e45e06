"""Train to a step with the other members, through every change of the party (TrainPlan).

The loop serves all kinds of trainer: join the party, step until the end, and when the exchange
fails leave the party, report it and wait for the next view. A step is applied by all members or
repeated, so nothing is undone here. Members that are sole copies of their state drop it, and the
coordinator returns the party to its last commit. It frees the torch thread while it waits.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import structlog
from torch import Tensor

from stratagem.common.base.errors import (
    IntegrityError,
    StratagemError,
    UnavailableError,
    UserCodeError,
)
from stratagem.common.numerics.rules import REFUSES_INFINITE
from stratagem.common.numerics.verification import VERIFIER
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import Custom, Federated, are_models_apart
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import (
    Batch,
    EvaluationPart,
    EvaluationShare,
    Joined,
    LocalStepsTrainer,
    MemberTrainer,
    SegmentSummary,
    StepReport,
    Trainer,
)
from stratagem.worker.engine.callbacks import NO_ANSWER, Callbacks, StepAnswer, StepView
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.host.stalls import moved
from stratagem.worker.mesh.shm import UnshareableError
from stratagem.worker.objectives.evaluator import Evaluator
from stratagem.worker.objectives.own_metrics import (
    LAYOUT,
    SummedState,
    from_named,
    make_own_metrics,
    named_tensors,
)
from stratagem.worker.party.join import give_up, join
from stratagem.worker.phases import TrainingPhase
from stratagem.worker.plans.history import StepHistory
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.control import DRAINED, MemberView, PlanStopped, ViewChanged
from stratagem.worker.session.finite import diverged, parameters_of
from stratagem.worker.session.profiling import EVALUATING, StepRecorder
from stratagem.worker.session.states import freeze

# ---- Train plan ----

PROGRESS_INTERVAL_S: Final = 0.1


@dataclass(slots=True)
class Segment:
    """The progress of one execution in its segment, kept across changes of the membership view."""

    started_s: float = field(default_factory=time.monotonic)
    num_redone_steps: int = 0
    is_stepping: bool = False
    step_began_s: float = 0.0
    num_rows: int = 0
    reported_s: float = 0.0
    busy_s: float = 0.0
    """Seconds of computation of pipeline stages since the latest progress report."""
    span_s: float = 0.0
    num_timed: int = 0
    """Number of steps since the latest progress report."""
    engine: str = ""
    stop_reason: str = ""
    """The reason if the user's code has ended the training; else ""."""
    history: StepHistory | None = None
    """Records the steps under the present membership view."""
    summary: SegmentSummary | None = None
    """The summary of the segment; None until it has ended and its snapshot is taken."""
    divided_at: int = -1
    """The membership whose members hold the snapshot's slices; -1 if it is not divided."""
    kept: str = ""
    """SHA-256 of the file to which this member has written what only it holds; "" without one."""
    streams: dict[int, str] = field(default_factory=dict)
    """Read positions (marks) of streams of rows at the end, by stream."""
    evaluated: dict[Batch, EvaluationPart] = field(default_factory=dict)
    """The sums of each evaluated batch; the next membership view may request them again."""
    outputs: dict[Batch, dict[str, Tensor]] = field(default_factory=dict)
    """The model's outputs by split and batch, if predictions are requested."""


def train(
    work: ExecutionContext, plan: pb.TrainPlan, segment: Segment
) -> tuple[pb.ExecuteResult, int]:
    """Train to plan.to_step, through all membership views; return (result, its membership)."""
    holding = work.holding
    holding.begin(plan.lineage, work.segment)
    view = work.control.view
    while True:
        try:
            result = _conclude(work, plan, view, segment, _train_under(work, plan, view, segment))
            return pb.ExecuteResult(train=result), view.membership
        except ViewChanged:
            pass
        except (ExchangeError, UnavailableError, IntegrityError) as error:
            segment.num_redone_steps += int(segment.is_stepping)
            segment.is_stepping = False
            if holding.trainer is not None and holding.trainer.is_sole_copy:
                holding.drop()  # others may have applied a step that this member has not
            work.control.check()
            with suppress(ViewChanged):  # the coordinator knows already
                give_up(work, view, str(error))
        view = work.control.view_after(view.membership)


def _train_under(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, segment: Segment
) -> Joined:
    """Join the party and train to plan.to_step, or until the membership view is outdated."""
    held_step, mesh = work.holding.applied_step, work.host.mesh
    if held_step is not None and held_step > plan.to_step:
        # The party has returned to an earlier commit; the state here is ahead of it.
        work.holding.drop()
    try:
        joined = join(work, plan, view)
        _take_steps(work, plan, view, segment, joined)
    except UnshareableError as error:
        mesh.sharing_fails(error)
        raise
    if joined.exchange.shares_memory:
        mesh.sharing_works()
    failpoint("worker.segment.finished")
    return joined


def _take_steps(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, segment: Segment, joined: Joined
) -> None:
    """Make steps up to plan.to_step while the membership view is the current one."""
    trainer, exchange = joined
    segment.engine = exchange.name
    trainer.lower_rates(plan.num_lr_reductions)
    work.set_activity("training")
    trainer.expect(view.me.shards, plan.num_shards, plan.to_step)
    late, work.holding.late = work.holding.late, []
    segment.history = StepHistory(work, plan, view, trainer.step)
    for report in late:
        _account(work, plan, segment, report)
        _leave_to_show(work, trainer, report)
    listener = StepListener(work, view, trainer.callbacks)
    with StepRecorder(work) as recorder:
        while trainer.step < plan.to_step:
            _look_up(work, plan, view)
            recorder.begin(trainer.step + 1, plan.to_step - trainer.step)
            stop = work.control.is_draining
            segment.is_stepping = True
            segment.step_began_s = time.perf_counter()
            report = trainer.train_step(
                exchange, view.me.shards, plan.num_shards, stop=stop, answer=listener.answer
            )
            segment.is_stepping = False
            if report.is_end:
                segment.stop_reason = STOPPED
                return
            segment.engine = exchange.name  # another schedule may have been chosen
            _account(work, plan, segment, report)
            _end_offer(work, report)
            if report.is_torn:
                _leave_to_show(work, trainer, report)
                raise ExchangeError("the exchange ended before all parameters of a step came")
            listener.after(report)
            if view.rank == 0:
                work.warn(report.news)
            if report.stop and report.step < plan.to_step:
                # All members stop after this step. Those that stay continue under the next view.
                work.control.check()
                raise PlanStopped(DRAINED) if stop else ViewChanged
    if listener.answer.wants_end:
        segment.stop_reason = STOPPED


def _leave_to_show(work: ExecutionContext, trainer: MemberTrainer[Any], report: StepReport) -> None:
    """Keep a step's report, so that on_step is called under the next membership view: at present
    some parameters are still those before the step."""
    if trainer.callbacks.sees_steps:
        work.holding.tally.latest = report.numbers


def _look_up(work: ExecutionContext, plan: pb.TrainPlan, view: MemberView) -> None:
    """Check that plan and view are still current, between steps. Raises PlanStopped or
    ViewChanged."""
    work.control.check()
    if work.control.view.membership != view.membership:
        raise ViewChanged
    # The other members stop after the same step, but nodes and replicas have no common step.
    is_alone = view.size == 1 or are_models_apart(work.job.strategy)
    if work.control.is_draining and is_alone:
        raise PlanStopped(DRAINED)


def _end_offer(work: ExecutionContext, report: StepReport) -> None:
    """Withdraw the state offered to members that are behind, after a step of all members."""
    if work.holding.is_offering and report.phase != TrainingPhase.PREDICT:
        work.holding.is_offering = False
        work.holding.kept_slices = None
        work.post(work.states.drop_live)


def _account(
    work: ExecutionContext, plan: pb.TrainPlan, segment: Segment, report: StepReport
) -> None:
    """Add an applied step to the sums of the segment, and report progress at intervals."""
    tally = work.holding.tally
    tally.add(report)
    segment.num_rows += report.num_rows
    seconds = time.perf_counter() - segment.step_began_s
    work.host.stats.add_step(seconds, report)
    if segment.history is not None:
        segment.history.add(report, seconds)
    segment.busy_s += sum(part.observed.get("busy_s", 0.0) for part in report.parts)
    segment.span_s += sum(part.observed.get("span_s", 0.0) for part in report.parts)
    segment.num_timed += 1
    work.host.last_words.step(report.step)
    if plan.exchange == pb.EXCHANGE_METHOD_PARAMETER_SERVER:
        work.post(work.gradients.see_applied, report.step)
    now_s = time.monotonic()
    if now_s - segment.reported_s < PROGRESS_INTERVAL_S and report.step < plan.to_step:
        return
    segment.reported_s = now_s
    progress = pb.Progress(
        step=report.step,
        to_step=plan.to_step,
        loss=report.loss,
        rows_per_s=segment.num_rows / max(now_s - segment.started_s, 1e-9),
        engine=segment.engine,
        grad_norm=tally.grad_norm,
        num_skipped_steps=tally.num_skipped,
        phase=report.phase,
        metrics=report.progress_metrics,
        lr=next(iter(report.learning_rates.values()), 0.0),
        busy_s=segment.busy_s / segment.num_timed,
        span_s=segment.span_s / segment.num_timed,
    )
    segment.busy_s, segment.span_s, segment.num_timed = 0.0, 0.0, 0
    work.post(work.outbox.progress, progress)


# ---- End of a segment ----


def _conclude(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, segment: Segment, joined: Joined
) -> pb.TrainResult:
    """End the segment: keep a snapshot, evaluate, and return the result; nothing is done twice."""
    trainer, exchange = joined
    if segment.summary is None or segment.divided_at != work.holding.divided_at:
        segment.divided_at = work.holding.divided_at
        summary = trainer.end_segment(exchange, work.holding.tally)
        began_s = time.perf_counter()
        into = work.states.take_back(work.segment)
        if plan.keeps and isinstance(trainer, LocalStepsTrainer):
            segment.kept = _keep_replicas(work, plan, trainer)
            state = trainer.copy_common_state(into)
        else:
            state = trainer.copy_state(is_first=view.rank == 0, into=into)
            work.host.kept.unsent.discard(work.key.run_id)
        moved()
        _check_finite(work, plan, trainer, state[0])
        moved()
        copy = trainer.copy_mirror(into) if isinstance(trainer, Trainer) else None
        mirror = None if copy is None else freeze(*copy, is_reusable=True)
        moved()
        frozen = freeze(*state, is_reusable=True, mirror=mirror)
        work.post(work.states.keep, work.segment, frozen)
        work.host.stats.snapshot_stall_seconds.add(time.perf_counter() - began_s)
        segment.streams = trainer.stream_marks() if isinstance(trainer, Trainer) else {}
        segment.summary = summary
        failpoint("worker.snapshot.taken")
    num_history_parts, history_digest = _end_history(plan, segment)
    parts, metrics = _evaluate(work, plan, view, segment, joined)
    return pb.TrainResult(
        step=trainer.step,
        loss=segment.summary.loss,
        num_rows=work.holding.tally.num_rows,
        state_fingerprint=trainer.fingerprint(),
        seconds=time.monotonic() - segment.started_s,
        parts=list(parts_to_proto(parts)),
        engine=segment.engine,
        num_redone_steps=segment.num_redone_steps,
        metrics={**segment.summary.metrics, **work.holding.tally.shown},
        traffic=segment.summary.traffic,
        own_metrics=metrics,
        streams=segment.streams,
        stop_reason=segment.stop_reason,
        wants_evaluation=trainer.callbacks.sees_evaluations,
        num_history_parts=num_history_parts,
        history_digest=history_digest,
        kept=segment.kept,
    )


def _check_finite(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    trainer: MemberTrainer[Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Raise UserCodeError if training has made the state infinite or NaN, before it is
    committed."""
    if work.numerics < REFUSES_INFINITE:
        return
    infinite = work.holding.infinite
    name = diverged(
        parameters_of(tensors, trainer.model), infinite, lambda: work.base_state(plan.base)[0]
    )
    if name:
        cure = "optimizer.lr"
        if isinstance(trainer, LocalStepsTrainer):
            cure = f"strategy.options.outer.lr, or {cure}"
        text = (
            f"the state after step {trainer.step} is not finite: {name!r} has left the range of "
            f"{str(tensors[name].dtype).removeprefix('torch.')}; lower {cure}"
        )
        raise UserCodeError("FloatingPointError", text, activity="ending a segment")


def _keep_replicas(work: ExecutionContext, plan: pb.TrainPlan, trainer: LocalStepsTrainer) -> str:
    """Write the state that only this member has to a file; return its digest. Deletes old files."""
    files, run_id = work.host.kept, work.key.run_id
    files.drop_before(run_id, plan.base.segment)
    digest = files.write(run_id, work.segment, trainer.copy_state(is_first=False))
    failpoint("worker.replicas.kept")
    return digest


def _end_history(plan: pb.TrainPlan, segment: Segment) -> tuple[int, str]:
    """End the record of the steps; return the number of sent parts, and their digest."""
    if segment.history is None or segment.summary is None:
        return 0, ""
    names = ("consensus_distance",) if plan.exchange == pb.EXCHANGE_METHOD_GOSSIP else ()
    metrics = segment.summary.metrics
    return segment.history.end({f"train.{name}": metrics[name] for name in names})


def _evaluate(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, segment: Segment, joined: Joined
) -> tuple[list[EvaluationPart], pb.OwnMetrics | None]:
    """Return the sums of this member's share of the batches, and the user's own metrics if it has
    all batches. The plan can be ended between two batches."""
    if not plan.evaluate_splits:
        return [], None
    work.set_activity("evaluating")
    with StepRecorder(work, EVALUATING) as recorder:

        def begins(batch: int, num_to_come: int) -> None:
            work.control.check()
            recorder.begin(batch, num_to_come)

        splits = list(plan.evaluate_splits)
        share = EvaluationShare(splits, view.rank, view.size, begins, segment.evaluated)
        parts = joined.trainer.evaluate(share)
    return parts, own_metrics(work, joined.trainer.evaluator(), splits, parts)


def parts_to_proto(parts: list[EvaluationPart]) -> Iterator[pb.EvaluationPart]:
    for part in parts:
        yield pb.EvaluationPart(
            split=part.split, batch=part.batch, weight=part.weight, sums=part.sums
        )


# ---- Calls of on_step ----
#
# Only the member that owns the first shard calls `on_step`; all members learn its answer with the
# next step. Every member keeps the latest step in its tally, so one that takes over from a lost
# member calls on_step again for it: the answer would be lost otherwise.

STOPPED: Final = "on_step has called view.stop()"


class StepListener:
    """Calls on_step on the member that owns the first shard, under one membership view."""

    def __init__(self, work: ExecutionContext, view: MemberView, callbacks: Callbacks) -> None:
        self._work, self._callbacks = work, callbacks
        self._is_mine = view.rank == 0
        tally = work.holding.tally
        if tally.latest and work.holding.shown_step != tally.latest["step"]:
            self._show()

    @property
    def answer(self) -> StepAnswer:
        """Return the answer of on_step for the latest step."""
        return self._work.holding.answer if self._is_mine else NO_ANSWER

    def after(self, report: StepReport) -> None:
        """Call on_step for a finished step, unless the step was predicted."""
        if self._callbacks.sees_steps and report.phase != TrainingPhase.PREDICT:
            self._work.holding.tally.latest = report.numbers
            self._show()

    def _show(self) -> None:
        if not self._is_mine:
            return
        holding = self._work.holding
        seen = StepView(**holding.tally.latest)
        self._callbacks.saw_step(seen)
        if seen.wants_end:
            check_may_end(self._work, f"on_step of training step {seen.step}")
        holding.shown_step = seen.step
        holding.answer = StepAnswer(seen.logged, seen.wants_end)
        holding.tally.shown = {**holding.tally.shown, **seen.logged}


def check_may_end(work: ExecutionContext, activity: str) -> None:
    """Raise UserCodeError if the user's code may not end this training, such as a part of a run."""
    text = ""
    if work.key.party not in ("", VERIFIER):
        text = "is not possible in a part of a run, such as a member of a population"
    if isinstance(work.job.strategy, Federated):
        text = (
            "cannot go with strategy.type Federated, whose rounds go on while a state is evaluated;"
            " evaluation.stop ends such a run"
        )
    if work.job.only_evaluates:
        text = "is not possible where execution.gradient is None: nothing is trained"
    if isinstance(work.job.strategy, Custom):
        text = "cannot go with strategy.type Custom, which decides itself when a run ends"
    if text:
        raise UserCodeError("ValueError", f"view.stop() {text}", activity=activity)


# ---- The user's own metrics ----
#
# A member that has all batches computes the metrics at once. Otherwise a MeasurePlan computes them,
# for which the coordinator gathers the values that the members have kept. For clients with separate
# rows a MeasureSumsPlan has the sums of their states instead.

log = structlog.get_logger()


def own_metrics(
    work: ExecutionContext,
    evaluator: Evaluator,
    splits: Sequence[str],
    parts: Sequence[EvaluationPart],
    *,
    wants_sums: bool = False,
) -> pb.OwnMetrics | None:
    """Return the user's own metrics if `parts` has all batches; otherwise keep their inputs.

    None if the job has no such metrics, or this member has no batches. wants_sums: the rows are
    those of one client, which also reports the metrics' states if these are sums.
    """
    if evaluator.own is None:
        return None
    inputs = {(part.split, part.batch): part.kept for part in parts if part.kept is not None}
    if len(parts) == sum(map(evaluator.num_batches, splits)):
        work.set_activity("measuring")
        result = pb.OwnMetrics(are_measured=True)
        sums: list[SummedState] | None = [] if wants_sums else None
        for split in splits:
            batches = [inputs[batch] for batch in sorted(inputs) if batch[0] == split]
            result.metrics.update(evaluator.own.measured(split, batches, sums))
        result.sums.extend(map(_message, sums or ()))
        return result
    if not inputs:
        return None
    named = {}
    for (split, number), batch in sorted(inputs.items()):
        named.update(named_tensors(split, number, batch))
    layout = next(iter(inputs.values())).layout
    work.post(work.states.keep_outputs, work.segment, freeze(named, {LAYOUT: layout}))
    return pb.OwnMetrics()


def measure(work: ExecutionContext, plan: pb.MeasurePlan) -> pb.OwnMetrics:
    """Return the user's own metrics over all members' batches, from the plan's blob."""
    work.set_activity("measuring")
    metrics = make_own_metrics(work.job.evaluation, work.entrypoints, work.numerics)
    tensors, metadata = work.blob(plan.outputs)
    result = pb.OwnMetrics(are_measured=True)
    for split in plan.splits:
        if metrics is not None:
            result.metrics.update(metrics.measured(split, from_named(tensors, metadata, split)))
    failpoint("worker.metrics.measured")
    return result


def measure_sums(work: ExecutionContext, plan: pb.MeasureSumsPlan) -> pb.OwnMetrics:
    """Return the user's own metrics from the summed states of all clients. Raises the first error
    if none can be computed."""
    work.set_activity("measuring")
    metrics = make_own_metrics(work.job.evaluation, work.entrypoints, work.numerics)
    states = [_state(message) for message in plan.sums]
    result = pb.OwnMetrics(are_measured=True)
    errors: list[StratagemError] = []
    for split in plan.splits:
        if metrics is not None:
            values, failed = metrics.merged(split, states)
            result.metrics.update(values)
            for name, error in failed.items():
                log.warning("metric not merged", metric=name, reason=str(error))
                result.unmerged[name] = getattr(error, "type", type(error).__name__)
            errors += failed.values()
    if errors and not result.metrics:
        raise errors[0]
    failpoint("worker.sums.measured")
    return result


def _message(state: SummedState) -> pb.MetricState:
    message = pb.MetricState(metric=state.metric, name=state.name, shape=state.values.shape)
    of_kind = message.numbers if state.values.dtype.kind == "f" else message.counts
    of_kind.extend(state.values.ravel().tolist())
    return message


def _state(message: pb.MetricState) -> SummedState:
    wide = np.array(message.numbers) if message.numbers else np.array(message.counts, np.int64)
    return SummedState(message.metric, message.name, wide.reshape(tuple(message.shape)))
