"""What is kept of many workers, runs and blobs: persistent collections beside plain ones, archived
runs beside looking at each of them, and the summary of the cluster beside its facts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.ids import RunId, WorkerId
from stratagem.common.numerics.verification import Conclusion
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core import persistent, retention
from stratagem.coordinator.core.apply import CLUSTER, apply
from stratagem.coordinator.core.commands import ExpireRuns
from stratagem.coordinator.core.fact_text import decode, encode
from stratagem.coordinator.core.pending import live_blobs, needed
from stratagem.coordinator.core.persistent import PersistentMap, PersistentOrder
from stratagem.coordinator.core.retention import expire_runs, resting_with
from stratagem.coordinator.core.state import CoordinatorState, EndedRun, EndedRuns
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.simulation import digest, member

pytestmark = pytest.mark.core


# ---- a persistent map beside a dict, and an order beside a sorted list ----

_keys = st.text(alphabet="abcd", max_size=4)


@settings(max_examples=50)
@given(changes=st.lists(st.tuples(_keys, st.none() | st.integers()), max_size=120))
def test_it_is_a_dict_that_never_changes(changes: Sequence[tuple[str, int | None]]) -> None:
    expected: dict[str, int] = {}
    made = PersistentMap[str, int]()
    passed = [(made, dict(expected))]
    for key, value in changes:
        if value is None:
            expected.pop(key, None)
            made = made.without(key)
        else:
            expected[key] = value
            made = made.with_item(key, value)
        passed.append((made, dict(expected)))
    for each, at_once in passed:
        assert each == at_once
        assert len(each) == len(list(each)) == len(at_once)
        assert sorted(each.values()) == sorted(at_once.values())
        assert PersistentMap(at_once) == each
    first, second = passed[len(passed) // 2], passed[-1]
    missing = object()
    assert second[0].changed_since(first[0]) == {
        key
        for key in first[1].keys() | second[1].keys()
        if first[1].get(key, missing) is not second[1].get(key, missing)
    }


def test_keys_whose_hashes_are_the_same_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "_place", lambda key: 7)
    made = PersistentMap({f"{number}": number for number in range(100)})
    made = made.with_item("x", 100).without("50")
    assert sorted(made.values()) == [*range(50), *range(51, 101)]
    assert made["99"] == 99
    assert repr(made) == repr(dict(made))
    assert "50" not in made


def test_what_has_not_changed_is_shared() -> None:
    made = PersistentMap({f"worker-{number}": object() for number in range(10_000)})
    value = object()
    changed = made.with_item("worker-77", value)
    assert changed.changed_since(made) == {"worker-77"}
    shared = sum(one is other for one, other in zip(made._root, changed._root, strict=True))
    assert shared == len(made._root) - 1


@settings(max_examples=50)
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


# ---- what is known of many archived runs ----

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


@settings(max_examples=50)
@given(changes=st.lists(_change, max_size=25))
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


@settings(max_examples=50)
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


def test_many_at_once_take_the_places_of_those_of_the_same_names() -> None:
    before = [_run(number, "", "", None, "alice", 0.0) for number in range(3)]
    after = [_run(number, DIGESTS[:1], "", None, "bob", 1.0) for number in range(1, 100)]
    made = EndedRuns.of(before).with_runs(after)
    _compare(made, {run.run_id: run for run in (*before, *after)})


# ---- the summary of the cluster leads to the state that the facts have led to ----

EMPTY = CoordinatorState(BUILT_IN)
_at = st.integers(0, 5)


def _fact(kind: int, at: int, start: int, state: CoordinatorState) -> f.Fact | None:
    """One of all facts of the cluster; None for one that nobody decides now."""
    name = f"w{at}"
    known: Any = state.workers.get(name)  # type: ignore[call-overload]
    match kind:
        case 0:
            capability = f.Capability(tags=(name,), num_threads=1 + start)
            of = member(name, start)
            return f.WorkerRegistered(member=of, address=f"{name}:1", capability=capability)
        case 1:
            return f.DataUploaded(owner=name, digest=digest(f"{start}"))
        case 2:
            return f.RunPinned(run_id=RunId(name), is_pinned=start > 1)
        case 11:
            return f.VerificationEnded(
                run_id=RunId(name),
                conclusion=Conclusion.EQUAL,
                num_equal=start,
                num_unverified=0,
                workers=(WorkerId(name),),
                wall_s=1.0 * start,
            )
        case 3:
            return f.BlobsHeld(listed=digest(name), until_s=20.0 * start)
    if known is None:
        return None
    ends: dict[int, f.Fact] = {
        4: f.WorkerLost(member=known.member, reason="silent", is_blameless=start > 1),
        5: f.WorkerDraining(member=known.member),
        6: f.WorkerLeft(member=known.member, reason="done"),
        7: f.WorkersForgotten(names=(known.member.worker_id,)),
        8: f.WorkerMarked(worker_id=known.member.worker_id, reason="refuted"),
        9: f.WorkerQuarantined(worker_id=known.member.worker_id, reason="wrong"),
        10: f.WorkerReleased(worker_id=known.member.worker_id),
    }
    return ends[kind]


@settings(max_examples=50)
@given(told=st.lists(st.tuples(st.integers(0, 11), _at, _at), max_size=60), later=_at)
def test_what_comes_after_the_summary_is_as_after_the_facts(
    told: list[tuple[int, int, int]], later: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for limit in ("WORKERS_EACH", "PINS_EACH", "OWNERS_EACH"):
            patched.setattr(retention, limit, 2)
        state, num_facts = EMPTY, 0
        for time_s, each in enumerate(told):
            fact = _fact(*each, state)
            if fact is not None:
                state, num_facts = apply(state, CLUSTER, fact, float(time_s)), num_facts + 1
        parts = retention.summary_of(state)
    assert 1 <= len(parts) <= max(num_facts, 1), "there are places for all of them"
    again = EMPTY
    for part in parts:
        read = decode(encode(part)[0], 1, encode(part)[1])
        assert isinstance(read, f.ClusterSummed)
        again = apply(again, CLUSTER, read, 0.0)
    assert again == state
    fact = _fact(later, later, later, state)
    if fact is not None:
        assert apply(again, CLUSTER, fact, 99.0) == apply(state, CLUSTER, fact, 99.0)
