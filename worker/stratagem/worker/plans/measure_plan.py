"""The user's own metrics at the end of an evaluation: here if this member has all batches, and
otherwise by a MeasurePlan, for which the coordinator gathers what the members have kept. Of clients
with rows of their own a MeasureSumsPlan brings the sums of their states instead.

Runs in the torch thread.
"""

from collections.abc import Sequence

import numpy as np
import structlog

from stratagem.common.base.errors import StratagemError
from stratagem.common.process.failpoints import failpoint
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import EvaluationPart
from stratagem.worker.engine.objectives.evaluator import Evaluator
from stratagem.worker.engine.objectives.kept_batches import LAYOUT, from_named, named_tensors
from stratagem.worker.engine.objectives.own_metrics import make_own_metrics
from stratagem.worker.engine.objectives.summed_states import SummedState
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.session_states import freeze

log = structlog.get_logger()


def own_metrics(
    work: ExecutionContext,
    evaluator: Evaluator,
    splits: Sequence[str],
    parts: Sequence[EvaluationPart],
    *,
    wants_sums: bool = False,
) -> pb.OwnMetrics | None:
    """Return the metrics if these are all batches of the splits; otherwise keep what they need.

    None where the job has no metrics of the user's own, or this member no batches. wants_sums: the
    rows are all of one client, and states that are sums are told, too.
    """
    if evaluator.own is None:
        return None
    kept = {(part.split, part.batch): part.kept for part in parts if part.kept is not None}
    if len(parts) == sum(map(evaluator.num_batches, splits)):
        work.set_activity("measuring")
        result = pb.OwnMetrics(are_measured=True)
        sums: list[SummedState] | None = [] if wants_sums else None
        for split in splits:
            batches = [kept[batch] for batch in sorted(kept) if batch[0] == split]
            result.metrics.update(evaluator.own.measured(split, batches, sums))
        result.sums.extend(map(_message, sums or ()))
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


def measure_sums(work: ExecutionContext, plan: pb.MeasureSumsPlan) -> pb.OwnMetrics:
    """Return the metrics of the sums of all clients' states: those that can be computed.

    Raises the error of the first one where none can.
    """
    work.set_activity("measuring")
    own = make_own_metrics(work.job.evaluation, work.entrypoints, work.numerics)
    states = [_state(message) for message in plan.sums]
    result = pb.OwnMetrics(are_measured=True)
    errors: list[StratagemError] = []
    for split in plan.splits:
        if own is not None:
            found, failed = own.merged(split, states)
            result.metrics.update(found)
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
