"""Evaluate this member's share of the batches for a stored state, and show results to the user's
hook.

Members are independent. When the party changes, the coordinator sends the same plan with another
share, and the member answers at once for evaluated batches. Runs in the torch thread.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from stratagem.common.process.failpoints import failpoint
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import Batch, Inference
from stratagem.worker.engine.buffers import constant_buffers
from stratagem.worker.engine.callbacks import Callbacks, EvaluationView, make_callbacks
from stratagem.worker.plans.client_state import state_to_evaluate
from stratagem.worker.plans.train import (
    PROGRESS_INTERVAL_S,
    Segment,
    check_may_end,
    own_metrics,
    parts_to_proto,
)
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.control import DRAINED, PlanStopped
from stratagem.worker.session.profiling import EVALUATING, StepRecorder
from stratagem.worker.session.states import freeze

# ---- Evaluate plan ----


def evaluate_state(
    work: ExecutionContext, plan: pb.EvaluatePlan, segment: Segment
) -> tuple[pb.ExecuteResult, int]:
    """Return the sums of the batches in this member's share, and the membership of the request.

    If the coordinator requests another share meanwhile, the evaluation ends early and is not used.
    """
    membership = work.control.view.membership
    work.set_activity("evaluating")
    inference = _inference(work, plan)
    evaluator = inference.evaluator
    share = evaluator.share(plan.splits, plan.rank, max(plan.size, 1), max(plan.count, 1))
    pending = [batch for batch in share if batch not in segment.evaluated]
    spec = work.job.evaluation
    is_kept = spec is not None and spec.predictions
    show = _Progress(work, len(share), len(share) - len(pending))
    evaluator.expect(pending)
    with StepRecorder(work, EVALUATING) as recorder, constant_buffers(inference.model):
        for number, batch in enumerate(pending):
            work.control.check()
            if work.control.view.membership != membership:
                break
            if work.control.is_draining:
                raise PlanStopped(DRAINED)
            recorder.begin(batch[1], len(pending) - number)
            outputs = segment.outputs.setdefault(batch, {}) if is_kept else None
            segment.evaluated[batch] = inference.part(*batch, outputs)
            failpoint("worker.batch.evaluated")
            show.done(evaluator.rows_in(*batch))
    if is_kept:
        work.post(work.states.keep, work.segment, freeze(_named(segment.outputs, share), {}))
    parts = [segment.evaluated[batch] for batch in share if batch in segment.evaluated]
    metrics = None
    if len(parts) == len(share):  # otherwise another share has been requested
        metrics = own_metrics(work, evaluator, plan.splits, parts, wants_sums=plan.wants_sums)
    result = pb.EvaluateResult(
        parts=list(parts_to_proto(parts)),
        own_metrics=metrics,
        wants_evaluation=inference.setup.callbacks.sees_evaluations,
    )
    return pb.ExecuteResult(evaluate=result), membership


def _named(
    outputs: Mapping[Batch, Mapping[str, Tensor]], share: Sequence[Batch]
) -> dict[str, Tensor]:
    """Return the outputs keyed by "<split>.<output>/<batch>", which sort in order of batch."""
    return {
        f"{split}.{name}/{batch:012d}": tensor
        for split, batch in share
        for name, tensor in outputs.get((split, batch), {}).items()
    }


def _inference(work: ExecutionContext, plan: pb.EvaluatePlan) -> Inference:
    """Return the model with the weights of the plan's state, and of its client's private state."""
    digest = f"{plan.base.digest} {plan.client_state.digest}"
    held = work.holding.inference
    is_other = work.holding.data_version != work.data_version
    if held is not None and (is_other or held[1].job != work.job):
        held = work.holding.inference = None
    if held is not None and held[0] == digest:
        return held[1]
    tensors, _ = work.blob(plan.base.digest)
    private = state_to_evaluate(work, plan.client, plan.client_state)
    work.holding.inference = None  # a model that fails to load is not kept
    inference = work.new_inference(fresh=False) if held is None else held[1]
    inference.load_state({**tensors, **private})
    work.holding.inference, work.holding.data_version = (digest, inference), work.data_version
    return inference


class _Progress:
    """Reports finished batches of the share, and rows per second, at intervals."""

    def __init__(self, work: ExecutionContext, num_batches: int, num_done: int) -> None:
        self._work, self._num_batches, self._num_done = work, num_batches, num_done
        self._num_rows, self._started_s = 0, time.monotonic()
        self._reported_s = 0.0

    def done(self, num_rows: int) -> None:
        self._num_done += 1
        self._num_rows += num_rows
        now_s = time.monotonic()
        is_last = self._num_done == self._num_batches
        if now_s - self._reported_s < PROGRESS_INTERVAL_S and not is_last:
            return
        self._reported_s = now_s
        progress = pb.Progress(
            step=self._num_done,
            to_step=self._num_batches,
            rows_per_s=self._num_rows / max(now_s - self._started_s, 1e-9),
        )
        self._work.post(self._work.outbox.progress, progress)


# ---- Show plan ----
#
# The coordinator has added the numbers of all members and runs none of the user's code, so a worker
# passes them to the user's `on_evaluation`. The answer of the hook returns before the evaluation is
# journaled, so the hook is called once for each evaluation that counts.

STOPPED: Final = "on_evaluation has called view.stop()"


def show(work: ExecutionContext, plan: pb.ShowPlan) -> pb.Shown:
    """Call on_evaluation; return its logged numbers, and whether it ends the training."""
    work.set_activity("showing an evaluation")
    seen = EvaluationView(plan.step, plan.split, dict(plan.metrics))
    _callbacks(work).saw_evaluation(seen)
    if seen.wants_end:
        check_may_end(work, f"on_evaluation after step {seen.step}")
    failpoint("worker.evaluation.shown")
    return pb.Shown(logged=seen.logged, stop_reason=STOPPED if seen.wants_end else "")


def _callbacks(work: ExecutionContext) -> Callbacks:
    """Return the callbacks of the session's model; new ones if it holds no model any more."""
    holding = work.holding
    if holding.trainer is not None:
        return holding.trainer.callbacks
    if holding.inference is not None:
        return holding.inference[1].setup.callbacks
    return make_callbacks(work.job, work.entrypoints)
