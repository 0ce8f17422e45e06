"""Rules that know no run: which processes end by themselves, gangs of slots, spans of events, and
the time that is left."""

import random
from signal import SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.coordinator.core.commands import EventSpan
from stratagem.coordinator.core.courses import (
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
from stratagem.coordinator.core.effects import Request, grant
from stratagem.coordinator.core.facts import ROOT, Member, ProcessDied
from stratagem.coordinator.core.run_view import MIN_MARKS, Pace, epoch_of, steps_per_epoch
from tests.coordinator.core.simulation import member

pytestmark = pytest.mark.core


# ---- a job that ends its process, and processes that are killed ----


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


@pytest.mark.parametrize(
    ("status", "asks"),
    [
        *((-SIGTERM, True), (-SIGINT, True), (-SIGHUP, True), (None, False), (0, False)),
        *((1, False), (15, False), (-SIGKILL, False), (-SIGSEGV, False)),
    ],
)
def test_a_signal_that_asks_is_no_death(status: int | None, asks: bool) -> None:
    assert was_asked_to_end(status) is asks


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


def test_random_kills_of_work_that_comes_further_now_and_then_do_not_add_up() -> None:
    drawn = random.Random(5)
    for _ in range(10):
        deaths, furthest, now_s = Deaths(), 0, 0.0
        for number in range(100):
            # One of three is killed; the others hold what they have and, half of the time, go on.
            furthest += drawn.random() < 0.5
            now_s += drawn.uniform(0.3, 1.0)
            who = member("abc"[number % 3], number)
            deaths = after(deaths, died(who, -SIGKILL, furthest), now_s, {who})
            assert not deaths.are_too_many


def test_the_sentence_names_the_worker_the_end_and_the_last_lines() -> None:
    deaths = after(Deaths(), died(member("a"), 3, 50), 0.0, ())
    deaths = after(deaths, died(member("a", 1), 3, None), 0.0, ())
    assert deaths.num == 2, "a step that nobody knows is no progress"
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
    assert [how(status) for status in (None, 0, 3, -9, -200)] == [
        "", " with exit status 0", " with exit status 3", " by SIGKILL", " by signal 200",
    ]  # fmt: skip


# ---- segments get the slots of all their workers at once, in order, and nobody is starved ----


SLOTS = st.frozensets(st.sampled_from("abcdef"), max_size=4)


def waiting(*slots: frozenset[str]) -> list[Request[int, str]]:
    return [Request(number, each) for number, each in enumerate(slots)]


def test_gangs_start_whole_or_not_at_all_and_reserve_what_they_need() -> None:
    requests = [Request("r1", frozenset("ab")), Request("r2", frozenset("c"))]
    assert [r.key for r in grant(requests, "b")] == ["r2"]
    assert [r.key for r in grant(requests, "")] == ["r1", "r2"]
    assert grant([Request("wide", frozenset("ab")), Request("late", frozenset("a"))], "b") == ()
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


# ---- a span of events: what it takes, and what is left of it ----


def test_what_was_read_of_a_span_is_not_asked_for_again_and_without_kinds_it_takes_all() -> None:
    assert EventSpan(2, 9).after(4) == EventSpan(5, 9)
    backwards = EventSpan(2, 9, newest_first=True)
    assert backwards.after(8) == EventSpan(2, 8, newest_first=True)
    assert EventSpan().wants("RunFailed")
    some = EventSpan(kinds=frozenset({"RunFailed"}))
    assert (some.wants("RunFailed"), some.wants("RunReleased")) == (True, False)


# ---- the pace of a run from what is seen of it, and the time that is left ----


def steady(seconds: int, per_s: float = 2.0, *, pace: Pace | None = None, from_s: int = 0) -> Pace:
    """Return the pace of a run that was looked at every second and has done per_s in each."""
    pace = pace or Pace()
    done = pace.marks[-1].done if pace.marks else 0.0
    for number in range(seconds + 1):
        pace = pace.updated(from_s + number, done + per_s * number, trains=True)
    return pace


def test_the_first_ten_seconds_and_what_comes_before_the_first_step_say_nothing() -> None:
    assert steady(10).eta_s(10.9, 1000) is None
    assert steady(11).eta_s(11.0, 1000) == pytest.approx((1000 - 22) / 2)
    first = Pace().updated(0.0, 0.0, trains=True).updated(30.0, 1.0, trains=True)
    assert first.eta_s(31.0, 101) is None
    assert first.eta_s(40.0, 101) == pytest.approx(100 * 40.0)
    pace = steady(12, pace=first, from_s=30)
    assert pace.eta_s(42.0, 125) == pytest.approx(100 / 2)


def test_what_is_left_is_divided_by_the_pace_of_the_last_minute() -> None:
    slow = steady(100, 1.0)
    fast = steady(60, 10.0, pace=slow, from_s=100)
    assert fast.eta_s(160.0, 1700) == pytest.approx((1700 - 700) / 10)
    assert len(fast.marks) <= 62


def test_an_evaluation_counts_as_time_and_what_is_no_training_does_not() -> None:
    """20 s of training at 2 steps per second, then 20 s in which no step is done."""
    pace = steady(20)
    assert pace.eta_s(40.0, 140) == pytest.approx((140 - 40) * 39 / 38)
    looked = pace.updated(40.0, 40.0, trains=True)
    assert looked.eta_s(40.0, 140) == pytest.approx(100 * 39 / 38)
    pace = steady(20).updated(20.0, 40.0, trains=False)
    assert pace.eta_s(25.0, 140) is None
    again = pace.updated(1000.0, 40.0, trains=True)
    assert again.eta_s(1000.0, 140) == pytest.approx(50.0)
    assert again.updated(1001.0, 42.0, trains=True).eta_s(1001.0, 142) == pytest.approx(50.0)


def test_a_run_that_goes_back_begins_anew_and_a_clock_that_does_adds_nothing() -> None:
    pace = steady(30).updated(31.0, 10.0, trains=True)
    assert pace.eta_s(45.0, 140) is None, "nothing was gained since"
    assert pace.updated(36.0, 20.0, trains=True).eta_s(36.0, 140) is None, "too short a time"
    assert pace.updated(41.0, 30.0, trains=True).eta_s(41.0, 140) == pytest.approx(110 / 2)
    pace = steady(20).updated(5.0, 42.0, trains=True)
    assert pace.trained_s == 20.0
    assert pace.eta_s(0.0, 142) == pytest.approx(100 * 19 / 40)


def test_without_a_pace_or_before_the_end_there_is_no_time_left() -> None:
    assert Pace().eta_s(30.0, 10) is None, "never seen"
    assert Pace().updated(0.0, 0.0, trains=True).eta_s(30.0, 10) is None, "nothing done"
    assert steady(20).eta_s(30.0, 0) is None, "no end"
    assert steady(20).eta_s(20.0, 40) == 0.0
    assert steady(20).eta_s(20.0, 30) == 0.0


def test_marks_close_together_are_one_and_those_far_apart_are_enough() -> None:
    pace = Pace()
    for number in range(1000):
        pace = pace.updated(number / 100, float(number), trains=True)
    assert len(pace.marks) <= 44
    assert pace.marks[-1].done == 999.0
    pace = Pace()
    for number in range(6):
        pace = pace.updated(300.0 * number, float(number), trains=True)
    assert len(pace.marks) == MIN_MARKS
    assert pace.eta_s(1500.0, 10) == pytest.approx(5 * 300)


def test_epochs_are_steps_by_the_steps_of_one() -> None:
    assert steps_per_epoch(1437, 64) == 23
    assert epoch_of(46, 23) == 2.0
    assert epoch_of(0, 23) == 0.0
    assert steps_per_epoch(0, 64) == 0, "of a stream nobody knows the rows"
    assert epoch_of(46, 0) == 0.0
