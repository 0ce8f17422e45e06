"""The archived runs of a state, of which a coordinator may keep a hundred thousand.

An immutable mapping by run, with an index for each question that would have to look at all of them:
which of them need a blob, who brought it, what others have begun from, which is the oldest. Another
run costs the same however many there are.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stratagem.common.base.ids import Digest, RunId
from stratagem.coordinator.core.persistent import PersistentMap, PersistentOrder

if TYPE_CHECKING:
    from stratagem.coordinator.core.state import EndedRun

K = TypeVar("K", bound=str)

_AT_ONCE: Final = 64
"""Runs that are added together from which on everything is made anew, in sorted order."""

_NOBODY: Final[Mapping[RunId, Any]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class EndedRuns(Mapping[RunId, "EndedRun"]):
    """Archived runs by id. Equal are those with equal runs."""

    _runs: PersistentMap[RunId, "EndedRun"] = field(default_factory=PersistentMap)
    _holders: PersistentMap[Digest, PersistentMap[RunId, "EndedRun"]] = field(
        default_factory=PersistentMap
    )
    """By blob: the runs that need it."""
    _brought: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """By owner and blob: the number of runs of that owner that need it."""
    _shared: PersistentMap[Digest, int] = field(default_factory=PersistentMap)
    """By state: the number of runs that have committed it."""
    _begun_from: PersistentMap[Digest, int] = field(default_factory=PersistentMap)
    """By state: the number of runs that have begun from it."""
    _phases: PersistentMap[str, int] = field(default_factory=PersistentMap)
    by_end: PersistentOrder[tuple[float, RunId]] = field(default_factory=PersistentOrder)
    """The time at which each has ended, by the leader's clock."""
    by_submission: PersistentOrder[tuple[float, RunId]] = field(default_factory=PersistentOrder)
    """The wall time at which each was submitted, negated: the newest comes first."""

    @classmethod
    def of(cls, runs: Iterable["EndedRun"]) -> "EndedRuns":
        """Return these runs, each of another id."""
        found = {run.run_id: run for run in runs}
        holders: defaultdict[Digest, dict[RunId, EndedRun]] = defaultdict(dict)
        brought, shared, begun_from, phases = (Counter[Any]() for _ in range(4))
        for run in found.values():
            for digest in run.blobs:
                holders[digest][run.run_id] = run
            brought.update(_brought_by(run))
            shared.update(run.states)
            begun_from.update(_beginning_of(run))
            phases[run.ended] += 1
        return cls(
            PersistentMap(found),
            PersistentMap({digest: PersistentMap(runs) for digest, runs in holders.items()}),
            PersistentMap(brought),
            PersistentMap(shared),
            PersistentMap(begun_from),
            PersistentMap(phases),
            PersistentOrder((run.ended_s, run.run_id) for run in found.values()),
            PersistentOrder((-run.submitted_wall_s, run.run_id) for run in found.values()),
        )

    def with_runs(self, runs: Collection["EndedRun"]) -> "EndedRuns":
        """Return these runs, and others, which take the places of those of the same ids."""
        if len(runs) > max(_AT_ONCE, len(self) // _AT_ONCE):
            return self.of([*self.values(), *runs])
        made = self
        for run in runs:
            made = made.without(run.run_id)._with(run)
        return made

    def without(self, run_id: RunId) -> "EndedRuns":
        """Return the runs without one; these where it is not among them."""
        run = self._runs.get(run_id)
        return self if run is None else self._without(run)

    @property
    def blobs(self) -> Collection[Digest]:
        """Return the blobs that runs need."""
        return self._holders.keys()

    def needing(self, digest: Digest) -> Mapping[RunId, "EndedRun"]:
        """Return the runs that need a blob."""
        return self._holders.get(digest, _NOBODY)

    def has_brought(self, owner: str, digest: Digest) -> bool:
        """Return True when a run of this owner needs the blob."""
        return _owned(owner, digest) in self._brought

    def has_committed(self, digest: Digest) -> bool:
        """Return True when the blob is a state, or predictions, of a run."""
        return digest in self._shared

    def is_begun_from(self, digest: Digest) -> bool:
        """Return True when a run has begun from this state."""
        return digest in self._begun_from

    @property
    def phases(self) -> Mapping[str, int]:
        """Return the number of runs by how they have ended."""
        return self._phases

    def _with(self, run: "EndedRun") -> "EndedRuns":
        holders = self._holders
        for digest in run.blobs:
            needing = holders.get(digest, PersistentMap[RunId, "EndedRun"]())
            holders = holders.with_item(digest, needing.with_item(run.run_id, run))
        return EndedRuns(
            self._runs.with_item(run.run_id, run),
            holders,
            _changed(self._brought, _brought_by(run), 1),
            _changed(self._shared, run.states, 1),
            _changed(self._begun_from, _beginning_of(run), 1),
            _changed(self._phases, (run.ended,), 1),
            self.by_end.with_item((run.ended_s, run.run_id)),
            self.by_submission.with_item((-run.submitted_wall_s, run.run_id)),
        )

    def _without(self, run: "EndedRun") -> "EndedRuns":
        holders = self._holders
        for digest in run.blobs:
            needing = holders[digest].without(run.run_id)
            holders = holders.with_item(digest, needing) if needing else holders.without(digest)
        return EndedRuns(
            self._runs.without(run.run_id),
            holders,
            _changed(self._brought, _brought_by(run), -1),
            _changed(self._shared, run.states, -1),
            _changed(self._begun_from, _beginning_of(run), -1),
            _changed(self._phases, (run.ended,), -1),
            self.by_end.without((run.ended_s, run.run_id)),
            self.by_submission.without((-run.submitted_wall_s, run.run_id)),
        )

    def __getitem__(self, run_id: RunId) -> "EndedRun":
        return self._runs[run_id]

    def __iter__(self) -> Iterator[RunId]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


def _brought_by(run: "EndedRun") -> list[str]:
    return [_owned(run.owner, digest) for digest in run.blobs]


def _beginning_of(run: "EndedRun") -> tuple[Digest, ...]:
    return () if run.initial is None else (run.initial,)


def _owned(owner: str, digest: Digest) -> str:
    return f"{digest} {owner}"


def _changed(
    counts: PersistentMap[K, int], keys: Iterable[K], change: int
) -> PersistentMap[K, int]:
    for key in keys:
        num = counts.get(key, 0) + change
        counts = counts.with_item(key, num) if num else counts.without(key)
    return counts
