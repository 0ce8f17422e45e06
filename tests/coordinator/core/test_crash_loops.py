"""The rule that tells a job that ends its process from processes that are killed."""

import random
from signal import SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM

import pytest

from stratagem.coordinator.core.crash_loops import (
    OWN,
    UNEXPLAINED,
    UNEXPLAINED_S,
    Deaths,
    after,
    ended_by_itself,
    how,
    was_asked_to_end,
    why,
)
from stratagem.coordinator.core.facts import ROOT, Member, ProcessDied
from tests.coordinator.core.simulation import member

pytestmark = pytest.mark.core


def died(
    who: Member, status: int | None = None, step: int | None = None, *lines: str
) -> ProcessDied:
    return ProcessDied(party=ROOT, member=who, segment=1, status=status, step=step, lines=lines)


def one_after_the_other(
    *statuses: int | None, step: int | None = None, every_s: float = UNEXPLAINED_S
) -> Deaths:
    """Deaths of worker a, each of a process that began after the one before."""
    deaths = Deaths()
    for number, status in enumerate(statuses):
        who = member("a", number)
        deaths = after(deaths, died(who, status, step), 7.0 + number * every_s, {who})
    return deaths


@pytest.mark.parametrize("status", [1, 3, 255, -SIGSEGV, -SIGABRT])
def test_a_process_that_ends_itself_is_believed_soon(status: int) -> None:
    assert ended_by_itself(status)
    assert not one_after_the_other(*[status] * (OWN - 1)).are_too_many
    assert one_after_the_other(*[status] * OWN, every_s=0.0).are_too_many


@pytest.mark.parametrize("status", [None, 0, -SIGKILL, -SIGTERM, -64])
def test_a_process_that_others_may_have_ended_is_believed_late(status: int | None) -> None:
    assert not ended_by_itself(status)
    assert not one_after_the_other(*[status] * (UNEXPLAINED - 1)).are_too_many
    assert one_after_the_other(*[status] * UNEXPLAINED).are_too_many
    barely = UNEXPLAINED_S / (UNEXPLAINED - 1)
    assert one_after_the_other(*[status] * UNEXPLAINED, every_s=barely + 1e-9).are_too_many
    assert not one_after_the_other(*[status] * UNEXPLAINED, every_s=barely * 0.99).are_too_many


def test_both_kinds_add_up() -> None:
    mixed = [3, 3, *[-SIGKILL] * (UNEXPLAINED - 3)]
    assert not one_after_the_other(*mixed).are_too_many
    assert one_after_the_other(*mixed, -SIGKILL).are_too_many
    assert one_after_the_other(*mixed, 3).are_too_many


@pytest.mark.parametrize("status", [-SIGTERM, -SIGINT, -SIGHUP])
def test_a_signal_that_asks_is_no_death(status: int) -> None:
    assert was_asked_to_end(status)


@pytest.mark.parametrize("status", [None, 0, 1, 15, -SIGKILL, -SIGSEGV])
def test_nothing_else_asks(status: int | None) -> None:
    assert not was_asked_to_end(status)


def test_those_that_were_at_it_together_die_at_one_moment() -> None:
    first = [member(name) for name in "abc"]
    deaths = Deaths()
    for who in first:
        deaths = after(deaths, died(who, 3), 0.0, first)
    assert (deaths.num_own, deaths.num) == (1, 1)
    # Those that come after have not seen it: theirs is another one, once.
    second = [member(name, 1) for name in "abc"]
    for who in second:
        deaths = after(deaths, died(who, 3), 0.0, second)
    assert deaths.num == 2


def test_one_worker_that_dies_beside_another_that_stays() -> None:
    deaths, other = Deaths(), member("b")
    for number in range(OWN):
        assert not deaths.are_too_many
        dying = member("a", number)
        deaths = after(deaths, died(dying, 3), 0.0, {dying, other})
    assert deaths.are_too_many
    assert after(deaths, died(other, 3), 0.0, {other}).num == OWN  # it was there all the time


def test_who_comes_further_has_the_whole_budget_again() -> None:
    deaths = Deaths()
    for number in range(100):
        step = number // (OWN - 1)  # twice at each step
        deaths = after(deaths, died(member("a", number), 3, step), 100.0 * number, ())
        assert not deaths.are_too_many
    assert deaths.furthest == 99 // (OWN - 1)


def test_who_begins_anew_and_dies_earlier_has_not_come_further() -> None:
    deaths = after(Deaths(), died(member("a"), -SIGKILL, 50), 0.0, ())
    for number in range(1, UNEXPLAINED):
        assert not deaths.are_too_many
        killed = died(member("a", number), -SIGKILL, number)
        deaths = after(deaths, killed, number * UNEXPLAINED_S, ())
    assert deaths.are_too_many
    assert deaths.furthest == 50


def test_a_step_that_nobody_knows_is_no_progress() -> None:
    deaths = after(Deaths(), died(member("a"), 3, 50), 0.0, ())
    deaths = after(deaths, died(member("a", 1), 3, None), 0.0, ())
    assert deaths.num == 2


def test_random_kills_of_work_that_comes_further_now_and_then_do_not_add_up() -> None:
    drawn = random.Random(5)
    for _ in range(20):
        deaths, furthest, now_s = Deaths(), 0, 0.0
        for number in range(200):
            # One of three is killed; the others hold what they have and, half of the time, go on.
            furthest += drawn.random() < 0.5
            now_s += drawn.uniform(0.3, 1.0)
            who = member("abc"[number % 3], number)
            deaths = after(deaths, died(who, -SIGKILL, furthest), now_s, {who})
            assert not deaths.are_too_many


def test_the_sentence_names_the_worker_the_end_and_the_last_lines() -> None:
    deaths = one_after_the_other(3, 3)
    deaths = after(deaths, died(member("b"), -SIGSEGV, None, "loading", "bye"), 99.0, ())
    assert why("segment 2", deaths) == (
        "segment 2 has ended 3 worker processes; the last one, b, ended by SIGSEGV and had "
        "printed: loading | bye"
    )
    assert why("the build", one_after_the_other(None, None, step=7)) == (
        "the build has ended 2 worker processes and came no further than step 7; "
        "the last one, a, ended unseen"
    )


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (None, ""),
        (0, " with exit status 0"),
        (3, " with exit status 3"),
        (-9, " by SIGKILL"),
        (-200, " by signal 200"),
    ],
)
def test_ends_have_names(status: int | None, text: str) -> None:
    assert how(status) == text
