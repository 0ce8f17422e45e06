"""ShowPlan: the numbers of an evaluation of all members, shown to the user's on_evaluation here.

The coordinator has added them up and runs no code of the user's. What the hook says comes back
before the evaluation is journaled, so it is called once for each one that counts. Runs in the
torch thread.
"""

from typing import Final

from stratagem.common.process.failpoints import failpoint
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine.step.callbacks import Callbacks, make_callbacks
from stratagem.worker.engine.step.evaluation_view import EvaluationView
from stratagem.worker.plans.step_listener import check_may_end
from stratagem.worker.session.context import ExecutionContext

STOPPED: Final = "on_evaluation has called view.stop()"


def show(work: ExecutionContext, plan: pb.ShowPlan) -> pb.Shown:
    """Call the hook; return what it has logged, and whether it wants the training to end."""
    work.set_activity("showing an evaluation")
    seen = EvaluationView(plan.step, plan.split, dict(plan.metrics))
    _callbacks(work).saw_evaluation(seen)
    if seen.wants_end:
        check_may_end(work, f"on_evaluation after step {seen.step}")
    failpoint("worker.evaluation.shown")
    return pb.Shown(logged=seen.logged, stop_reason=STOPPED if seen.wants_end else "")


def _callbacks(work: ExecutionContext) -> Callbacks:
    """Return those of the model that was evaluated, or new ones where it is here no more."""
    holding = work.holding
    if holding.trainer is not None:
        return holding.trainer.callbacks
    if holding.inference is not None:
        return holding.inference[1].setup.callbacks
    return make_callbacks(work.job, work.entrypoints)
