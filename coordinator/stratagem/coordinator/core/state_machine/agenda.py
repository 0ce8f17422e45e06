"""An index of the runs that must be asked for their next fact, for a coordinator with many runs.

A strategy decides by its run, the workers with their load, and the time, of which it names a
deadline beforehand. So a run that had nothing to add has nothing to add until a fact has
changed it, the workers or their load are others, or its deadline has passed: only then is it asked
again. So following a fact costs the same however many runs there are. Asking all runs after every
fact comes to the same facts in the same order; the tests of the core compare the two.
"""

from collections import Counter
from collections.abc import Callable, Set

from stratagem.common.base.ids import RunId, WorkerId
from stratagem.coordinator.core.commands import JournalEntry
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.core.persistent_map import PersistentMap
from stratagem.coordinator.core.state import CoordinatorState, RunRecord, World
from stratagem.coordinator.core.state_machine.apply import CLUSTER
from stratagem.coordinator.core.state_machine.decide import key_of, limited
from stratagem.coordinator.core.state_machine.strategy_boundary import ask, deadline_of


class Agenda:
    """The set of runs due to be asked, updated fact by fact; every applied fact must be noted."""

    def __init__(self, state: CoordinatorState) -> None:
        self.world = World(state.workers, {})
        """The same value as `decide.world_of` computes."""
        self._workers = state.workers
        self._load = PersistentMap[WorkerId, int]()
        self._burdened: dict[RunId, frozenset[WorkerId]] = {}
        """Workers that count as loaded, by active run."""
        self._touched: dict[RunId, frozenset[Member]] = {}
        """What that was computed of: there may be thousands, and a fact changes few of them."""
        self._deadlines: dict[RunId, float] = {}
        self._limited: set[RunId] = set()
        """Active runs with a placement timeout, whose deadline depends on the workers."""
        self._numbers: dict[RunId, int] = {}
        """Numbers that put runs in the order of the state, which is that of their submission."""
        self._num_seen = 0
        self._due: set[RunId] = set()
        for run_id in state.runs:
            self.note(state, run_id)

    @property
    def next_deadline(self) -> float | None:
        """Leader-clock time at which a Tick is due."""
        return min(self._deadlines.values(), default=None)

    def note(self, state: CoordinatorState, run_id: RunId) -> None:
        """Take in that a fact of this run, or of the cluster, has been applied."""
        if run_id == CLUSTER:
            changed = state.workers.changed_since(self._workers)
            for burdened_id in list(self._burdened):
                self._carry(state, burdened_id, state.runs[burdened_id], changed)
            self._change_world(state)
            return
        run = state.runs.get(run_id)
        if self._carry(state, run_id, run):
            self._change_world(state)
        self._deadlines.pop(run_id, None)
        self._limited.discard(run_id)
        if run is None:
            self._numbers.pop(run_id, None)
        elif run_id not in self._numbers:
            self._num_seen += 1
            self._numbers[run_id] = self._num_seen
        if run is None or run.ended is not None:
            self._due.discard(run_id)
            return
        self._due.add(run_id)
        if run.job.placement_timeout_s is not None:
            self._limited.add(run_id)
        self._set_deadline(run)

    def settle(
        self, state: CoordinatorState, now_s: float, add: Callable[[JournalEntry], CoordinatorState]
    ) -> None:
        """Ask every due run for the facts that follow; `add` applies and notes one fact."""
        self._due |= {
            run_id for run_id, deadline_s in self._deadlines.items() if deadline_s <= now_s
        }
        counts = Counter[RunId]()
        while (entry := self._next(state, now_s)) is not None:
            counts[entry.run_id] += 1
            state = add(limited(entry, counts[entry.run_id]))

    def _next(self, state: CoordinatorState, now_s: float) -> JournalEntry | None:
        for run_id in sorted(self._due, key=self._numbers.__getitem__):
            fact = ask(state.runs[run_id], self.world, now_s)
            if fact is not None:
                return JournalEntry(run_id, fact, key_of(fact, state.runs[run_id].num_returns))
            self._due.discard(run_id)
        return None

    def _carry(
        self,
        state: CoordinatorState,
        run_id: RunId,
        run: RunRecord | None,
        changed: Set[WorkerId] = frozenset(),
    ) -> bool:
        """Account for the workers that an active run loads, of which these are others than before;
        return True when the load has changed."""
        before = self._burdened.pop(run_id, frozenset())
        known = self._touched.pop(run_id, frozenset())
        after = frozenset[WorkerId]()
        if run is not None and run.ended is None:
            if run.touched is not known:
                changed = changed | {member.worker_id for member in run.touched ^ known}
            now = {each: state.workers[each] for each in changed if each in state.workers}
            loaded = {each for each, worker in now.items() if worker.member in run.touched}
            after = before - changed | loaded if changed else before
            self._burdened[run_id], self._touched[run_id] = after, run.touched
        if after is before or after == before:
            return False
        for worker_id in after - before:
            self._load = self._load.with_item(worker_id, self._load.get(worker_id, 0) + 1)
        for worker_id in before - after:
            num = self._load[worker_id] - 1
            self._load = (
                self._load.with_item(worker_id, num) if num else self._load.without(worker_id)
            )
        return True

    def _change_world(self, state: CoordinatorState) -> None:
        self._workers = state.workers
        self.world = World(state.workers, self._load)
        self._due.update(self._burdened)
        for run_id in self._limited & state.runs.keys():
            self._set_deadline(state.runs[run_id])

    def _set_deadline(self, run: RunRecord) -> None:
        deadline_s = deadline_of(run, self.world)
        if deadline_s is None:
            self._deadlines.pop(run.run_id, None)
        else:
            self._deadlines[run.run_id] = deadline_s
