"""Draw the parties (groups of workers) of a run: their tree, the stages of a pipeline, the topology
of gossip nodes, and the results of verification."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stratagem.client.pictures.axes import Axis, axis_of, box_sign, duration, short
from stratagem.client.pictures.lanes import Bar, lanes
from stratagem.client.pictures.svg import (
    SMALL,
    NumberTable,
    Picture,
    element,
    hint,
    label,
    natural,
    path_of,
    shortened,
    thinned,
    width_of,
)

# ---- Tree ----
#
# Each row shows how a party trains, how far it is, and a small curve of its loss.

ROW = 26
INDENT = 16
MAX_POINTS = 150
"""The largest number of points of a row's small loss curve."""
MAX_DRAWN = 60
"""The largest number of parties that are drawn; the table lists more."""


@dataclass(frozen=True, slots=True)
class PartyRow:
    """One party in the tree, with its progress and losses."""

    path: str
    strategy: str
    """The short name of the party's strategy."""
    done: str
    """The progress of the party, such as "3 segments"."""
    losses: Sequence[float]
    """The losses, sorted by time; the small curve shows at most one per pixel column."""
    failure: str = ""

    @property
    def depth(self) -> int:
        """Return the depth of the party in the tree: 0 for a party directly below the run."""
        return self.path.count("/")


def party_tree(rows: Sequence[PartyRow], *, title: str, width: int = 720) -> Picture:
    """Draw the tree of parties, one row each. rows: each below its parent's, siblings in order."""
    drawn = rows[:MAX_DRAWN]
    names = [row.path.rpartition("/")[2] for row in drawn]
    named = max(
        (INDENT * r.depth + width_of(n) for r, n in zip(drawn, names, strict=True)), default=0
    )
    name_end = min(26 + named + 18, width * 0.45)
    finite = [loss for row in drawn for loss in row.losses if math.isfinite(loss)]
    longest = max((len(row.losses) for row in drawn), default=0)
    x = Axis(0, max(longest - 1, 1), width - 60 - min(150.0, width * 0.28), width - 60.0)
    parts = [label(width - 8, 11, "loss", fill="muted", anchor="end", size=SMALL)] if finite else []
    for at, (row, name) in enumerate(zip(drawn, names, strict=True)):
        y = 22 + ROW * at
        parts += _branch(drawn, at, y)
        left_x = 26 + INDENT * row.depth
        parts.append(label(left_x, y + 4, shortened(name, name_end - left_x), weight="600"))
        status = ", ".join(filter(None, [row.strategy, "failed" if row.failure else row.done]))
        room = x.start - name_end - 10
        colour = "bad" if row.failure else "muted"
        if room > 40:
            text = shortened(status, room, SMALL + 1)
            parts.append(label(name_end, y + 4, text, fill=colour, size=SMALL + 1))
        parts += _small_curve(row, x, axis_of(finite, y + 9, y - 9), y, width)
    left_out = len(rows) - len(drawn)
    if left_out:
        parts.append(label(26, 26 + ROW * len(drawn), f"and {left_out} more", fill="muted"))
    failed = sum(bool(row.failure) for row in rows)
    words = f"{len(rows)} parties{f'; {failed} have failed' if failed else ''}"
    height = 22 + ROW * (len(drawn) + bool(left_out))
    return Picture(title, words, width, height, "".join(parts), _table(rows))


def _branch(rows: Sequence[PartyRow], at: int, y: float) -> Iterator[str]:
    """Yield the SVG lines that connect a party's row with its parent's."""
    depth = rows[at].depth
    x = 14 + INDENT * depth
    above = next((y - ROW * (at - n) for n in range(at - 1, -1, -1) if rows[n].depth <= depth), 6.0)
    data = f"M{x} {above:.0f}V{y}H{x + 8}"
    yield element("path", d=data, fill="none", stroke="muted", stroke_opacity="0.6")


def _small_curve(row: PartyRow, x: Axis, axis: Axis, y: float, width: int) -> Iterator[str]:
    """Yield a party's loss curve, on a scale that all parties share, and its last loss as text."""
    if not row.losses:
        return
    last = len(row.losses) - 1
    places = [*range(0, last, last // MAX_POINTS + 1), last]
    points = [(x(at), axis(row.losses[at])) for at in places if math.isfinite(row.losses[at])]
    shape: dict[str, Any] = {"stroke_width": 1.5, "stroke_linejoin": "round"}
    words = hint(f"{row.path}: loss {short(row.losses[0])} to {short(row.losses[-1])}")
    yield element("path", words, d=path_of(points), fill="none", stroke="s1", **shape)
    for at, up in points[-1:]:
        yield element("circle", words, cx=at, cy=up, r=2.2, fill="s1")
    style: dict[str, Any] = {"anchor": "end", "size": SMALL + 1}
    yield label(width - 8, y + 4, short(row.losses[-1]), **style)


def _table(rows: Sequence[PartyRow]) -> NumberTable:
    listed = [
        (
            *(row.path, row.strategy, row.done),
            *((short(row.losses[0]), short(row.losses[-1])) if row.losses else ("", "")),
            row.failure,
        )
        for row in rows
    ]
    headings = ("party", "trains under", "done", "first loss", "last loss", "failure")
    return NumberTable(headings, thinned(listed, 200))


# ---- Stages ----
#
# The stages of a pipeline are shown at work on the micro-batches of one step, with the idle time
# of each.

COLOURS = {
    "forward": "s1",
    "backward": "s2",
    "input": "s2",
    "weight": "s3",
    "exchange": "s4",
    "optimizer": "s6",
    "wait": "grid",
}
_TEXTS = {
    "exchange": "sums over micro-batches, stages and replicas",
    "optimizer": "step of the optimizer",
}
"""The tooltips for the kinds of work that a stage does once for all micro-batches."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work of a pipeline stage, to draw in a lane."""

    lane: int
    """The index of the lane, which stands for a stage, or for a worker with several stages."""
    start: float
    end: float
    kind: str
    """Per micro-batch: forward, backward, input or weight (the two halves of a backward pass), or
    wait (for the next task's input); once for all micro-batches: exchange or optimizer."""
    micro_batch: int

    @property
    def computes(self) -> bool:
        """Return whether the task works on a micro-batch; other time counts as bubble (idle)."""
        return self.kind != "wait" and self.kind not in _TEXTS

    @property
    def text(self) -> str:
        """Return the tooltip for the task."""
        if self.kind == "wait":
            return f"waits for what micro-batch {self.micro_batch} needs"
        return _TEXTS.get(self.kind, f"{self.kind} of micro-batch {self.micro_batch}")


def bubble(tasks: Sequence[Task], num_lanes: int) -> float:
    """Return the pipeline's bubble: the idle share of all lanes' time, from the first to the last
    task on a micro-batch."""
    tasks = [task for task in tasks if task.computes]
    if not tasks:
        return 0.0
    span = max(task.end for task in tasks) - min(task.start for task in tasks)
    busy = sum(task.end - task.start for task in tasks)
    return 1 - busy / (num_lanes * span) if span > 0 else 0.0


def stages(
    names: Sequence[str],
    tasks: Sequence[Task],
    *,
    title: str,
    unit: str = "",
    idle: float | None = None,
    width: int = 720,
) -> Picture:
    """Draw the work of pipeline stages, a lane for each name. unit: the unit of times, by default
    seconds. idle: the bubble to state, by default that of these tasks."""
    idle = bubble(tasks, len(names)) if idle is None else idle
    bars = [
        Bar(
            *(task.lane, task.start, task.end, COLOURS[task.kind], task.text),
            inside=str(task.micro_batch) if task.computes else "",
        )
        for task in tasks
    ]
    kinds = [kind for kind in COLOURS if any(task.kind == kind for task in tasks)]
    signs = [(box_sign(COLOURS[kind], fill_opacity="0.82"), kind) for kind in kinds]
    signs.append((label(-4, 4, "◌", fill="muted"), f"bubble {idle:.0%}"))
    last = max((task.end for task in tasks), default=0.0)
    form = short if unit else duration
    content, height = lanes(names, bars, signs, width=width, end=last, form=form, unit=unit)
    rows = [
        (
            *(names[task.lane], task.kind, "" if task.kind in _TEXTS else str(task.micro_batch)),
            *(form(task.start), form(task.end)),
        )
        for task in sorted(tasks, key=lambda item: (item.lane, item.start))
    ]
    words = f"{len(names)} lanes, {len(tasks)} tasks; {idle:.0%} of the time is idle (bubble)"
    table = NumberTable(("stage", "what", "micro-batch", "from", "to"), thinned(rows))
    return Picture(title, words, width, height, content, table)


# ---- Topology ----
#
# Nodes stand on a circle, with a line for each exchange and its weight.

Edge = tuple[int, int, float]
"""An edge of the topology: the indices of two gossip nodes, and the mixing weight between them."""

MAX_NAMED = 40
MAX_WEIGHED = 12
"""The largest number of edges for which weights are written beside the edges."""


def topology(
    names: Sequence[str],
    edges: Sequence[Edge],
    *,
    title: str,
    workers: Sequence[str] = (),
    width: int = 360,
    height: int = 300,
) -> Picture:
    """Draw gossip nodes on a circle and the edges between them, wider for a greater weight.
    workers: the worker of each node, if known."""
    at_worker = [f"{n} on {w}" for n, w in zip(names, workers, strict=False)] or names
    room = 14 if len(names) > MAX_NAMED else 58
    radius = max(min(width / 2 - room - 34, height / 2 - 34), 20.0)
    places = [_place(at, len(names), width / 2, height / 2, radius) for at in range(len(names))]
    heaviest = max((weight for *_, weight in edges), default=1.0) or 1.0
    many = len(edges) > 1000
    parts: list[str] = []
    for a, b, weight in edges:
        text = () if many else (hint(f"{at_worker[a]} and {at_worker[b]}: weight {short(weight)}"),)
        ends: dict[str, Any] = {
            "x1": places[a][0],
            "y1": places[a][1],
            "x2": places[b][0],
            "y2": places[b][1],
        }
        size = 0.5 if many else 0.8 + 2.7 * weight / heaviest
        parts.append(
            element(*("line", *text), **ends, stroke="s1", stroke_width=size, stroke_opacity="0.45")
        )
    if len(edges) <= MAX_WEIGHED:
        parts += [_weight(weight, places[a], places[b]) for a, b, weight in edges]
    for at, (x, y) in enumerate(places):
        parts.append(element("circle", hint(at_worker[at]), cx=x, cy=y, r=6, fill="s1"))
        if len(names) <= MAX_NAMED:
            lines = [names[at], *([workers[at]] if workers else [])]
            parts.append(_name(lines, x, y, width, height))
    rows = [(at_worker[a], at_worker[b], short(weight)) for a, b, weight in edges]
    words = f"{len(names)} nodes, {len(edges)} pairs that exchange"
    table = NumberTable(("node", "and", "weight"), thinned(rows))
    return Picture(title, words, width, height, "".join(parts), table)


def _place(at: int, count: int, x: float, y: float, radius: float) -> tuple[float, float]:
    angle = 2 * math.pi * at / max(count, 1) - math.pi / 2
    return x + radius * math.cos(angle), y + radius * math.sin(angle)


def _weight(weight: float, start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return the label with an edge's weight, beside the edge's middle, as edges through the centre
    of the circle meet there."""
    x, y = (a + 0.4 * (b - a) for a, b in zip(start, end, strict=True))
    style: dict[str, Any] = {"fill": "muted", "anchor": "middle", "size": SMALL}
    return label(x, y + 4, short(weight), **style, has_halo=True)


def _name(lines: Sequence[str], x: float, y: float, width: int, height: int) -> str:
    """Return the label of a node: its name, and below that, in paler letters, its worker."""
    away_x, away_y = x - width / 2, y - height / 2
    distance = math.hypot(away_x, away_y) or 1.0
    at_x, at_y = x + away_x / distance * 13, y + away_y / distance * 15 + 4
    side = away_x / distance
    anchor = "middle" if abs(side) < 0.35 else "start" if side > 0 else "end"
    space = width - at_x if anchor == "start" else at_x if anchor == "end" else width / 2
    above = (
        (len(lines) - 1) * 13 * (0 if away_y / distance > 0.35 else 0.5 if abs(side) > 0.35 else 1)
    )
    return "".join(
        label(
            at_x,
            at_y - above + 13 * row,
            shortened(line, space, SMALL + 1),
            fill="muted" if row else "ink",
            anchor=anchor,
            size=SMALL + 1,
        )
        for row, line in enumerate(lines)
    )


# ---- Verification ----
#
# The segments of a run stand in order in one lane, by what is known of their bits; each worker that
# has executed some of them again has a lane of its own.

RESULTS: Final = {
    "verified": "good",
    "refuted": "bad",
    "verifier wrong": "s1",
    "open": "s4",
    "not verified": "warn",
    "waits": "muted",
    "not chosen": "grid",
}
"""The possible results of a segment's verification, each with its colour."""
THE_RUN: Final = "the run"
MAX_LISTED: Final = 200
"""The largest number of rows in the table of segments."""


@dataclass(frozen=True, slots=True)
class AgainExecuted:
    """A second or third execution of a segment, by workers other than those that trained it."""

    workers: Sequence[str]
    is_right: bool | None
    """The execution agrees with the majority; None if there is no majority."""

    @property
    def text(self) -> str:
        """Return the workers' names, followed by "(wrong)" or "(open)" unless they are right."""
        names = ", ".join(self.workers)
        return (
            names if self.is_right else f"{names} ({'open' if self.is_right is None else 'wrong'})"
        )


@dataclass(frozen=True, slots=True)
class SegmentCheck:
    """The result of verifying a segment once, or a segment that is not verified (yet)."""

    segment: int
    start: int
    """The number of steps of the run before the segment."""
    end: int
    result: str
    """One of RESULTS."""
    suspected: Sequence[str] = ()
    """The workers that were wrong, or of which one may have been wrong."""
    executions: Sequence[AgainExecuted] = ()

    @property
    def text(self) -> str:
        """Return the result as a sentence."""
        again = "; ".join(execution.text for execution in self.executions)
        by = f"; executed again by {again}" if again else ""
        return f"segment {self.segment}, steps {self.start + 1} to {self.end}: {self.result}{by}"


def verification(checks: Sequence[SegmentCheck], *, title: str, width: int = 720) -> Picture:
    """Draw the checks of a run's segments. checks: sorted by segment, then by time."""
    again = {name for check in checks for one in check.executions for name in one.workers}
    names = [THE_RUN, *sorted(again, key=natural)]
    newest = {check.segment: check for check in checks}
    refuted = {check.segment for check in checks if check.result == "refuted"}
    bars = [
        Bar(
            *(0, check.start, check.end, RESULTS[check.result], check.text),
            inside="" if check.result == "not chosen" else str(check.segment),
            ending="✕" if check.segment in refuted else "",
        )
        for check in newest.values()
    ]
    colours = {True: "good", False: "bad", None: "s4"}
    bars += [
        Bar(names.index(name), check.start, check.end, colours[one.is_right], check.text)
        for check in checks
        for one in check.executions
        for name in one.workers
    ]
    counts = {result: sum(check.result == result for check in checks) for result in RESULTS}
    counts = {result: count for result, count in counts.items() if count}
    signs = [(box_sign(RESULTS[result], fill_opacity="0.82"), result) for result in counts]
    if refuted:
        signs.append((label(-5, 5, "✕", fill="bad", size=13, weight="700"), "was refuted"))
    last = max((check.end for check in checks), default=0)
    content, height = lanes(names, bars, signs, width=width, end=last, form=short, unit="step")
    rows = [
        (
            *(str(check.segment), f"{check.start + 1} to {check.end}", check.result),
            *(", ".join(check.suspected), "; ".join(one.text for one in check.executions)),
        )
        for check in _listed(checks)
    ]
    words = ", ".join(f"{count} {result}" for result, count in counts.items())
    headings = ("segment", "steps", "result", "suspected", "executed again by")
    table = NumberTable(headings, thinned(rows, MAX_LISTED))
    return Picture(title, f"segments: {words}", width, height, content, table)


def _listed(checks: Sequence[SegmentCheck]) -> Sequence[SegmentCheck]:
    """Return the checks to list in the table: those of the segments chosen for verification; if
    these are too many, only the ones whose result is not "verified"."""
    chosen = [check for check in checks if check.result != "not chosen"]
    if len(chosen) <= MAX_LISTED:
        return chosen
    return [check for check in chosen if check.result != "verified"] or chosen
