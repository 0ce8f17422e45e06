"""The summary of the cluster leads to the state that the facts have led to."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.facts import (
    BlobsHeld,
    Capability,
    ClusterSummed,
    DataUploaded,
    Fact,
    RunPinned,
    WorkerDraining,
    WorkerLeft,
    WorkerLost,
    WorkerRegistered,
    WorkersForgotten,
)
from stratagem.coordinator.core.facts.fact_serialization import decode, encode
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.state_machine import cluster_summary
from stratagem.coordinator.core.state_machine.apply import CLUSTER, apply
from stratagem.coordinator.runtime.plugins import BUILT_IN
from tests.coordinator.core.simulation import digest, member

EMPTY = CoordinatorState(BUILT_IN)
_at = st.integers(0, 5)


def _fact(kind: int, at: int, start: int, state: CoordinatorState) -> Fact | None:
    """One of all facts of the cluster; None for one that nobody decides now."""
    name = f"w{at}"
    known: Any = state.workers.get(name)  # type: ignore[call-overload]
    match kind:
        case 0:
            capability = Capability(tags=(name,), num_threads=1 + start)
            of = member(name, start)
            return WorkerRegistered(member=of, address=f"{name}:1", capability=capability)
        case 1:
            return DataUploaded(owner=name, digest=digest(f"{start}"))
        case 2:
            return RunPinned(run_id=RunId(name), is_pinned=start > 1)
        case 3:
            return BlobsHeld(listed=digest(name), until_s=20.0 * start)
    if known is None:
        return None
    ends: dict[int, Fact] = {
        4: WorkerLost(member=known.member, reason="silent", is_blameless=start > 1),
        5: WorkerDraining(member=known.member),
        6: WorkerLeft(member=known.member, reason="done"),
        7: WorkersForgotten(names=(known.member.worker_id,)),
    }
    return ends[kind]


@given(told=st.lists(st.tuples(st.integers(0, 7), _at, _at), max_size=60), later=_at)
def test_what_comes_after_the_summary_is_as_after_the_facts(
    told: list[tuple[int, int, int]], later: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for limit in ("WORKERS_EACH", "PINS_EACH", "OWNERS_EACH"):
            patched.setattr(cluster_summary, limit, 2)
        state, num_facts = EMPTY, 0
        for time_s, each in enumerate(told):
            fact = _fact(*each, state)
            if fact is not None:
                state, num_facts = apply(state, CLUSTER, fact, float(time_s)), num_facts + 1
        parts = cluster_summary.summary_of(state)
    assert 1 <= len(parts) <= max(num_facts, 1), "there are places for all of them"
    again = EMPTY
    for part in parts:
        read = decode(encode(part)[0], 1, encode(part)[1])
        assert isinstance(read, ClusterSummed)
        again = apply(again, CLUSTER, read, 0.0)
    assert again == state
    fact = _fact(later, later, later, state)
    if fact is not None:
        assert apply(again, CLUSTER, fact, 99.0) == apply(state, CLUSTER, fact, 99.0)
