"""The curves of a run from its facts: one value for each segment or round that has ended."""

from collections.abc import Iterable, Mapping

from stratagem.client.course.payloads import kept, number, numbers, party_of
from stratagem.client.course.shapes import EventLike
from stratagem.client.pictures.curve import Line
from stratagem.client.report.run_values import SeriesLike

_TRAIN = "train.loss"
_RATE = "train.lr"
_COUNTED = ("train.loss_", "stop.", "plateau.", "train.skipped_steps")
"""Metrics that are no curve: spreads, and what the coordinator counts on."""

_GRAD_NORM = "train.grad_norm"
RECORDED = ("train.*", "time.rows_per_s")
"""Series of the step history that have a curve."""

Point = tuple[int, float, float]
"""Segment, step, value."""


def lines_of(events: Iterable[EventLike], party: str = "") -> dict[str, Line]:
    """Return the metrics of a party's segments and rounds by name; a round's step is its number.

    What a resumption from an earlier commit has undone is left out. Values of training are lines,
    those of evaluations dots.
    """
    found: dict[str, dict[int, Point]] = {}
    steps: dict[int, int] = {}
    for event in events:
        for name, points in found.items():
            found[name] = {p[0]: p for p in kept(points.values(), event, lambda each: each[0])}
        if party_of(event) != party:
            continue
        fact = event.payload
        match event.kind:
            case "SegmentFinished" | "SegmentCommitted":
                steps[fact["segment"]] = fact["step"]
                _add(found, fact["segment"], fact["step"], fact)
            case "Evaluated":
                _add(found, fact["segment"], steps.get(fact["segment"], fact["segment"]), fact)
            case "GenerationClosed":
                _add(found, fact["generation"], fact["step"], fact)
    return {name: _line(name, points) for name, points in found.items()}


def _add(
    found: dict[str, dict[int, Point]], segment: int, step: int, fact: Mapping[str, object]
) -> None:
    values = numbers(fact.get("metrics"))
    if step and "loss" in fact:
        values[_TRAIN] = number(fact["loss"])
    for name, value in values.items():
        if not name.startswith(_COUNTED):
            found.setdefault(name, {})[segment] = (segment, step, value)


def with_history(lines: Mapping[str, Line], history: Mapping[str, SeriesLike]) -> dict[str, Line]:
    """Return the lines with every step of those series that were recorded."""
    recorded = {
        name: _recorded(name, series) for name, series in history.items() if len(series.step)
    }
    found = {**lines, **recorded}
    if _GRAD_NORM in recorded:
        found.pop("train.max_grad_norm", None)  # which its band shows
    return found


def _recorded(name: str, series: SeriesLike) -> Line:
    certain = series.step[~series.provisional]
    values = (series.step, series.last, series.min, series.max)
    step, last, low, high = (each.tolist() for each in values)
    until = float(certain[-1]) if len(certain) else 0.0
    return Line(name, step, last, low, high, provisional_from=until)


def _line(name: str, points: Mapping[int, Point]) -> Line:
    in_order = sorted(points.values(), key=lambda point: point[1])
    dots = not name.startswith("train.")
    return Line(name, [p[1] for p in in_order], [p[2] for p in in_order], dots=dots)


def groups(lines: Mapping[str, Line]) -> list[tuple[str, list[Line]]]:
    """Return which lines share a frame: all losses, and each other metric alone.

    In the order in which they are looked at: loss, what is evaluated, what training tells, times.
    """
    found: dict[str, list[Line]] = {}
    for name in sorted(lines, key=_rank):
        rate = name.startswith(f"{_RATE}.") or name == _RATE
        frame = "loss" if name.endswith(".loss") else _RATE if rate else name
        found.setdefault(frame, []).append(lines[name])
    return list(found.items())


def _rank(name: str) -> tuple[int, str]:
    # The colour of the training loss is the first one.
    if name.endswith(".loss"):
        return (0 if name == _TRAIN else 1), name
    return (4 if name.startswith("time.") else 3 if name.startswith("train.") else 2), name
