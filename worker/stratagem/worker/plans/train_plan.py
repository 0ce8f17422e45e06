"""TrainPlan: train synchronously to a step, through every change of the party.

Owns the loop: join the party, step until the end, and when the exchange fails leave it, say so and
wait for the next view. A step is applied by all members or done again, so nothing here undoes
anything. Runs in the torch thread.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Final

from torch import Tensor

from stratagem.common.base.errors import StratagemError
from stratagem.common.process.failpoints import failpoint
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import (
    Batch,
    ConsensusSummary,
    EvaluationPart,
    GossipTrainer,
    StepReport,
    Trainer,
)
from stratagem.worker.exchange import ExchangeError, GossipExchange
from stratagem.worker.party.join import give_up, join
from stratagem.worker.phases import TrainingPhase
from stratagem.worker.plans.measure_plan import own_metrics
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import DRAINED, MemberView, PlanStopped, ViewChanged
from stratagem.worker.session.profiling import StepRecorder
from stratagem.worker.session.session_states import freeze

PROGRESS_INTERVAL_S: Final = 0.1


@dataclass(slots=True)
class Segment:
    """The progress of one execution in its segment, kept when it runs again under a new view."""

    started_s: float = field(default_factory=time.monotonic)
    num_redone_steps: int = 0
    is_stepping: bool = False
    step_began_s: float = 0.0
    num_rows: int = 0
    reported_s: float = 0.0
    engine: str = ""
    snapshot_taken: bool = False
    summary: ConsensusSummary | None = None
    """Summary of the segment over nodes that gossip."""
    evaluated: dict[Batch, EvaluationPart] = field(default_factory=dict)
    """The sums of each batch: the next view may ask for them again."""
    outputs: dict[Batch, dict[str, Tensor]] = field(default_factory=dict)
    """The model's outputs by split and batch, where predictions are wanted."""


def train(
    work: ExecutionContext, plan: pb.TrainPlan, segment: Segment
) -> tuple[pb.ExecuteResult, int]:
    """Train to plan.to_step; return the result, and the membership that it was computed under."""
    holding = work.holding
    holding.begin(plan.lineage, work.segment)
    view = work.control.view
    while True:
        try:
            trainer = _train_under(work, plan, view, segment)
            result = pb.ExecuteResult(train=_conclude(work, plan, view, segment, trainer))
            return result, view.membership
        except ViewChanged:
            pass
        except ExchangeError as error:
            segment.num_redone_steps += int(segment.is_stepping)
            segment.is_stepping = False
            if plan.exchange == pb.EXCHANGE_METHOD_GOSSIP:
                holding.drop()  # neighbours may have mixed what this member has not
            if isinstance(holding.trainer, Trainer) and holding.trainer.is_sole_copy:
                holding.drop()  # others may have applied the step that this member did not
            report_failure(work, view, error)
        view = work.control.view_after(view.membership)


def report_failure(work: ExecutionContext, view: MemberView, error: StratagemError) -> None:
    """Leave what failed and have the coordinator look into it, unless the plan is to end."""
    work.control.check()
    try:
        give_up(work, view, str(error))
    except ViewChanged:
        return  # the coordinator knows already


def _train_under(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, segment: Segment
) -> Trainer | GossipTrainer:
    """Join the party and train to plan.to_step, or until the view is no longer the current one."""
    held_step = work.holding.applied_step
    if held_step is not None and held_step > plan.to_step:
        # The party has returned to an earlier commit; what we hold is ahead of it.
        work.holding.drop()
    exchange = join(work, plan, view)
    trainer = work.holding.trainer
    assert trainer is not None
    segment.engine = exchange.name
    if isinstance(trainer, GossipTrainer) and trainer.public is not None:
        segment.engine += f", {trainer.public.name}"
    work.set_activity("training")
    with StepRecorder(work) as recorder:
        while trainer.step < plan.to_step:
            _look_up(work, plan, view)
            recorder.begin(trainer.step + 1, plan.to_step - trainer.step)
            stop = work.control.is_draining
            segment.is_stepping = True
            segment.step_began_s = time.perf_counter()
            if isinstance(trainer, GossipTrainer):
                assert isinstance(exchange, GossipExchange)
                report = trainer.train_step(exchange, plan.num_shards)
            else:
                assert not isinstance(exchange, GossipExchange)
                report = trainer.train_step(exchange, view.me.shards, plan.num_shards, stop=stop)
            segment.is_stepping = False
            account(work, plan, segment, report)
            if isinstance(trainer, Trainer) and trainer.phases is not None and view.rank == 0:
                work.warn(trainer.phases.take_news())
            if report.stop and report.step < plan.to_step:
                # All members stop after this step. Those that stay continue under the next view.
                work.control.check()
                raise PlanStopped(DRAINED) if stop else ViewChanged
    failpoint("worker.segment.finished")
    return trainer


def _look_up(work: ExecutionContext, plan: pb.TrainPlan, view: MemberView) -> None:
    """Check between two steps that the plan is still wanted, and under this view.

    Raises PlanStopped when it is to end, ViewChanged when there is a newer view.
    """
    work.control.check()
    if work.control.view.membership != view.membership:
        raise ViewChanged
    # The others of a party stop after the same step; nodes that gossip have no step in common.
    is_alone = view.size == 1 or plan.exchange == pb.EXCHANGE_METHOD_GOSSIP
    if work.control.is_draining and is_alone:
        raise PlanStopped(DRAINED)


def account(
    work: ExecutionContext, plan: pb.TrainPlan, segment: Segment, report: StepReport
) -> None:
    """Add an applied step to the sums of the segment, and report progress at intervals."""
    tally = work.holding.tally
    tally.add(report)
    segment.num_rows += report.num_rows
    work.host.stats.add_step(time.perf_counter() - segment.step_began_s, report)
    work.host.last_words.step(report.step)
    if work.holding.is_offering and report.phase != TrainingPhase.PREDICT:
        # An exact step was done together, so no member is behind any more.
        work.holding.is_offering = False
        work.post(work.states.drop_live)
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
    )
    work.post(work.outbox.progress, progress)


# ---- the end of a segment ----


def _conclude(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    view: MemberView,
    segment: Segment,
    trainer: Trainer | GossipTrainer,
) -> pb.TrainResult:
    """Keep a snapshot, evaluate, return the result; what an earlier view did is not repeated."""
    if not segment.snapshot_taken:
        if isinstance(trainer, GossipTrainer):
            segment.summary = _meet_at_the_end(work, trainer)
            state = trainer.copy_state(with_mean=view.rank == 0)
        else:
            state = trainer.copy_state(is_first=view.rank == 0)
        work.post(work.states.keep, work.segment, freeze(*state))
        segment.snapshot_taken = True
        failpoint("worker.snapshot.taken")
    work.set_activity("evaluating")
    parts, own = _evaluate(work, plan, view, segment, trainer)
    tally, summary = work.holding.tally, segment.summary
    may_skip = work.job.window.may_skip
    own_loss = tally.loss_sum / tally.weight if tally.weight else 0.0
    metrics = tally.metrics(may_skip=may_skip) if summary is None else dict(summary.metrics)
    phases = trainer.phases if isinstance(trainer, Trainer) else None
    if phases is not None:
        metrics |= phases.metrics
        if not tally.weight:  # a segment of predicted steps only
            own_loss = phases.last_loss
    return pb.TrainResult(
        step=trainer.step,
        loss=own_loss if summary is None else summary.loss,
        num_rows=tally.num_rows,
        state_fingerprint=trainer.fingerprint(),
        seconds=time.monotonic() - segment.started_s,
        parts=list(parts_to_proto(parts)),
        engine=segment.engine,
        num_redone_steps=segment.num_redone_steps,
        metrics=metrics,
        traffic=_traffic(trainer),
        own_metrics=own,
    )


def _traffic(trainer: Trainer | GossipTrainer) -> dict[str, int]:
    """Return the bytes that the codec has sent and saved; empty without a codec."""
    coder = trainer.public if isinstance(trainer, GossipTrainer) else trainer.compressor
    return {} if coder is None else asdict(coder.take_traffic())


def _meet_at_the_end(work: ExecutionContext, trainer: GossipTrainer) -> ConsensusSummary:
    exchange = work.holding.exchange
    assert isinstance(exchange, GossipExchange)
    return trainer.end_segment(exchange)


def _evaluate(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    view: MemberView,
    segment: Segment,
    trainer: Trainer | GossipTrainer,
) -> tuple[list[EvaluationPart], pb.OwnMetrics | None]:
    """Return the sums of this member's share of the batches, and the user's own metrics if it has
    all of them; the plan can be ended between the batches."""
    if not plan.evaluate_splits:
        return [], None
    evaluator = trainer.evaluator()
    share = evaluator.share(plan.evaluate_splits, view.rank, view.size)
    for batch in share:
        work.control.check()
        if batch not in segment.evaluated:
            segment.evaluated[batch] = evaluator.part(*batch)
    parts = [segment.evaluated[batch] for batch in share]
    return parts, own_metrics(work, evaluator, plan.evaluate_splits, parts)


def parts_to_proto(parts: list[EvaluationPart]) -> Iterator[pb.EvaluationPart]:
    for part in parts:
        yield pb.EvaluationPart(
            split=part.split, batch=part.batch, weight=part.weight, sums=part.sums
        )
