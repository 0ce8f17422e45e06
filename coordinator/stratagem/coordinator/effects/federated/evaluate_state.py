"""EvaluateState: evaluate a committed state on a worker, maybe on a client's own rows."""

from stratagem.common.base.ids import child_party
from stratagem.common.process.failpoints import failpoint
from stratagem.coordinator.core.effects import EvaluateState
from stratagem.coordinator.core.facts import ClientEvaluated, Evaluated
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.execute_plan import attend, fail_party, record_of
from stratagem.coordinator.effects.federated.client_failures import log_error
from stratagem.coordinator.effects.synchronous.evaluation_sums import client_sums, fold_parts
from stratagem.coordinator.runtime.worker_links import WorkerSession, state_ref
from stratagem.coordinator.strategies.federated.update_rejections import reason_of
from stratagem.v1 import worker_pb2


async def evaluate_state(env: EffectContext, effect: EvaluateState) -> None:
    """Evaluate and report Evaluated, or why the run fails."""
    party = child_party(effect.party, "evaluate")
    at = WorkerSession(effect.member, effect.run_id, party, effect.membership)
    plan = worker_pb2.EvaluatePlan(
        base=state_ref(effect.base), splits=effect.splits, rank=0, size=1
    )
    request = env.request(effect.party, at, effect.base.segment, evaluate=plan)
    result = await attend(env, effect.member, request, base=effect.base.digest)
    match result.WhichOneof("outcome"):
        case "error" if effect.client is not None:
            error = record_of(result.error)
            log_error(env, effect.run_id, effect.client, error)
            fact = ClientEvaluated(
                party=effect.party,
                segment=effect.base.segment,
                client=effect.client,
                sums={},
                reason=reason_of(error) or error.type,
            )
            await env.report(effect.run_id, fact)
        case "error":
            await fail_party(env, effect.run_id, effect.party, result.error)
        case "evaluate":
            failpoint("coordinator.evaluation.folded")
            await env.report(effect.run_id, _fact(env, effect, result.evaluate))
        case _:
            await env.end_early(effect.run_id, effect.member, result)


def _fact(
    env: EffectContext, effect: EvaluateState, result: worker_pb2.EvaluateResult
) -> Evaluated | ClientEvaluated:
    party, segment = effect.party, effect.base.segment
    if effect.client is not None:
        sums = client_sums(result.parts)
        return ClientEvaluated(party=party, segment=segment, client=effect.client, sums=sums)
    metrics = fold_parts(result.parts, env.metrics_of(effect.run_id, party))
    return Evaluated(party=party, segment=segment, metrics=metrics)
