"""Rules for which blobs a caller may name in a job, and whose a blob is, as far as the state alone
decides.

Knowing a blob's digest is not having its bytes: a blob belongs to the owners that have uploaded all
of them, and to the owners of runs that name it. The states that a run has committed are shared with
all callers that may read runs.
"""

from collections.abc import Mapping, Sequence

from stratagem.common.base.ids import Digest, RunId
from stratagem.coordinator.core.state import CommittedState, CoordinatorState, RunRecord
from stratagem.coordinator.core.state_machine.pending_effects import blobs_of
from stratagem.coordinator.core.state_machine.run_view import CommitView, RunView


def has_brought(state: CoordinatorState, owner: str, digest: Digest) -> bool:
    """Return True when the blob belongs to this owner: uploaded, or in use by a run of theirs."""
    if digest in state.uploads.get(owner, ()):
        return True
    if state.ended.has_brought(owner, digest):
        return True
    return any(run.owner == owner and digest in blobs_of(run) for run in state.runs.values())


def is_shared(state: CoordinatorState, digest: Digest) -> bool:
    """Return True for a state that a run has committed, or its predictions."""
    return state.ended.has_committed(digest) or any(
        digest in states_of(run) for run in state.runs.values()
    )


def states_of(run: RunRecord) -> frozenset[Digest]:
    """Return the blobs of a run that any caller that may read runs may download."""
    committed = {digest for each in run.commits for digest in (each.digest, each.average)}
    return frozenset({*committed, run.predictions or Digest("")} - {Digest("")})


def resting_with(state: CoordinatorState, digest: Digest) -> list[RunId]:
    """Return the archived runs that need the blob, as a state of theirs or as an input, the oldest
    first."""
    found = sorted(
        state.ended.needing(digest).values(), key=lambda run: (run.submitted_wall_s, run.run_id)
    )
    return [run.run_id for run in found]


def runs_with(state: CoordinatorState, digest: Digest, views: Mapping[RunId, RunView]) -> list[str]:
    """Return the runs that need a blob, the oldest first, with the segment whose commit it is.

    views: of the archived runs that need it.
    """
    named: list[str] = []
    for run_id in resting_with(state, digest):
        view = views.get(run_id)
        named.append(_blobs_named(run_id, digest, () if view is None else view.commits))
    for run in state.runs.values():
        if digest in blobs_of(run):
            named.append(_blobs_named(run.run_id, digest, run.commits))
    return named


def _blobs_named(
    run_id: RunId, digest: Digest, commits: Sequence[CommittedState] | Sequence[CommitView]
) -> str:
    segments = [each.segment for each in commits if digest in (each.digest, each.average)]
    return f"{run_id}, segment {segments[-1]}" if segments else run_id
