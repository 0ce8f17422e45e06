"""What follows from a state, found without a memory: every run is asked after every fact.

The agenda of the product must come to the same facts in the same order, and to the same deadline.
"""

from collections import Counter
from collections.abc import Iterator

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.commands import JournalEntry
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.state_machine.apply import apply
from stratagem.coordinator.core.state_machine.decide import key_of, limited, world_of
from stratagem.coordinator.core.state_machine.strategy_boundary import ask, deadline_of


def settle(state: CoordinatorState, now_s: float) -> Iterator[JournalEntry]:
    """Facts that follow from the state; each is applied before the next is asked for."""
    counts = Counter[RunId]()
    while (entry := next(_decisions(state, now_s), None)) is not None:
        counts[entry.run_id] += 1
        entry = limited(entry, counts[entry.run_id])
        yield entry
        state = apply(state, entry.run_id, entry.fact, now_s)


def next_deadline(state: CoordinatorState) -> float | None:
    """Leader-clock time at which a Tick is due."""
    world = world_of(state)
    deadlines = [deadline_of(run, world) for run in state.runs.values() if run.ended is None]
    return min((d for d in deadlines if d is not None), default=None)


def _decisions(state: CoordinatorState, now_s: float) -> Iterator[JournalEntry]:
    world = world_of(state)
    for run_id, run in state.runs.items():
        if run.ended is not None:
            continue
        fact = ask(run, world, now_s)
        if fact is not None:
            yield JournalEntry(run_id, fact, key_of(fact, run.num_returns))
