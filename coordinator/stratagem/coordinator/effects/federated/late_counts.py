"""Counts the updates of federated clients whose round was closed without them.

What is wrong with an update stands in the journal, as UpdateRejected; that one came too late does
not, since nothing follows from it.
"""

from collections.abc import Sequence

from stratagem.coordinator.core.effects import CollectUpdate, SumRegion, TrainClient
from stratagem.coordinator.core.facts import UpdateReceived, UpdateRejected
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.store.journal.history_rows import HistoryRow


async def report_update(
    env: EffectContext,
    effect: TrainClient | CollectUpdate | SumRegion,
    fact: UpdateReceived | UpdateRejected,
    histories: Sequence[HistoryRow] = (),
) -> None:
    """Report the outcome of a client's update, and count it if its round was closed without it.

    histories: of the steps that the update was made by.
    """
    if not await env.report(effect.run_id, fact, histories):
        count_if_late(env, effect)


def count_if_late(env: EffectContext, effect: TrainClient | CollectUpdate | SumRegion) -> None:
    """The effect has ended without its update; not counted where the client goes on elsewhere, and
    where the run is over or only this process ends."""
    run = env.state.runs.get(effect.run_id)
    if run is None or run.ended is not None:
        return
    update = UpdateRejected(
        party=effect.party, round_num=effect.round_num, client=effect.client, reason=""
    )
    if run.strategy.reject_reason(run.job, run.value, update):
        env.refused[Cause.LATE] += 1
