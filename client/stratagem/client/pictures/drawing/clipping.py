"""Cuts lines where they leave the frame that they are drawn in."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

Point = tuple[float, float]


def within(points: Iterable[Point], top: float, bottom: float) -> Iterator[list[Point]]:
    """Yield the parts of a line through the points that lie between two heights, top < bottom."""
    part: list[Point] = []
    for before, after in pairwise(points):
        enters, leaves = _inside(before[1], after[1], top, bottom)
        if enters > leaves:
            continue
        if not part or enters > 0:
            part = [_between(before, after, enters)]
        part.append(_between(before, after, leaves))
        if leaves < 1:
            yield part
            part = []
    if part:
        yield part


def _inside(start: float, end: float, top: float, bottom: float) -> tuple[float, float]:
    """Return from which to which share of its length a line of these heights is inside; the first
    one is greater where it is not."""
    if start == end:
        return (0.0, 1.0) if top <= start <= bottom else (1.0, 0.0)
    first, last = sorted(((top - start) / (end - start), (bottom - start) / (end - start)))
    return max(first, 0.0), min(last, 1.0)


def _between(before: Point, after: Point, share: float) -> Point:
    (x, y), (to_x, to_y) = before, after
    return x + (to_x - x) * share, y + (to_y - y) * share
