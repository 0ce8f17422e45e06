"""Numbers and times as short texts."""

import math
from collections.abc import Sequence
from typing import Final

from stratagem.common.base.text import counted

DIGITS: Final = 3
"""Significant digits of a number in a line."""
MAX_METRICS: Final = 8
"""Metrics in a line; with thirty and more it would fill half a screen."""
FULL, HALF, EMPTY = "━", "╸", "─"


def number_text(value: float) -> str:
    """Return a number with three significant digits, such as "1.50" or "0.0432"; zero as "0"."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if not -4 <= exponent < 6:
        return f"{value:.{DIGITS - 1}e}"
    return f"{value:,.{max(0, DIGITS - 1 - exponent)}f}"


def duration_text(seconds: float) -> str:
    """Return a time as "2:10" or "1:02:10"; from 100 hours on in days."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 100:
        return f"{whole / 86_400:,.0f} days"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def few(names: Sequence[str]) -> Sequence[str]:
    """Return those of the metrics that a line shows."""
    return names[:MAX_METRICS]


def more_text(names: Sequence[str]) -> str:
    """Return how many metrics a line leaves out: "57 more metrics"; "" for none."""
    num_more = len(names) - len(few(names))
    return "" if num_more <= 0 else counted(num_more, "more metric")


def bar_text(fraction: float, cells: int) -> str:
    """Return a bar of as many cells, filled by half cells."""
    halves = math.floor(min(max(fraction, 0.0), 1.0) * cells * 2)
    bar = FULL * (halves // 2) + HALF * (halves % 2)
    return bar + EMPTY * (cells - len(bar))
