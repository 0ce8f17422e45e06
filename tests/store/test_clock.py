from stratagem.coordinator.clock import LeaderClock


def test_the_clock_goes_on_from_the_last_journaled_value() -> None:
    time_s = 5000.0
    clock = LeaderClock(12.5, lambda: time_s)
    assert clock.now() == 12.5
    time_s += 2
    assert clock.now() == 14.5
