"""The user's own metrics at the end of an evaluation that several members have shared.

Each of them is computed of all rows at once, by the user's code, so on one member: what the others
have kept of their batches is gathered, as tensors, and sent there. Here no code of the user's runs.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from stratagem.common.base.ids import Party, child_party
from stratagem.common.process.failpoints import failpoint
from stratagem.coordinator.core.effects import EvaluateState, RunSegment
from stratagem.coordinator.core.facts import Member, PartyFailed
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.execute_plan import PlanListener, finish
from stratagem.coordinator.effects.synchronous.commit_segment import merged
from stratagem.coordinator.effects.synchronous.shown_evaluation import lineage_of
from stratagem.coordinator.effects.synchronous.snapshot import pull_part_outputs
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.updates.members.merge_parts import ContradictionError, StatePart
from stratagem.v1 import worker_pb2

Result = worker_pb2.TrainResult | worker_pb2.EvaluateResult


async def own_metrics(
    env: EffectContext,
    effect: RunSegment | EvaluateState,
    kept_in: Party,
    segment: int,
    splits: Sequence[str],
    results: Sequence[Result],
) -> Mapping[str, float] | None:
    """Return the metrics by "<split>.<metric>"; empty where the job has none of the user's own.

    kept_in: the party whose sessions have evaluated. results: in order of the effect's members.
    None when they could not be computed: that has been reported.
    """
    said = [result.own_metrics for result in results if result.HasField("own_metrics")]
    measured = [each for each in said if each.are_measured]
    if measured or not said:
        return dict(measured[0].metrics) if measured else {}

    async def pull(member: Member) -> StatePart:
        at = WorkerSession(member, effect.run_id, kept_in, effect.membership)
        async with env.pulls:
            return await pull_part_outputs(env, at, segment)

    pairs = zip(effect.members, results, strict=True)
    pulls = [partial(pull, member) for member, each in pairs if each.HasField("own_metrics")]
    try:
        outputs, _ = await merged(env, pulls)
    except ContradictionError as error:
        reason = f"the outputs of the batches cannot be joined: {error}"
        await env.report(effect.run_id, PartyFailed(party=effect.party, reason=reason))
        return None
    failpoint("coordinator.outputs.gathered")
    member = effect.members[0]
    measuring = child_party(effect.party, "measure")
    at = WorkerSession(member, effect.run_id, measuring, effect.membership)
    lineage = lineage_of(effect)
    plan = worker_pb2.MeasurePlan(outputs=outputs, splits=splits, lineage=lineage)
    request = env.request(effect.party, at, segment, measure=plan)
    result = await finish(env, effect, member, request, PlanListener())
    return None if result is None else dict(result.measure.metrics)
