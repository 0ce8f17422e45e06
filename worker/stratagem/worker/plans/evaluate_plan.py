"""EvaluatePlan of a job that trains nothing: this member's share of the batches.

A member knows no other one. When the party changes the same plan is asked for again with another
share, and what was evaluated already is answered at once. Runs in the torch thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from stratagem.common.process.failpoints import failpoint
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import Inference
from stratagem.worker.plans.train_plan import PROGRESS_INTERVAL_S, Segment, parts_to_proto
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import DRAINED, PlanStopped
from stratagem.worker.session.profiling import EVALUATING, StepRecorder
from stratagem.worker.session.session_states import freeze


def evaluate_share(
    work: ExecutionContext, plan: pb.EvaluatePlan, segment: Segment
) -> tuple[pb.ExecuteResult, int]:
    """Return the sums of the batches asked for, and the membership that they were asked for under.

    Ends early, with a result that is not used, once another share is asked for.
    """
    membership = work.control.view.membership
    work.be("evaluating")
    inference = _inference(work, plan.base.digest)
    owned = [
        (split, batch)
        for split in plan.splits
        for batch in range(inference.num_batches(split))
        if (batch - plan.rank) % max(plan.size, 1) < max(plan.count, 1)
    ]
    left = [key for key in owned if key not in segment.evaluated]
    spec = work.job.evaluation
    is_kept = spec is not None and spec.predictions
    show = _Progress(work, len(owned), len(owned) - len(left))
    with StepRecorder(work, EVALUATING) as recorder:
        for number, (split, batch) in enumerate(left):
            work.control.check()
            if work.control.view.membership != membership:
                break
            if work.control.is_draining:
                raise PlanStopped(DRAINED)
            recorder.begin(batch, len(left) - number)
            outputs = segment.outputs.setdefault((split, batch), {}) if is_kept else None
            segment.evaluated[split, batch] = inference.part(split, batch, outputs)
            failpoint("worker.batch.evaluated")
            show.done(inference.rows_in(split, batch))
    if is_kept:
        work.post(work.states.keep, work.segment, freeze(_named(segment.outputs, owned), {}))
    parts = [segment.evaluated[key] for key in owned if key in segment.evaluated]
    return pb.ExecuteResult(
        evaluate=pb.EvaluateResult(parts=list(parts_to_proto(parts)))
    ), membership


def _named(
    outputs: Mapping[tuple[str, int], Mapping[str, Tensor]], owned: Sequence[tuple[str, int]]
) -> dict[str, Tensor]:
    """Return the outputs as "<split>.<output>/<batch>": sorted by name, batches are in order."""
    return {
        f"{split}.{name}/{batch:012d}": tensor
        for split, batch in owned
        for name, tensor in outputs.get((split, batch), {}).items()
    }


def _inference(work: ExecutionContext, digest: str) -> Inference:
    """Return the model with the weights of that state."""
    held = work.holding.inference
    if held is not None and held[0] == digest and held[1].job == work.job:
        return held[1]
    work.holding.inference = None
    tensors, _ = work.blob(digest)
    inference = work.new_inference(fresh=False)
    inference.load_state(tensors)
    work.holding.inference = (digest, inference)
    return inference


class _Progress:
    """Reports at intervals how many batches of the share are done, and rows per second."""

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
