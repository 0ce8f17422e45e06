"""Effect -> the coroutine that does it."""

from typing import assert_never

from stratagem.common import tracing
from stratagem.common.logs import about
from stratagem.coordinator.blobs import DamagedBlobError
from stratagem.coordinator.core.effects import (
    AggregateRound,
    Build,
    CollectUpdate,
    CommitSegment,
    Effect,
    EvaluateState,
    EvaluateTogether,
    Release,
    RunSegment,
    TrainClient,
)
from stratagem.coordinator.core.facts import RunFailed
from stratagem.coordinator.effects.aggregate import aggregate_round
from stratagem.coordinator.effects.build import build
from stratagem.coordinator.effects.client_round import train_client
from stratagem.coordinator.effects.collect import collect_update
from stratagem.coordinator.effects.commit import commit_segment
from stratagem.coordinator.effects.env import Env
from stratagem.coordinator.effects.evaluate import evaluate_state
from stratagem.coordinator.effects.evaluate_together import evaluate_together
from stratagem.coordinator.effects.release import release
from stratagem.coordinator.effects.segment import run_segment
from stratagem.coordinator.watching.log_ids import ids_of


async def perform(env: Env, effect: Effect) -> None:
    """Do what is due; ends by reporting a fact."""
    run = env.state.runs.get(effect.run_id)
    parent = "" if run is None else run.traceparent
    ids = ids_of(effect.run_id, effect)
    with about(**ids), tracing.span(type(effect).__name__, parent, term=env.loop.term, **ids):
        try:
            await _perform(env, effect)
        except* DamagedBlobError as group:
            await _fail(env, effect, group)


async def _fail(env: Env, effect: Effect, group: BaseExceptionGroup[DamagedBlobError]) -> None:
    """The run ends, rather than trying for ever what only a sound copy can mend."""
    errors: list[BaseException] = [group]
    while isinstance(errors[0], BaseExceptionGroup):
        errors = list(errors[0].exceptions)
    advice = "put a sound copy in its place, then resume the run"
    await env.report(effect.run_id, RunFailed(reason=f"{errors[0]}; {advice}"))


async def _perform(env: Env, effect: Effect) -> None:
    match effect:
        case Build():
            await build(env, effect)
        case RunSegment():
            await run_segment(env, effect)
        case CommitSegment():
            await commit_segment(env, effect)
        case TrainClient():
            await train_client(env, effect)
        case CollectUpdate():
            await collect_update(env, effect)
        case AggregateRound():
            await aggregate_round(env, effect)
        case EvaluateState():
            await evaluate_state(env, effect)
        case EvaluateTogether():
            await evaluate_together(env, effect)
        case Release():
            await release(env, effect)
        case _:
            assert_never(effect)
