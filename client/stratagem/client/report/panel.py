"""A picture of a run that can be drawn for any width."""

from collections.abc import Callable
from dataclasses import dataclass

from stratagem.client.pictures.picture import Picture


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture that can be drawn for any width."""

    name: str
    """Of the picture, such as "loss" or "members"; unique within a run."""
    title: str
    draw: Callable[[int], Picture]
    note: str = ""
    """What to know about it, as a sentence."""
    draw_log: Callable[[int], Picture] | None = None
    """The same with a logarithmic axis; None: it has none."""

    def drawn(self, width: int, *, log: bool = False) -> Picture:
        """Return the picture for a width; log: with a logarithmic axis, where it can have one."""
        return (self.draw_log if log and self.draw_log else self.draw)(width)


def by_width(draw: Callable[..., Picture], most: int = 10_000) -> Callable[[int], Picture]:
    """Return what draws a picture for a width, but for no greater one than `most`."""
    return lambda width: draw(width=min(width, most))
