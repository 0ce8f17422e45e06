"""Windows of a site: when it is open, and when that changes, across weeks and clock changes."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.site.file import DAYS, moment_text, opening, parse_window

pytestmark = pytest.mark.core

VIENNA = ZoneInfo("Europe/Vienna")
NIGHTS = [parse_window("Mon-Fri 19:00-06:00"), parse_window("Sat-Sun")]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=VIENNA)


# 2026-11-23 is a Monday.
@pytest.mark.parametrize(
    ("moment", "is_open", "changes"),
    [
        ("2026-11-23 00:00", False, "Mon 19:00 Europe/Vienna"),  # the weekend ends at midnight
        ("2026-11-23 18:59", False, "Mon 19:00 Europe/Vienna"),
        ("2026-11-23 19:00", True, "Tue 06:00 Europe/Vienna"),
        ("2026-11-24 05:59", True, "Tue 06:00 Europe/Vienna"),
        ("2026-11-24 06:00", False, "Tue 19:00 Europe/Vienna"),
        ("2026-11-27 23:00", True, "Mon 00:00 Europe/Vienna"),  # Friday night goes on
        ("2026-11-28 12:00", True, "Mon 00:00 Europe/Vienna"),
        ("2026-11-29 23:59", True, "Mon 00:00 Europe/Vienna"),
    ],
)
def test_nights_and_weekends(moment: str, is_open: bool, changes: str) -> None:
    found = opening(NIGHTS, VIENNA, at(moment))
    assert found.changes is not None
    assert (found.is_open, moment_text(found.changes, VIENNA)) == (is_open, changes)


@pytest.mark.parametrize(
    "text", ["", "Mon-Sun", "Wed-Tue", "Mon-Sun 00:00-24:00", "Mon-Sun 09:00-09:00"]
)
def test_a_whole_week_never_ends_nor_does_a_time_without_windows(text: str) -> None:
    windows = [parse_window(text)] if text else []
    found = opening(windows, VIENNA, at("2026-11-25 12:00"))
    assert (found.is_open, found.changes) == (True, None)


@pytest.mark.parametrize(("begin", "hours"), [("2026-10-24 19:00", 12), ("2026-03-28 19:00", 10)])
def test_a_night_on_which_clocks_are_put_back_is_an_hour_longer(begin: str, hours: int) -> None:
    found = opening([parse_window("Sat 19:00-06:00")], VIENNA, at(begin))
    assert found.changes is not None
    assert found.changes.timestamp() - at(begin).timestamp() == hours * 3600


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DAYS), st.sampled_from(DAYS), st.integers(0, 1439), st.integers(0, 1439)
        ),
        min_size=1,
        max_size=3,
    ),
    st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31)),
)
def test_it_changes_when_it_says(drawn: list[tuple[str, str, int, int]], moment: datetime) -> None:
    windows = [
        parse_window(f"{first}-{last} {b // 60:02}:{b % 60:02}-{e // 60:02}:{e % 60:02}")
        for first, last, b, e in drawn
    ]
    now = moment.replace(tzinfo=UTC)
    found = opening(windows, VIENNA, now)
    if found.changes is None:
        assert found.is_open
        return
    assert found.changes.timestamp() > now.timestamp()
    change = datetime.fromtimestamp(found.changes.timestamp(), UTC)
    before = opening(windows, VIENNA, change - timedelta(microseconds=1))
    after = opening(windows, VIENNA, change)
    assert (before.is_open, after.is_open) == (found.is_open, not found.is_open)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not days and perhaps hours"),
        ("Mo-Fr 19:00-06:00", "is not days and perhaps hours"),
        ("Mon-Fri 19-06", "is not days and perhaps hours"),
        ("Mon–Fri 19:00-06:00", "is not days and perhaps hours"),
        ("Mon-Fre", "'Fre' is not one of Mon, Tue"),
        ("Mon 19:00-25:00", "'25:00' is not a time from 00:00 to 24:00"),
        ("Mon 19:61-20:00", "'19:61' is not a time"),
    ],
)
def test_other_texts_are_refused_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        parse_window(text)
