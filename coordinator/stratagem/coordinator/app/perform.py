"""Perform each effect with the coroutine for its kind."""

from typing import assert_never

from stratagem.common.base.errors import leaves
from stratagem.common.observe import tracing
from stratagem.common.observe.logs import about
from stratagem.coordinator.core.effect_failures import FailedTries, ending
from stratagem.coordinator.core.effects import (
    AccountRound,
    AggregateRound,
    Build,
    CollectUpdate,
    CommitSegment,
    Effect,
    EvaluateState,
    JudgeUpdates,
    MergeMetrics,
    PostKeys,
    Release,
    RouteShares,
    RunSegment,
    SumRegion,
    TrainClient,
    UploadCommit,
)
from stratagem.coordinator.core.facts import PartyFailed, RunFailed
from stratagem.coordinator.core.pending import blobs_of
from stratagem.coordinator.core.state import RunRecord, retained
from stratagem.coordinator.core.strategy_calls import WHY, draws_in_secret
from stratagem.coordinator.effects.aggregate import aggregate_round, judge_updates
from stratagem.coordinator.effects.build import build
from stratagem.coordinator.effects.commit import commit_segment, upload_commit
from stratagem.coordinator.effects.context import EffectContext
from stratagem.coordinator.effects.evaluate import evaluate_state
from stratagem.coordinator.effects.party_updates import collect_update, merge_metrics, sum_region
from stratagem.coordinator.effects.private import account_round
from stratagem.coordinator.effects.secure import post_keys, route_shares
from stratagem.coordinator.effects.segment import release, run_segment
from stratagem.coordinator.effects.train_client import train_client
from stratagem.coordinator.observe.logs import ids_of
from stratagem.coordinator.store.blobs import DamagedBlobError, MissingBlobError


async def perform(env: EffectContext, effect: Effect) -> None:
    """Perform an effect that is due, with the coroutine for its kind, which reports a fact."""
    run = env.runs.state.runs.get(effect.run_id)
    parent = "" if run is None else run.traceparent
    ids = ids_of(effect.run_id, effect)
    if env.runs.draws_in_secret(effect.run_id):
        ids.pop("worker_id", None)
    with about(**ids), tracing.span(type(effect).__name__, parent, term=env.runs.loop.term, **ids):
        try:
            await _perform(env, effect)
        except* (DamagedBlobError, MissingBlobError) as group:
            await _fail(env, effect, leaves(group)[0])


async def _fail(env: EffectContext, effect: Effect, error: BaseException) -> None:
    """Fail the run because a blob is damaged or missing, which no retry can cure."""
    assert isinstance(error, DamagedBlobError | MissingBlobError)
    run = env.runs.state.runs.get(effect.run_id)
    if run is None or not env.runs.is_due(effect):
        return  # the blob was collected because it is not needed any more
    if error.digest not in blobs_of(run):  # a worker has asked for a blob that is none of the run's
        raise error
    await env.runs.report(effect.run_id, RunFailed(reason=_without(run, error)))


def _without(run: RunRecord, error: DamagedBlobError | MissingBlobError) -> str:
    """Return a sentence that says why the run fails without the blob, and what the remedy is."""
    which = [commit.segment for commit in run.commits if commit.digest == error.digest]
    what = f"commit {which[-1]}: {error}" if which else str(error)
    advice = "put a sound copy in its place, then resume the run"
    others = sorted(c.segment for c in retained(run) if c.digest != error.digest)
    if which and others and run.strategy.nesting is not None:
        phrase = f"{'is' if len(others) == 1 else 'are'} {', '.join(map(str, others))}"
        advice += f", or go on from an earlier commit (kept {phrase}): "
        advice += f"stratagem resume {run.run_id} --from {others[-1]}"
    return f"{what}; {advice}"


async def give_up(env: EffectContext, effect: Effect, tries: FailedTries) -> None:
    """Report the fact that ends an effect which must not be retried."""
    run = env.runs.state.runs.get(effect.run_id)
    if run is None or not env.runs.is_due(effect):
        return
    fact = ending(effect, tries, has_ended=run.ended is not None)
    if isinstance(fact, PartyFailed) and not tries.has_diverged and draws_in_secret(run.job):
        fact = fact.model_copy(update={"reason": f"{type(effect).__name__} keeps failing; {WHY}"})
    await env.runs.report(effect.run_id, fact)


async def _perform(env: EffectContext, effect: Effect) -> None:
    match effect:
        case Build():
            await build(env, effect)
        case RunSegment():
            await run_segment(env, effect)
        case CommitSegment():
            await commit_segment(env, effect)
        case UploadCommit():
            await upload_commit(env, effect)
        case TrainClient():
            await train_client(env, effect)
        case MergeMetrics():
            await merge_metrics(env, effect)
        case EvaluateState():
            await evaluate_state(env, effect)
        case Release():
            await release(env, effect)
        case _:
            await _perform_of_round(env, effect)


OfRound = (
    AccountRound
    | PostKeys
    | RouteShares
    | CollectUpdate
    | SumRegion
    | JudgeUpdates
    | AggregateRound
)


async def _perform_of_round(env: EffectContext, effect: OfRound) -> None:
    match effect:
        case PostKeys():
            await post_keys(env, effect)
        case RouteShares():
            await route_shares(env, effect)
        case AccountRound():
            await account_round(env.runs, effect)
        case CollectUpdate():
            await collect_update(env.runs, env.transfers, effect)
        case SumRegion():
            await sum_region(env.runs, env.transfers, effect)
        case JudgeUpdates():
            await judge_updates(env.runs, env.transfers, effect)
        case AggregateRound():
            await aggregate_round(env, effect)
        case _:
            assert_never(effect)
