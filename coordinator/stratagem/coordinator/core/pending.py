"""The effects that are due and the blobs that are still needed, both derived from the state."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import chain

from stratagem.common.base.ids import Digest
from stratagem.coordinator.core.effects import Effect, Release, UploadCommit
from stratagem.coordinator.core.state import CoordinatorState, EndedRuns, RunRecord, retained


def pending(state: CoordinatorState) -> frozenset[Effect]:
    """Return the effects (work to be done now) that the facts of all runs call for."""
    return frozenset[Effect]().union(*(pending_of(run) for run in state.runs.values()))


def pending_of(run: RunRecord) -> frozenset[Effect]:
    """Return the effects (work to be done now) that the facts of one run call for."""
    if run.ended is None:
        return run.strategy.pending(run.run_id, run.job, run.value, None)
    if run.is_released:
        return frozenset()
    return _last_uploads(run) or frozenset({Release(run.run_id, run.touched)})


def _last_uploads(run: RunRecord) -> frozenset[Effect]:
    """Return the uploads due before workers forget an ended run, as the run may be resumed."""
    due = run.strategy.pending(run.run_id, run.job, run.value, None)
    return frozenset(effect for effect in due if isinstance(effect, UploadCommit))


def live_blobs(state: CoordinatorState) -> frozenset[Digest]:
    """Return all blobs that must be kept, in one new set; slow if there are many blobs."""
    return needed(state).all()


@dataclass(frozen=True, slots=True)
class Needed(Container[Digest]):
    """A container of all blobs that must be kept, which copies no collection of blobs."""

    active: frozenset[Digest]
    ended: EndedRuns
    held: Sequence[Container[Digest]] = ()
    """More blobs to keep, for backups, in collections that may be as large."""

    def __contains__(self, digest: object) -> bool:
        is_named = digest in self.active or digest in self.ended.blobs
        return is_named or any(digest in digests for digests in self.held)

    def all(self) -> frozenset[Digest]:
        """Return all blobs that runs need, in one new set; slow if there are many blobs."""
        return frozenset(chain(self.active, self.ended.blobs))


def needed(state: CoordinatorState, held: Sequence[Container[Digest]] = ()) -> Needed:
    """Return the set of blobs that must be kept; held: more blobs to keep, for backups."""
    active = (blobs_of(run) for run in state.runs.values())
    return Needed(frozenset(chain(state.holds, *active)), state.ended, held)


def blobs_of(run: RunRecord) -> frozenset[Digest]:
    """Return the blobs of a run that must be kept: retained commits, bases of effects that are due,
    inline data, code, given states, predictions."""
    live = {digest for commit in retained(run) for digest in (commit.digest, commit.average)}
    live |= {e.base.digest for e in pending_of(run) if hasattr(e, "base")}
    live |= run.strategy.blobs(run.value)
    if run.job.data.inline is not None:
        live.add(Digest(run.job.data.inline))
    if run.job.code is not None and run.job.code.digest is not None:
        live.add(run.job.code.digest)
    if run.job.initial is not None and run.job.initial.digest is not None:
        live.add(run.job.initial.digest)
    if run.job.initial is not None and run.job.initial.average is not None:
        live.add(run.job.initial.average)
    if run.predictions:
        live.add(run.predictions)
    return frozenset(live - {Digest("")})
