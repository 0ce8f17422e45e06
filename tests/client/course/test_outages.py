"""When nobody led, by the two times that every event has."""

import pytest

from stratagem.client.course.members import MIN_AWAY_S, Outage, OutagesFolding
from stratagem.client.course.views import Event, Phase

WALL_S = 1.7e9


def at(wall_s: float, leader_s: float, kind: str = "SegmentFinished") -> Event:
    """An event, so many seconds after the beginning by the wall's clock and the leader's."""
    return Event(0, WALL_S + wall_s, kind, "", {}, Phase.RUNNING, leader_s)


def outages_of(*events: Event) -> list[tuple[float, float]]:
    folding = OutagesFolding()
    told = [folding.fold(event) for event in events]
    assert [each for each in told if each is not None] == list(folding.outages)
    return [(each.began_s - WALL_S, each.ended_s - WALL_S) for each in folding.outages]


def test_what_the_wall_has_gained_on_the_leader_nobody_led() -> None:
    assert outages_of(at(0, 100), at(5, 105), at(20, 108), at(30, 118)) == [(5, 17)]
    assert outages_of(at(0, 100), at(9, 109.0), at(10, 109.9)) == []
    assert Outage(3.0, 15.5).seconds == 12.5


def test_a_clock_that_began_again_behind_the_event_before_has_led_for_nothing() -> None:
    """The journal of a standby may lag behind: the event before was the newest one it had."""
    assert outages_of(at(0, 100), at(8, 99)) == [(0, 8)]


@pytest.mark.parametrize("away_s", [0.0, MIN_AWAY_S - 0.01])
def test_what_a_busy_machine_does_is_no_outage(away_s: float) -> None:
    assert outages_of(at(0, 100), at(10 + away_s, 110)) == []
    assert outages_of(at(0, 100), at(10 - away_s, 110)) == [], "the wall's clock was set back"


def test_a_run_that_rests_and_a_coordinator_that_tells_no_time_have_none() -> None:
    rests = at(5, 105, "RunFailed")
    assert outages_of(at(0, 100), rests, at(90, 106, "RunResumed"), at(91, 107)) == []
    assert outages_of(at(0, 0.0), at(90, 0.0)) == []
    assert outages_of(at(0, 0.0), at(90, 50.0)) == []
