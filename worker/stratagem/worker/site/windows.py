"""Windows: the times of the week in which a site takes part, in its own time zone.

A window is days and, unless whole days are meant, hours: "Mon-Fri 19:00-06:00", "Sat-Sun". Hours
whose end is not after their begin end on the next day. Pure functions of the time that is given.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from stratagem.common.base.errors import InvalidInputError

DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
FORM: Final = 'days and perhaps hours, such as "Mon-Fri 19:00-06:00" or "Sat-Sun"'
_WINDOW: Final = re.compile(
    r"(?P<days>\w{3}(-\w{3})?(,\w{3}(-\w{3})?)*)( (?P<begin>\d\d:\d\d)-(?P<end>\d\d:\d\d))?"
)
_WHOLE_WEEK: Final = timedelta(days=8)
"""What is open for longer than this from now is taken to be open for ever."""
_MIDNIGHT: Final = time()


@dataclass(frozen=True, slots=True)
class SiteWindow:
    """Hours on some days of the week. end: not after begin: on the next day."""

    days: frozenset[int]
    begin: time = _MIDNIGHT
    end: time = _MIDNIGHT

    def on(self, day: date, zone: ZoneInfo) -> tuple[datetime, datetime] | None:
        """Return when the window that begins on a day opens and closes; None on other days."""
        if day.weekday() not in self.days:
            return None
        last = day + timedelta(days=self.end <= self.begin)
        opens = datetime.combine(day, self.begin, zone)
        return opens, datetime.combine(last, self.end, zone)


@dataclass(frozen=True, slots=True)
class Opening:
    """Whether it is open at a time, and when that changes."""

    is_open: bool
    changes: datetime | None = None
    """None: never, as far as the next week says."""


def parse_window(text: str) -> SiteWindow:
    """Return the window that a text means. Raises InvalidInputError with what is allowed."""
    found = _WINDOW.fullmatch(text)
    if found is None:
        raise InvalidInputError(f"{text!r} is not {FORM}")
    days = frozenset(day for part in found["days"].split(",") for day in _days(part, text))
    if found["begin"] is None:
        return SiteWindow(days)
    return SiteWindow(days, _hour(found["begin"], text), _hour(found["end"], text))


def _days(part: str, text: str) -> Iterator[int]:
    names = part.split("-")
    unknown = [name for name in names if name not in DAYS]
    if unknown:
        raise InvalidInputError(f"{text!r}: {unknown[0]!r} is not one of {', '.join(DAYS)}")
    first, last = DAYS.index(names[0]), DAYS.index(names[-1])
    for offset in range((last - first) % len(DAYS) + 1):
        yield (first + offset) % len(DAYS)


def _hour(text: str, whole: str) -> time:
    if text == "24:00":
        return _MIDNIGHT
    try:
        return time.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(f"{whole!r}: {text!r} is not a time from 00:00 to 24:00") from None


def opening(windows: Sequence[SiteWindow], zone: ZoneInfo, at: datetime) -> Opening:
    """Return whether one of the windows is open at a time, which has a time zone; always without
    any.

    Windows that follow each other without a gap are one. Times are compared as moments, so that a
    night on which the clocks are put back is an hour longer.
    """
    if not windows:
        return Opening(is_open=True)
    now = at.timestamp()
    spans = _spans(windows, zone, at.astimezone(zone).date())
    for opens, closes in spans:
        if opens.timestamp() <= now < closes.timestamp():
            is_endless = closes.timestamp() - now > _WHOLE_WEEK.total_seconds()
            return Opening(is_open=True, changes=None if is_endless else closes)
    later = [opens for opens, _ in spans if opens.timestamp() > now]
    return Opening(is_open=False, changes=later[0] if later else None)


def _spans(
    windows: Sequence[SiteWindow], zone: ZoneInfo, today: date
) -> list[tuple[datetime, datetime]]:
    """Return when it is open from yesterday to two weeks from now, in order and without overlap."""
    days = [today + timedelta(days=number) for number in range(-1, 15)]
    found = (window.on(day, zone) for day in days for window in windows)
    merged: list[tuple[datetime, datetime]] = []
    for opens, closes in sorted(filter(None, found), key=lambda span: span[0].timestamp()):
        if merged and opens.timestamp() <= merged[-1][1].timestamp():
            before = merged.pop()
            merged.append((before[0], max(before[1], closes, key=lambda end: end.timestamp())))
        else:
            merged.append((opens, closes))
    return merged


def told(moment: datetime, zone: ZoneInfo) -> str:
    """Return a moment as "Mon 19:00 Europe/Vienna"."""
    local = moment.astimezone(zone)
    return f"{DAYS[local.weekday()]} {local:%H:%M} {zone.key}"
