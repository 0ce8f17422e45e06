"""A span of events: what it takes, and what is left of it."""

import pytest

from stratagem.coordinator.core.event_span import EventSpan

pytestmark = pytest.mark.core


def test_what_was_read_is_not_asked_for_again() -> None:
    assert EventSpan(2, 9).after(4) == EventSpan(5, 9)
    backwards = EventSpan(2, 9, newest_first=True)
    assert backwards.after(8) == EventSpan(2, 8, newest_first=True)


def test_without_kinds_it_takes_all() -> None:
    assert EventSpan().wants("RunFailed")
    some = EventSpan(kinds=frozenset({"RunFailed"}))
    assert (some.wants("RunFailed"), some.wants("RunReleased")) == (True, False)
