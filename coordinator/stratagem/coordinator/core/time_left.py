"""The pace of a run, and how long it will take: a window over what it has done, without a clock of
its own."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

WINDOW_S: Final = 60.0
"""Seconds of training that the pace is taken over."""
MIN_SPAN_S: Final = 10.0
"""Seconds of training, counted from the first step on, before there is a pace at all: what is
loaded and compiled in that step is no measure of the others."""
MIN_MARKS: Final = 3
"""Marks that are kept however old they are: of rounds, each may take longer than the window."""
MIN_MARK_GAP_S: Final = 0.25
"""Seconds of training between two marks: with less, the newer one takes the place of the older."""


@dataclass(frozen=True, slots=True)
class PaceMark:
    """What a run had done when it had trained for so long."""

    trained_s: float
    done: float


@dataclass(frozen=True, slots=True)
class Pace:
    """The marks of the last minute of training; time in which a run does not train does not
    count."""

    trained_s: float = 0.0
    """Seconds of training until it was looked at last."""
    seen_s: float | None = None
    """The clock then; None while it does not train."""
    marks: tuple[PaceMark, ...] = ()

    def seen(self, now_s: float, done: float, *, trains: bool) -> "Pace":
        """Return the pace after a look at the run: what it has done by now, in steps or other
        units and parts of them. One that goes back begins anew."""
        if not trains:
            return replace(self, seen_s=None)
        trained_s = self._trained_s(now_s)
        marks = self.marks
        if marks and done < marks[-1].done:
            marks = ()
        if not marks or done > marks[-1].done:
            if len(marks) > 1 and trained_s - marks[-2].trained_s < MIN_MARK_GAP_S:
                marks = marks[:-1]
            marks = (*marks, PaceMark(trained_s, done))
        while len(marks) > MIN_MARKS and marks[1].trained_s <= trained_s - WINDOW_S:
            marks = marks[1:]
        return Pace(trained_s, now_s, marks)

    def eta_s(self, now_s: float, total: float) -> float | None:
        """Return the seconds that are left at this pace until `total` is done; None while it does
        not train, and before there is a pace."""
        if self.seen_s is None or not self.marks:
            return None
        first, *others = self.marks
        last = self.marks[-1]
        if first.done == 0 and len(others) > 1:
            first = others[0]
        elif first.done == 0 and self._trained_s(now_s) - last.trained_s < MIN_SPAN_S:
            return None
        span_s, gained = self._trained_s(now_s) - first.trained_s, last.done - first.done
        if span_s < MIN_SPAN_S or gained <= 0 or total <= 0:
            return None
        return max(total - last.done, 0.0) * span_s / gained

    def _trained_s(self, now_s: float) -> float:
        return self.trained_s + (0.0 if self.seen_s is None else max(now_s - self.seen_s, 0.0))


def epoch_of(step: int, steps_per_epoch: int) -> float:
    """Return how often the rows have been gone through; 0 where that is not known."""
    return step / steps_per_epoch if steps_per_epoch else 0.0


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Return the steps in which every row is seen once; 0 where the rows are not counted."""
    return ceil(num_rows / batch_size)
