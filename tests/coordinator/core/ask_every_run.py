"""What follows from a state, found without a memory: every run is asked after every fact.

The agenda of the product must come to the same facts in the same order, and to the same deadline.
"""

from collections import Counter
from collections.abc import Iterator

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.commands import JournalEntry
from stratagem.coordinator.core.decide import key_of, limited, placed, world_of
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.strategy_calls import ask, deadline_of
from stratagem.coordinator.core.world import World


def next_entry(
    state: CoordinatorState, world: World, now_s: float, followed: Counter[RunId]
) -> JournalEntry | None:
    """The next fact that follows from the state, after so many of each run; None for none."""
    entry = next(_decisions(state, world, now_s), None)
    return entry and placed(limited(entry, followed[entry.run_id] + 1))


def next_deadline(state: CoordinatorState, world: World | None = None) -> float | None:
    """Leader-clock time at which a Tick is due."""
    world = world or world_of(state)
    deadlines = [deadline_of(run, world) for run in state.runs.values() if run.ended is None]
    return min((d for d in deadlines if d is not None), default=None)


def _decisions(state: CoordinatorState, world: World, now_s: float) -> Iterator[JournalEntry]:
    for run_id, run in state.runs.items():
        if run.ended is not None:
            continue
        fact = ask(run, world, now_s)
        if fact is not None:
            yield JournalEntry(run_id, fact, key_of(fact, run))
