"""Segments get the slots of all their workers at once, in order, and nobody is starved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.coordinator.core.gang_scheduler import Request, grant

pytestmark = pytest.mark.core

SLOTS = st.frozensets(st.sampled_from("abcdef"), max_size=4)


def waiting(*slots: frozenset[str]) -> list[Request[int, str]]:
    return [Request(number, each) for number, each in enumerate(slots)]


def test_gangs_start_whole_or_not_at_all() -> None:
    requests = [Request("r1", frozenset("ab")), Request("r2", frozenset("c"))]
    assert [r.key for r in grant(requests, "b")] == ["r2"]
    assert [r.key for r in grant(requests, "")] == ["r1", "r2"]


def test_waiting_gang_reserves_what_it_needs() -> None:
    requests = [Request("wide", frozenset("ab")), Request("late", frozenset("a"))]
    assert grant(requests, "b") == ()


def test_gang_without_slots_is_never_held_up() -> None:
    assert [r.key for r in grant([Request("free", frozenset[str]())], "abc")] == ["free"]


@given(st.lists(SLOTS, max_size=6), SLOTS)
def test_no_slot_is_given_twice_and_nobody_is_overtaken(
    slots: list[frozenset[str]], taken: frozenset[str]
) -> None:
    """Who waits does so for a slot that is taken, or that somebody asked for before."""
    requests = waiting(*slots)
    granted = grant(requests, taken)
    given_away = [slot for request in granted for slot in request.slots]
    assert len(given_away) == len(set(given_away))
    assert not taken & set(given_away)
    for number, request in enumerate(requests):
        asked_before = frozenset[str]().union(*slots[:number])
        assert (request in granted) is not bool(request.slots & (taken | asked_before))


@given(st.lists(SLOTS, max_size=6))
def test_everybody_is_served_when_those_before_are_done(slots: list[frozenset[str]]) -> None:
    left, served = waiting(*slots), 0
    while left:
        granted = grant(left, "")
        assert left[0] in granted
        left = [request for request in left if request not in granted]
        served += len(granted)
    assert served == len(slots)
