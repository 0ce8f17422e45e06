"""Compare what is known of many archived runs with looking at each of them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.commands import ExpireRuns
from stratagem.coordinator.core.ended_runs import EndedRuns
from stratagem.coordinator.core.persistent_order import PersistentOrder
from stratagem.coordinator.core.state import CoordinatorState, EndedRun, RunPhase
from stratagem.coordinator.core.state_machine.blob_owners import resting_with
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, needed
from stratagem.coordinator.core.state_machine.retention import expire_runs
from stratagem.coordinator.runtime.plugins import BUILT_IN
from tests.coordinator.core.simulation import digest

DIGESTS = [digest(name) for name in "abcd"]
OWNERS = ("alice", "bob")
_blobs = st.sets(st.sampled_from(DIGESTS), max_size=3)


def _run(number: int, blobs: Any, states: Any, begun: Any, owner: str, at_s: float) -> EndedRun:
    return EndedRun(
        run_id=RunId(f"r{number}"),
        ended=RunPhase.COMPLETED if number % 2 else RunPhase.FAILED,
        num_facts=1,
        submitted_wall_s=-at_s,
        submitted_by=owner,
        blobs=tuple(sorted({*blobs, *states, *({begun} - {None})})),
        ended_s=at_s,
        initial=begun,
        states=tuple(sorted(states)),
        owner=owner,
    )


_run_of = st.builds(
    _run,
    st.integers(0, 9),
    _blobs,
    _blobs,
    st.none() | st.sampled_from(DIGESTS),
    st.sampled_from(OWNERS),
    st.integers(0, 5).map(float),
)
_change = _run_of | st.integers(0, 9) | st.lists(_run_of, max_size=3)


@given(changes=st.lists(_change, max_size=40))
def test_every_question_is_answered_as_by_looking_at_all(changes: Sequence[Any]) -> None:
    expected: dict[RunId, EndedRun] = {}
    made = EndedRuns()
    for change in changes:
        if isinstance(change, int):
            expected.pop(RunId(f"r{change}"), None)
            made = made.without(RunId(f"r{change}"))
        else:
            runs = change if isinstance(change, list) else [change]
            expected |= {run.run_id: run for run in runs}
            made = made.with_runs(runs)
        _compare(made, expected)
    _compare(EndedRuns.of(expected.values()), expected)


def _compare(made: EndedRuns, expected: dict[RunId, EndedRun]) -> None:
    runs = list(expected.values())
    assert made == expected
    state = CoordinatorState(BUILT_IN, ended=made)
    assert live_blobs(state) == {blob for run in runs for blob in run.blobs}
    assert made.phases == Counter(run.ended for run in runs)
    assert list(made.by_end) == sorted((run.ended_s, run.run_id) for run in runs)
    assert list(made.by_submission) == sorted((-run.submitted_wall_s, run.run_id) for run in runs)
    for blob in DIGESTS:
        holders = {run.run_id for run in runs if blob in run.blobs}
        assert set(resting_with(state, blob)) == holders
        assert (blob in needed(state)) == bool(holders)
        assert made.has_committed(blob) == any(blob in run.states for run in runs)
        assert made.is_begun_from(blob) == any(run.initial == blob for run in runs)
        for owner in OWNERS:
            of_owner = any(run.owner == owner and blob in run.blobs for run in runs)
            assert made.has_brought(owner, blob) == of_owner


@given(
    runs=st.lists(_run_of, unique_by=lambda run: run.run_id),
    pinned=st.sets(st.integers(0, 9)),
    before_s=st.integers(0, 6),
    num_kept=st.integers(0, 10),
    limit=st.integers(0, 10),
)
def test_what_expires_is_found_among_the_oldest_alone(
    runs: list[EndedRun], pinned: set[int], before_s: int, num_kept: int, limit: int
) -> None:
    pins = frozenset(RunId(f"r{number}") for number in pinned)
    state = CoordinatorState(BUILT_IN, ended=EndedRuns.of(runs), pinned=pins)
    found = expire_runs(state, ExpireRuns(before_s, num_kept, limit, "it is time"))
    ended = sorted(
        (run for run in runs if run.run_id not in pins), key=lambda run: (run.ended_s, run.run_id)
    )
    num_old = sum(run.ended_s < before_s for run in ended)
    named = {run.initial for run in runs}
    old = ended[: max(num_old, len(ended) - num_kept, 0)]
    free = [run for run in old if not (frozenset(run.blobs) - {run.initial}) & named]
    assert [entry.run_id for entry in found] == [run.run_id for run in free[:limit]]


@given(
    first=st.sets(st.integers(0, 3000), max_size=900),
    more=st.lists(st.integers(0, 3000), max_size=50),
    behind=st.integers(-1, 3001),
)
def test_an_order_is_a_sorted_list_that_never_changes(
    first: set[int], more: list[int], behind: int
) -> None:
    made, expected = PersistentOrder((each,) for each in first), set(first)
    for each in [*more, *sorted(first)[: len(first) // 2]]:
        if each in expected:
            made, expected = made.without((each,)), expected - {each}
        else:
            made, expected = made.with_item((each,)), expected | {each}
    assert list(made) == [(each,) for each in sorted(expected)]
    assert list(made.behind((behind,))) == [(each,) for each in sorted(expected) if each > behind]


def test_many_at_once_take_the_places_of_those_of_the_same_names() -> None:
    before = [_run(number, "", "", None, "alice", 0.0) for number in range(3)]
    after = [_run(number, DIGESTS[:1], "", None, "bob", 1.0) for number in range(1, 100)]
    made = EndedRuns.of(before).with_runs(after)
    _compare(made, {run.run_id: run for run in (*before, *after)})
