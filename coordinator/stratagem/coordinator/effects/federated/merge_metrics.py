"""MergeMetrics: add up what clients have said of their own metrics, and have a worker compute the
values of the sums.

Also what becomes of a client's states when it has evaluated: a blob, once they are states at all.
Here no code of the user's runs.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import NO_DIGEST, Digest, WorkerId, child_party
from stratagem.common.process.failpoints import failpoint
from stratagem.coordinator.core.effects import MergeMetrics
from stratagem.coordinator.core.facts import MetricsMerged
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.execute_plan import attend, record_of
from stratagem.coordinator.effects.execution.stored_bytes import stored_bytes
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.strategies.federated.update_rejections import reason_of
from stratagem.coordinator.updates.folding.state_sums import States, SumsSoFar, UnlikeStatesError
from stratagem.v1 import worker_pb2 as pb

MAX_NUMBERS: Final = 65_536
"""In the states of one client, as workers send them."""
MAX_DIMENSIONS: Final = 16
PARTY: Final = "measure"
_MAX_REASON_CHARS: Final = 300
_MAX_KIND_CHARS: Final = 80


async def merge_metrics(env: EffectContext, effect: MergeMetrics) -> None:
    """Report MetricsMerged, with the metrics or the reason why there are none."""
    sums, unlike = await env.in_thread(lambda: _sums(env, effect))
    if not sums:
        reason = "; ".join(unlike.values())
        await _report(env, effect, pb.OwnMetrics(), reason=reason, worker_id="")
        return
    failpoint("coordinator.sums.merged")
    splits = sorted({name.partition(".")[0] for name in effect.metrics})
    plan = pb.MeasureSumsPlan(sums=sums, splits=splits, num_clients=len(effect.states))
    at = WorkerSession(effect.member, effect.run_id, child_party(effect.party, PARTY), 0)
    request = env.request(effect.party, at, effect.segment, measure_sums=plan)
    result = await attend(env, effect.member, request)
    match result.WhichOneof("outcome"):
        case "measure_sums":
            failed = {
                metric: kind[:_MAX_KIND_CHARS]
                for metric, kind in sorted(result.measure_sums.unmerged.items())
                if metric in effect.metrics
            }
            await _report(env, effect, result.measure_sums, unmerged=unlike | failed)
        case "error":
            raised = record_of(result.error)
            reason = f"{effect.member.worker_id}: {reason_of(raised) or raised.type}"
            await _report(env, effect, pb.OwnMetrics(), reason=reason)
        case _:
            await env.end_early(effect.run_id, effect.member, result)


async def kept_states(env: EffectContext, sums: Sequence[pb.MetricState]) -> Digest:
    """Return the blob with the states of a client, "" of one without.

    Raises InvalidInputError for what cannot be added up.
    """
    if not sums:
        return NO_DIGEST
    _decoded(sums)
    data = pb.OwnMetrics(sums=sums).SerializeToString(deterministic=True)
    return await stored_bytes(env, data)


def summed(sums: Sequence[pb.MetricState]) -> tuple[str, ...]:
    """Return the metrics that these are states of."""
    return tuple(sorted({state.metric for state in sums}))


async def _report(
    env: EffectContext,
    effect: MergeMetrics,
    found: pb.OwnMetrics,
    reason: str = "",
    worker_id: str | None = None,
    unmerged: Mapping[str, str] | None = None,
) -> None:
    named = effect.member.worker_id if worker_id is None else WorkerId(worker_id)
    fact = MetricsMerged(
        party=effect.party,
        segment=effect.segment,
        clients=tuple(client for client, _ in effect.states),
        worker_id=named,
        metrics=_of(effect.metrics, found),
        reason=reason[:_MAX_REASON_CHARS],
        unmerged=unmerged or {},
    )
    await env.report(effect.run_id, fact)


def _of(metrics: Sequence[str], found: pb.OwnMetrics) -> dict[str, float]:
    """Return the values of metrics that were asked for: a worker may say anything."""
    return {
        name: value
        for name, value in sorted(found.metrics.items())
        if any(f"{name}.".startswith(f"{metric}.") for metric in metrics)
    }


def _sums(env: EffectContext, effect: MergeMetrics) -> tuple[list[pb.MetricState], dict[str, str]]:
    """Return the sums over clients, one client after the other, and why those of some metrics do
    not go together; for a thread."""
    metrics = sorted(effect.metrics)
    sums = {metric: SumsSoFar() for metric in metrics}
    unlike: dict[str, str] = {}
    for client, digest in effect.states:
        of_metric = _by_metric(env, digest)
        for metric in [metric for metric in metrics if metric not in unlike]:
            try:
                sums[metric].add(client, of_metric.get(metric, {}))
            except UnlikeStatesError as error:
                unlike[metric] = str(error)[:_MAX_REASON_CHARS]
    found = [
        _encoded(metric, name, values)
        for metric in metrics
        if metric not in unlike
        for (_, name), values in sorted(sums[metric].totals.items())
    ]
    return found, {metric: unlike[metric] for metric in sorted(unlike)}


def _by_metric(env: EffectContext, digest: Digest) -> dict[str, dict[tuple[str, str], np.ndarray]]:
    """Return the states of a client, by metric; its blob is read once for all of them."""
    with env.blobs.open(digest) as file:
        said = _decoded(pb.OwnMetrics.FromString(file.read()).sums)
    found: dict[str, dict[tuple[str, str], np.ndarray]] = {}
    for key, values in said.items():
        found.setdefault(key[0], {})[key] = values
    return found


def _decoded(sums: Sequence[pb.MetricState]) -> States:
    found: dict[tuple[str, str], np.ndarray] = {}
    for state in sums:
        values = np.array(state.numbers) if state.numbers else np.array(state.counts, np.int64)
        if len(state.shape) > MAX_DIMENSIONS:
            raise InvalidInputError(f"state {state.name} has {len(state.shape)} dimensions")
        is_both, key = bool(state.numbers and state.counts), (state.metric, state.name)
        num = int(np.prod(state.shape, dtype=object)) if state.shape else 1
        if is_both or not values.size or values.size != num or key in found:
            text = f"state {state.name} of {state.metric} has {values.size} numbers for its shape"
            raise InvalidInputError(f"{text} {tuple(state.shape)}")
        found[key] = values.reshape(tuple(state.shape))
    if sum(values.size for values in found.values()) > MAX_NUMBERS:
        raise InvalidInputError(f"the states of metrics are more than {MAX_NUMBERS} numbers")
    return found


def _encoded(metric: str, name: str, values: np.ndarray) -> pb.MetricState:
    state = pb.MetricState(metric=metric, name=name, shape=values.shape)
    (state.numbers if values.dtype.kind == "f" else state.counts).extend(values.ravel().tolist())
    return state
