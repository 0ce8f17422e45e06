"""The user's own metrics at the end of an evaluation: here if this member has all batches, and
otherwise by a MeasurePlan, for which the coordinator gathers what the members have kept.

Runs in the torch thread.
"""

from collections.abc import Sequence

from stratagem.common.process.failpoints import failpoint
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import EvaluationPart
from stratagem.worker.engine.objectives.evaluator import Evaluator
from stratagem.worker.engine.objectives.kept_batches import LAYOUT, from_named, named_tensors
from stratagem.worker.engine.objectives.own_metrics import make_own_metrics
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.session_states import freeze


def own_metrics(
    work: ExecutionContext,
    evaluator: Evaluator,
    splits: Sequence[str],
    parts: Sequence[EvaluationPart],
) -> pb.OwnMetrics | None:
    """Return the metrics if these are all batches of the splits; otherwise keep what they need.

    None where the job has no metrics of the user's own, or this member no batches.
    """
    if evaluator.own is None:
        return None
    kept = {(part.split, part.batch): part.kept for part in parts if part.kept is not None}
    if len(parts) == sum(map(evaluator.num_batches, splits)):
        work.set_activity("measuring")
        result = pb.OwnMetrics(are_measured=True)
        for split in splits:
            batches = [kept[batch] for batch in sorted(kept) if batch[0] == split]
            result.metrics.update(evaluator.own.measured(split, batches))
        return result
    if not kept:
        return None
    named = {}
    for (split, number), batch in sorted(kept.items()):
        named.update(named_tensors(split, number, batch))
    layout = next(iter(kept.values())).layout
    work.post(work.states.keep_outputs, work.segment, freeze(named, {LAYOUT: layout}))
    return pb.OwnMetrics()


def measure(work: ExecutionContext, plan: pb.MeasurePlan) -> pb.OwnMetrics:
    """Return the metrics of the batches of all members, which the plan's blob holds."""
    work.set_activity("measuring")
    own = make_own_metrics(work.job.evaluation, work.entrypoints, work.numerics)
    tensors, metadata = work.blob(plan.outputs)
    result = pb.OwnMetrics(are_measured=True)
    for split in plan.splits:
        if own is not None:
            result.metrics.update(own.measured(split, from_named(tensors, metadata, split)))
    failpoint("worker.metrics.measured")
    return result
