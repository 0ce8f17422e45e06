"""TrainPlan of a member that holds stages of the model: train to a step, under one membership.

What members hold are sole copies, so a failed step is not done again here: the member leaves, says
so, and waits for the plan with which the coordinator returns the party to its last commit. Runs in
the torch thread, which it does not keep while it waits.
"""

import time

from stratagem.common.base.errors import IntegrityError, UnavailableError
from stratagem.common.process.failpoints import failpoint
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import EvaluationPart
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.party.connect_members import noting_failures
from stratagem.worker.party.join_pipeline import join_stages
from stratagem.worker.pipeline.held_stages import HeldStages
from stratagem.worker.plans.measure_plan import own_metrics
from stratagem.worker.plans.train_plan import Segment, account, parts_to_proto, report_failure
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import DRAINED, MemberView, PlanStopped, ViewChanged
from stratagem.worker.session.profiling import EVALUATING, StepRecorder
from stratagem.worker.session.session_states import freeze


def train_stages(
    work: ExecutionContext, plan: pb.TrainPlan, segment: Segment
) -> tuple[pb.ExecuteResult, int]:
    """Train to plan.to_step; return the result, and the membership that it was computed under."""
    holding = work.holding
    holding.begin(plan.lineage, work.segment)
    view = work.control.view
    while True:
        try:
            held = _train_under(work, plan, view, segment)
            result = _conclude(work, plan, held, segment)
            return pb.ExecuteResult(train=result), view.membership
        except ViewChanged:
            pass
        except (ExchangeError, UnavailableError, IntegrityError) as error:
            report_failure(work, view, error)
        holding.leave()
        view = work.control.view_after(view.membership)


def _train_under(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, segment: Segment
) -> HeldStages:
    held = join_stages(work, plan, view)
    runner, segment.engine = held.runner, held.engine
    work.set_activity("training")
    with StepRecorder(work) as recorder:
        while runner.step < plan.to_step:
            work.control.check()
            if work.control.view.membership != view.membership:
                raise ViewChanged
            stop = work.control.is_draining
            if stop and view.size == 1:
                raise PlanStopped(DRAINED)
            recorder.begin(runner.step + 1, plan.to_step - runner.step)
            segment.step_began_s = time.perf_counter()
            with noting_failures(work):
                report = runner.train_step(
                    shards=view.me.shards, num_shards=plan.num_shards, stop=stop, reduce=held.reduce
                )
            segment.engine = held.engine  # the schedule may have been chosen again
            account(work, plan, segment, report)
            if report.stop and report.step < plan.to_step:
                # All members stop after this step, and those that stay return to the last commit.
                work.control.check()
                raise PlanStopped(DRAINED) if stop else ViewChanged
    if held.shares_memory:
        work.host.mesh.sharing_works()
    failpoint("worker.stages.trained")
    return held


def _conclude(
    work: ExecutionContext, plan: pb.TrainPlan, held: HeldStages, segment: Segment
) -> pb.TrainResult:
    """Keep a snapshot of this rank's part, evaluate if in the first replica, return the result."""
    runner, tally = held.runner, work.holding.tally
    work.post(work.states.keep, work.segment, freeze(*runner.copy_state()))
    failpoint("worker.stages.kept")
    parts: list[EvaluationPart] = []
    own: pb.OwnMetrics | None = None
    if held.replica == 0 and plan.evaluate_splits:
        work.set_activity("evaluating")
        with StepRecorder(work, EVALUATING) as recorder:
            for split in plan.evaluate_splits:
                work.control.check()
                parts += runner.evaluate(split, recorder.begin)
        own = own_metrics(work, runner.evaluator, plan.evaluate_splits, parts)
    return pb.TrainResult(
        step=runner.step,
        loss=tally.loss_sum / tally.weight if tally.weight else 0.0,
        num_rows=tally.num_rows,
        state_fingerprint=runner.fingerprint(),
        seconds=time.monotonic() - segment.started_s,
        parts=list(parts_to_proto(parts)),
        engine=segment.engine,
        metrics={} if work.job.only_evaluates else tally.metrics(may_skip=work.job.window.may_skip),
        own_metrics=own,
    )
