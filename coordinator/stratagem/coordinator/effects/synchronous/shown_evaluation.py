"""The end of an evaluation: its numbers are shown to the user's on_evaluation, on one member.

Here no code of the user's runs. It is done before the evaluation is journaled, so what the hook
says is part of that fact.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stratagem.common.base.ids import Party
from stratagem.coordinator.core.effects import EvaluateState, RunSegment
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.execute_plan import PlanListener, finish
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.strategies.evaluation.commit_metrics import LOGGED
from stratagem.v1 import worker_pb2

Result = worker_pb2.TrainResult | worker_pb2.EvaluateResult


class Seen(NamedTuple):
    """What on_evaluation has said: numbers by name of their series, and why the training ends."""

    logged: Mapping[str, float]
    stop_reason: str


async def shown_evaluation(
    env: EffectContext,
    effect: RunSegment | EvaluateState,
    shown_in: Party,
    at: tuple[int, int],
    splits: Sequence[str],
    results: Sequence[Result],
    metrics: Mapping[str, float],
) -> Seen | None:
    """Show the metrics where the first member wants to see them; return what was said of them.

    shown_in: the party whose sessions have evaluated. at: segment and step of what was evaluated.
    metrics: by "<split>.<metric>". None when the hook has failed: that has been reported.
    """
    if not (splits and results and results[0].wants_evaluation):
        return Seen({}, "")
    segment, step = at
    prefix = f"{splits[0]}."
    plan = worker_pb2.ShowPlan(
        split=splits[0],
        step=step,
        metrics={name.removeprefix(prefix): value for name, value in metrics.items()},
        lineage=lineage_of(effect),
    )
    session = WorkerSession(effect.members[0], effect.run_id, shown_in, effect.membership)
    request = env.request(effect.party, session, segment, show=plan)
    result = await finish(env, effect, effect.members[0], request, PlanListener())
    if result is None:
        return None
    logged = {f"{LOGGED}{name}": value for name, value in sorted(result.show.logged.items())}
    return Seen(logged, result.show.stop_reason)


def lineage_of(effect: RunSegment | EvaluateState) -> int:
    """Return the lineage of what was evaluated; stored states have none."""
    return effect.lineage if isinstance(effect, RunSegment) else 0
