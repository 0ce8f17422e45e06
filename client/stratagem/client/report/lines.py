"""The curves of a run from its facts: one value for each segment or round that has ended."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from stratagem.client.course.payloads import number, numbers, party_of, undone_from
from stratagem.client.course.shapes import EventLike, SeriesLike
from stratagem.client.pictures.curve_rows import Line
from stratagem.common.history import Columns
from stratagem.common.history.columns import Floats, Ints, shortened
from stratagem.common.history.recording import PREFIX, party_of_stage
from stratagem.common.job.fields import CLIENT_MAX, CLIENT_MEAN, CLIENT_MIN, of_metric

_TRAIN = "train.loss"
_RATE = "train.lr"
_COUNTED = ("train.loss_", "stop.", "plateau.", "train.skipped_steps")
"""Metrics that are no curve: spreads, and what the coordinator counts on."""

_GRAD_NORM = "train.grad_norm"
_OWN = ("train.", "time.")
"""Beginnings of the names of a run's own series: those of its parts begin with the part."""
RECORDED = ("train.*", "time.rows_per_s")
"""Series of the step history that have a curve."""

MAX_POINTS = 4096
"""Of one line, more than a picture has columns; others are rows of several values each."""
MAX_PARTS = 16
"""Stages, nodes and replicas of a party whose steps are asked for."""
_OF_STAGES = ("busy_s", "span_s", "memory_bytes")


def recorded(job: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the series and the parties whose steps the pictures of a run with this job show: its
    own, and those of the stages of its pipeline, of its nodes or of its replicas."""
    strategy = job.get("strategy") or {}
    aggregation = (strategy.get("aggregation") or {}).get("method")
    if num_replicas_apart(strategy):
        return RECORDED, ("", *(f"replica/{number}" for number in range(MAX_PARTS)))
    if strategy.get("type") == "DataParallel":
        inner = (strategy.get("options") or {}).get("inner") or {}
        strategy = inner if inner.get("type") == "ModelParallel" else strategy
    if strategy.get("type") == "ModelParallel":
        names = (f"stage/{stage}" for stage in range(MAX_PARTS))
        told = (party_of_stage(stage) for stage in range(MAX_PARTS))
        return (*RECORDED, *_OF_STAGES, f"{PREFIX}*"), ("", *names, *told)
    if aggregation == "Decentralized":
        return RECORDED, ("", *(f"node/{node}" for node in range(MAX_PARTS)))
    return RECORDED, ()


def num_replicas_apart(strategy: Mapping[str, Any]) -> int:
    """Return how many replicas take local steps under this strategy; 0: none do."""
    takes_them = (strategy.get("options") or {}).get("local_steps") is not None
    is_theirs = strategy.get("type") == "DataParallel" and takes_them
    return int(strategy.get("num_replicas") or 0) if is_theirs else 0


class LinesFolding:
    """The metrics of a party's segments and rounds while the events of its run are read; a round's
    step is its number.

    What a resumption from an earlier commit has undone is left out. Values of training are lines,
    those of evaluations dots.
    """

    def __init__(self, party: str = "") -> None:
        self._party = party
        self._found: dict[str, dict[int, float]] = {}
        """By metric, then by segment."""
        self._steps: dict[int, int] = {}
        """Of each segment."""

    @property
    def lines(self) -> dict[str, Line]:
        """Return the lines so far, by name; a spread over clients is the band of its metric."""
        lines = {name: _line(name, points, self._steps) for name, points in self._found.items()}
        return {
            name: _with_band(line, lines) for name, line in lines.items() if of_metric(name) == name
        }

    def fold(self, event: EventLike) -> None:
        """Take the next event of the run."""
        last = undone_from(event)
        if last is not None:
            for name, points in self._found.items():
                self._found[name] = {n: value for n, value in points.items() if n <= last}
        if party_of(event) != self._party:
            return
        fact = event.payload
        match event.kind:
            case "SegmentFinished" | "SegmentCommitted":
                self._steps[fact["segment"]] = fact["step"]
                self._add(fact["segment"], fact["step"], fact)
            case "Evaluated":
                segment = fact["segment"]
                self._add(segment, self._steps.setdefault(segment, segment), fact)
            case "GenerationClosed":
                self._steps[fact["generation"]] = fact["step"]
                self._add(fact["generation"], fact["step"], fact)

    def _add(self, segment: int, step: int, fact: Mapping[str, object]) -> None:
        values = numbers(fact.get("metrics"))
        if step and "loss" in fact:
            values[_TRAIN] = number(fact["loss"])
        for name, value in values.items():
            if not name.startswith(_COUNTED):
                self._found.setdefault(name, {})[segment] = value


def num_nodes(job: Mapping[str, Any]) -> int:
    """Return how many nodes gossip in a run of this job; 0: there are none."""
    strategy = job.get("strategy") or {}
    gossips = (strategy.get("aggregation") or {}).get("method") == "Decentralized"
    return int(strategy.get("num_replicas") or 0) if gossips else 0


def with_history(
    lines: Mapping[str, Line], history: Mapping[str, SeriesLike], nodes: int = 0
) -> dict[str, Line]:
    """Return the lines with every step of those series of the party itself that were recorded.

    nodes: that gossip. The loss of a step is then the plain mean of theirs, where all are known.
    """
    own = {
        name: recorded_line(name, series)
        for name, series in history.items()
        if len(series.step) and name.startswith(_OWN)
    }
    of_nodes = [history.get(f"node/{node}:{_TRAIN}") for node in range(nodes)]
    known = [series for series in of_nodes if series is not None]
    mean = mean_line(_TRAIN, known) if len(known) == nodes else None
    if mean is not None:
        own[_TRAIN] = mean
    found = {**lines, **own}
    if _GRAD_NORM in own:
        found.pop("train.max_grad_norm", None)  # which its band shows
    return found


def mean_line(name: str, of_each: Sequence[SeriesLike]) -> Line | None:
    """Return the plain mean of series at the steps that all of them have, with a band from the
    least to the greatest value of any; None where there are none."""
    if not of_each:
        return None
    common = reduce(np.intersect1d, [series.step for series in of_each])
    if not len(common):
        return None
    rows = [np.searchsorted(series.step, common) for series in of_each]
    last, low, high = (
        np.stack([column[at] for column, at in zip(columns, rows, strict=True)])
        for columns in zip(*((s.last, s.min, s.max) for s in of_each), strict=True)
    )
    means = [math.fsum(values) / len(of_each) for values in last.T]
    certain = [series.step[~series.provisional] for series in of_each]
    until = min(float(steps[-1]) if len(steps) else 0.0 for steps in certain)
    least, greatest = np.min(low, axis=0).tolist(), np.max(high, axis=0).tolist()
    return Line(name, common.tolist(), means, least, greatest, provisional_from=until)


def recorded_line(name: str, series: SeriesLike) -> Line:
    """Return a recorded series as a line of this name."""
    certain = series.step[~series.provisional]
    values = (series.step, series.last, series.min, series.max)
    step, last, low, high = (each.tolist() for each in values)
    until = float(certain[-1]) if len(certain) else 0.0
    return Line(name, step, last, low, high, provisional_from=until)


def _line(name: str, points: Mapping[int, float], steps_of: Mapping[int, int]) -> Line:
    """Return the line of values by segment; steps_of: the last step of each segment."""
    told = ((steps_of[segment], value) for segment, value in points.items())
    in_order = sorted(told, key=lambda point: point[0])
    dots = not name.startswith("train.")
    steps, values = [step for step, _ in in_order], [value for _, value in in_order]
    if len(in_order) <= MAX_POINTS:
        return Line(name, steps, values, dots=dots)
    rows = _few(np.array(steps), np.array(values))
    step, last, low, high = (each.tolist() for each in rows.arrays[:4])
    return Line(name, step, last, low, high, dots=dots)


def _with_band(line: Line, lines: Mapping[str, Line]) -> Line:
    metric = line.name.removesuffix(f".{CLIENT_MEAN}")
    low, high = (lines.get(f"{metric}.{end}") for end in (CLIENT_MIN, CLIENT_MAX))
    if low is None or high is None or not line.step == low.step == high.step:
        return line  # of many values rows are made, and some rounds may have no spread
    return replace(line, low=low.last, high=high.last)


def _few(steps: Ints, values: Floats) -> Columns:
    """Return values as rows that keep the last, the least and the greatest of those in each."""
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, np.nan)
    counts, others = is_finite.astype(np.int64), (~is_finite).astype(np.int64)
    rows = Columns(steps, finite, finite, finite, counts, others)
    return shortened(rows, 1, MAX_POINTS)[0]


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
