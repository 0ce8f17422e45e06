"""How pictures are looked at: which steps of curves, on which axis, and how many side by side."""

from dataclasses import dataclass
from typing import Final

BETWEEN: Final = 54
"""Pixels between pictures side by side; see the frame and the gap of figures in style.css."""


@dataclass(frozen=True, slots=True)
class CurveView:
    """How the pictures of a page are looked at."""

    first_step: int = 1
    last_step: int | None = None
    """None: as far as the run has come."""
    log: bool = False
    columns: int = 1
    """Of pictures: the last one of an odd number fills two."""

    def width_of(self, at: int, num_pictures: int, width: int) -> int:
        """Return the width of a picture where a column is so wide."""
        is_alone = self.columns == 2 and at == num_pictures - 1 and num_pictures % 2 == 1
        return 2 * width + BETWEEN if is_alone else width

    @property
    def is_part(self) -> bool:
        """Return whether some steps are left out."""
        return self.first_step > 1 or self.last_step is not None

    def steps(self, reached: int) -> tuple[float, float] | None:
        """Return the ends of the frame of runs that have reached a step; None: all of them."""
        if not self.is_part:
            return None
        last = max(reached, 1) if self.last_step is None else self.last_step
        return float(self.first_step), float(max(last, self.first_step + 1))


WHOLE: Final = CurveView()
