"""Clients of rounds long past are packed, and nobody can tell but by the memory."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.client.course import rounds as course
from stratagem.client.course.client_sums import (
    ClientInRound,
    ClientState,
    PackedClients,
    SharedWords,
    in_order,
)
from stratagem.client.course.rounds import RoundsFolding, of_sums
from stratagem.client.course.views import Event, Phase

_seconds = st.floats(0.0, 100.0) | st.just(math.nan)
_client = st.builds(
    ClientInRound,
    client=st.integers(0, 2**40),
    state=st.sampled_from(ClientState),
    worker_id=st.sampled_from(["", "a", "b"]),
    loss=st.floats() | st.just(math.nan),
    num_samples=st.integers(0, 2**60),
    seconds=_seconds,
    sent_bytes=st.integers(0, 2**60),
    cause=st.sampled_from(["", "not_finite"]),
    reason=st.text(max_size=9),
    staleness=st.integers(0, 3),
    assigned_s=st.none() | st.floats(0.0, 2e9),
    answered_s=st.none() | st.floats(0.0, 2e9),
)


def _same(client: ClientInRound) -> str:
    return repr(client)  # in which NaN is equal, and -0.0 is not 0.0


@settings(max_examples=20)
@given(clients=st.lists(_client, unique_by=lambda each: each.client), num_own=st.integers(0, 5))
def test_packed_clients_come_back_as_they_were(clients: list[ClientInRound], num_own: int) -> None:
    own = {each.client: each for each in clients[:num_own]}
    stale = tuple(clients[num_own:])
    packed = PackedClients(own, stale, SharedWords())
    assert list(map(_same, packed)) == list(map(_same, in_order(clients)))
    again, later = packed.unpacked()
    assert list(map(_same, again.values())) == list(map(_same, own.values()))
    assert list(map(_same, later)) == list(map(_same, stale))
    assert len(packed) == len(clients)
    assert packed.num_selected == sum(not each.staleness for each in clients)
    for state in ClientState:
        assert packed.count(state) == sum(each.state is state for each in clients)


def _event(index: int, kind: str, payload: Mapping[str, Any]) -> Event:
    return Event(index, 100.0 + index, kind, "", payload, Phase.RUNNING)


_at = st.integers(0, 2)


@settings(max_examples=40)
@given(steps=st.lists(st.tuples(st.integers(0, 6), _at, _at), max_size=40))
def test_rounds_that_are_packed_are_what_they_are_unpacked(
    steps: list[tuple[int, int, int]],
) -> None:
    """Also when something is told of a round that was packed, and when a run goes back."""
    with pytest.MonkeyPatch.context() as patched:
        foldings = {num: RoundsFolding() for num in (1, 1000)}
        for index, (what, client, behind) in enumerate(steps):
            for num, folding in foldings.items():
                patched.setattr(course, "KEPT_WHOLE", num)
                folding.fold(_step(index, what, client, folding.number, behind))
            if index % 3 == 0:
                _agree(foldings[1], foldings[1000])
        _agree(foldings[1], foldings[1000])


def _step(index: int, what: int, client: int, newest: int, behind: int) -> Event:
    about = {"round_num": max(newest - behind, 0), "client": client}
    received = {"loss": 0.5 * client, "num_samples": 3 + client, "seconds": 0.1 * index}
    accepted = [{"client": client, "staleness": behind, "num_samples": 3}]
    selected = {"round_num": newest + 1, "clients": [0, 1]}
    excused = [{"clients": [2], "reason": "night"}]
    facts: list[tuple[str, Mapping[str, Any]]] = [
        ("ClientsSelected", {**selected, "excused": excused}),
        ("ClientsSelected", selected),
        ("UpdateReceived", about | received),
        ("UpdateRejected", {**about, "cause": "not_finite", "reason": f"{index}"}),
        ("RoundClosed", {**about, "accepted": accepted, "reason": "enough", "metrics": {}}),
        ("ClientLeft", {"client": client, "reason": "bye"}),
        ("RunResumed", {"from_segment": max(newest - 2 * behind, 0)}),
    ]
    return _event(index, *facts[what])


def _agree(packed: RoundsFolding, whole: RoundsFolding) -> None:
    assert [repr(_plain(each)) for each in packed.rounds] == [
        repr(_plain(each)) for each in whole.rounds
    ]
    for one, other in zip(packed.rounds, whole.rounds, strict=True):
        assert one.num_selected == other.num_selected
        assert [one.count(each) for each in ClientState] == [
            other.count(each) for each in ClientState
        ]
    assert repr(packed.times) == repr(whole.times)
    assert repr(of_sums(packed.sums, packed.number, {})) == repr(
        of_sums(whole.sums, whole.number, {})
    )


def _plain(found: course.Round) -> tuple[object, ...]:
    return found.number, found.seconds, found.loss, found.reason, tuple(found.clients)


def test_a_packed_client_takes_a_tenth_of_the_memory() -> None:
    clients = [
        ClientInRound(each, ClientState.DONE, f"worker-{each}", 1.1 / (each + 1), 500, 3.3 * each)
        for each in range(100)
    ]
    packed = PackedClients({each.client: each for each in clients}, (), SharedWords())
    of_whole = sum(map(sys.getsizeof, clients)) + 4 * 24 * len(clients)
    assert 10 * sys.getsizeof(packed._packed) < 1.2 * of_whole
