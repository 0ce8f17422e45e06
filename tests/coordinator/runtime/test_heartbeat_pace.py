"""The pace of heartbeats, as a function of the number of workers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.process.process import HEARTBEATS_PER_TTL
from stratagem.coordinator.runtime.leases import (
    BEATS_PER_S,
    LONGEST_INTERVAL_S,
    HeartbeatPace,
    PaceRule,
)

RULES = st.builds(
    lambda shortest_s, beats: PaceRule(shortest_s, shortest_s * beats),
    st.floats(0.01, 60.0),
    st.floats(HEARTBEATS_PER_TTL, 100.0),
)
NUMBERS = st.integers(0, 100_000)


def test_the_pace_of_the_default_settings() -> None:
    rule = PaceRule(2.0, 10.0)
    assert rule.of(0) == rule.of(1000) == HeartbeatPace(2.0, 10.0)
    assert rule.of(3000) == HeartbeatPace(6.0, 10.0 + HEARTBEATS_PER_TTL * 4)
    assert rule.of(5000) == rule.of(100_000) == HeartbeatPace(10.0, 10.0 + HEARTBEATS_PER_TTL * 8)


@settings(max_examples=50)
@given(RULES, NUMBERS)
def test_a_lease_outlives_late_beats_as_that_of_a_few_workers_does(
    rule: PaceRule, num_alive: int
) -> None:
    pace, few = rule.of(num_alive), rule.of(0)
    assert few == HeartbeatPace(rule.shortest_s, rule.ttl_s)
    assert pace.ttl_s >= HEARTBEATS_PER_TTL * pace.interval_s * (1 - 1e-12)
    # In seconds, too: the machine that is late is as late whatever the interval.
    assert pace.ttl_s - pace.interval_s >= (few.ttl_s - few.interval_s) * (1 - 1e-12)


@settings(max_examples=50)
@given(RULES, NUMBERS, NUMBERS)
def test_more_workers_never_beat_more_often_and_within_bounds(
    rule: PaceRule, one: int, other: int
) -> None:
    less, more = rule.of(min(one, other)), rule.of(max(one, other))
    assert less.interval_s <= more.interval_s
    assert less.ttl_s <= more.ttl_s
    assert rule.shortest_s <= less.interval_s <= max(rule.shortest_s, LONGEST_INTERVAL_S)
    if less.interval_s < LONGEST_INTERVAL_S:
        assert min(one, other) / less.interval_s <= BEATS_PER_S * (1 + 1e-12)
