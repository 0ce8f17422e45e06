"""Which blobs somebody may name in a job, as far as the state tells.

A blob is a digest, and whoever knows a digest does not have its bytes: so it belongs to those who
have brought all of them, and to the owners of runs that name it. The states that a run has
committed are shared with all who may read runs.
"""

from __future__ import annotations

from stratagem.common.base.ids import Digest, RunId
from stratagem.coordinator.core.state import CoordinatorState, RunRecord
from stratagem.coordinator.core.state_machine.pending_effects import blobs_of


def has_brought(state: CoordinatorState, owner: str, digest: Digest) -> bool:
    """Whether the blob belongs to this owner: uploaded, or in use by a run of theirs."""
    if digest in state.uploads.get(owner, ()):
        return True
    if any(run.owner == owner and digest in run.blobs for run in state.ended.values()):
        return True
    return any(run.owner == owner and digest in blobs_of(run) for run in state.runs.values())


def is_shared(state: CoordinatorState, digest: Digest) -> bool:
    """Whether it is a state that a run has committed, or its predictions; see also below."""
    return any(digest in states_of(run) for run in state.runs.values())


def states_of(run: RunRecord) -> frozenset[Digest]:
    """What whoever may read runs may download of it."""
    committed = {commit.digest for commit in run.commits}
    return frozenset({*committed, run.predictions} if run.predictions else committed)


def resting_with(state: CoordinatorState, digest: Digest) -> list[RunId]:
    """Runs at rest that need the blob, as a state of theirs or as something that they were given:
    the state does not tell which, and their summaries do."""
    return [run.run_id for run in state.ended.values() if digest in run.blobs]
