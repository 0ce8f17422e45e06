"""Effects that would be due if some facts were accepted, for beginning work before they are
durable."""

from collections.abc import Iterable

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.commands import Refusal, Report
from stratagem.coordinator.core.effects import Effect
from stratagem.coordinator.core.facts import Fact
from stratagem.coordinator.core.state import CoordinatorState, World
from stratagem.coordinator.core.state_machine.apply import apply
from stratagem.coordinator.core.state_machine.decide import MAX_DECISIONS, decide
from stratagem.coordinator.core.state_machine.pending_effects import pending_of
from stratagem.coordinator.core.state_machine.strategy_boundary import ask


def foreseen(
    state: CoordinatorState, world: World, run_id: RunId, facts: Iterable[Fact], now_s: float
) -> frozenset[Effect]:
    """Return the effects of a run after the facts were reported; stale facts count as done.

    The result is a guess: workers may come and go, and other facts may come first.
    """
    for fact in facts:
        decided = decide(state, Report(run_id, fact))
        for entry in () if isinstance(decided, Refusal) else decided:
            state = apply(state, entry.run_id, entry.fact, now_s)
    for _ in range(MAX_DECISIONS):
        run = state.runs.get(run_id)
        if run is None or run.ended is not None:
            return frozenset()
        follows = ask(run, world, now_s)
        if follows is None:
            return pending_of(run)
        state = apply(state, run_id, follows, now_s)
    return frozenset()
