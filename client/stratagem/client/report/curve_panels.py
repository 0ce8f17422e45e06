"""The curves of a run: what it has measured over its steps or rounds."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from stratagem.client.course.failure import failed_step
from stratagem.client.pictures.curve import CurveMark, MarkKind, curve
from stratagem.client.pictures.curve_rows import Line, cut
from stratagem.client.pictures.picture import Picture
from stratagem.client.report.lines import MAX_PARTS, groups, num_nodes, with_history
from stratagem.client.report.panel import Panel
from stratagem.client.report.run_values import ReportedRun

Steps = tuple[float, float]

MAX_CURVES: Final = 8
LOSS: Final = "train.loss"
NOTES: Final[Mapping[str, str]] = {
    "train.grad_norm": "the 2-norm of the whole gradient of a step, before clipping",
    "train.max_grad_norm": "the greatest norm of a step's gradient in a segment or round",
    "train.loss_min": "the least loss of a client in the round",
    "train.loss_max": "the greatest loss of a client in the round",
    "train.loss_std": "how much the losses of the clients differ, weighted by rows",
    "train.consensus_distance": "how far the nodes are from their mean",
    "train.step_ratio": "all steps for each one whose gradient is exact, not predicted",
    "time.rows_per_s": "rows per second of the first worker, by its clock",
}
"""What a metric is, where its name does not say it."""


def curve_panels(run: ReportedRun, steps: Steps | None = None) -> list[Panel]:
    """Return the curves of a run over the same steps: losses first, then one for each other
    metric. steps: the first and the last one that are shown; unless given, all."""
    marks, unit = _marks(run), unit_of(run)
    lines = between(lines_of(run), steps)
    frames = groups(lines)[:MAX_CURVES]
    if steps is not None:
        marks = [mark for mark in marks if steps[0] <= mark.step <= steps[1]]
    span = steps or _span([line for _, of_one in frames for line in of_one], marks)
    panels = [
        _curve(name, of_one, marks if at == 0 else (), unit, span)
        for at, (name, of_one) in enumerate(frames)
    ]
    told = " ".join(filter(None, (_of_nodes(run), _lost_steps(run))))
    return [replace(panels[0], note=told), *panels[1:]] if panels and told else panels


def lines_of(run: ReportedRun) -> dict[str, Line]:
    """Return what the whole run has measured, by name."""
    return with_history(run.course.root.lines, run.history, num_nodes(run.job))


def _of_nodes(run: ReportedRun) -> str:
    """Return what the loss of nodes that gossip is."""
    if f"node/0:{LOSS}" not in run.history or num_nodes(run.job) > MAX_PARTS:
        return ""
    return f"{LOSS}: the plain mean over the nodes, from the least to the greatest of any."


def _lost_steps(run: ReportedRun) -> str:
    """Return, of a run that has failed in a step, that the steps before it are gone; otherwise
    nothing."""
    error = run.status.error
    step = failed_step(error.activity) if error is not None else None
    if run.status.phase != "FAILED" or step is None or unit_of(run) != "step":
        return ""
    kept = max((line.step[-1] for line in lines_of(run).values() if len(line.step)), default=0)
    if step <= kept + 1:
        return ""
    return (
        f"The steps after {kept:,} are not kept: the run failed in step {step:,}, before their "
        "segment had ended."
    )


def between(lines: Mapping[str, Line], steps: Steps | None) -> dict[str, Line]:
    """Return the part of lines between two steps; those that have none there are left out."""
    if steps is None:
        return dict(lines)
    found = {name: cut(line, *steps) for name, line in lines.items()}
    return {name: line for name, line in found.items() if len(line.step)}


def _span(lines: Sequence[Line], marks: Sequence[CurveMark]) -> tuple[float, float] | None:
    ends = [line.step[-1] for line in lines if len(line.step)] + [mark.step for mark in marks]
    last = max(ends, default=0)
    return (0.0, float(last)) if last > 0 else None


def _curve(
    name: str,
    lines: Sequence[Line],
    marks: Sequence[CurveMark],
    unit: str,
    span: tuple[float, float] | None,
) -> Panel:
    title = "Loss" if name == "loss" else name
    is_log = name == "train.consensus_distance"
    height = 270 if name == "loss" else 204

    def draw(width: int, *, log: bool) -> Picture:
        frame = partial(curve, title=title, unit=unit, width=width, height=height, span=span)
        return frame(lines, marks, log=log)

    def plain(width: int) -> Picture:
        return draw(width, log=is_log)

    def logarithmic(width: int) -> Picture:
        return draw(width, log=True)

    has_log = not is_log and any(value > 0 for line in lines for value in line.last)
    note = f"{name}: {NOTES[name]}." if name in NOTES else ""
    return Panel(name, title, plain, note, logarithmic if has_log else None)


def unit_of(run: ReportedRun) -> str:
    """Return what a run counts to the right: rounds or steps, in a population those of a member."""
    strategy = run.strategy
    if strategy.get("type") == "PopulationBased":
        strategy = (strategy.get("options") or {}).get("inner") or {}
    return "round" if strategy.get("type") == "Federated" else "step"


def _marks(run: ReportedRun) -> list[CurveMark]:
    """Return deaths and joins of the root's members after the first step, at the step that was
    reached when they happened."""
    found: list[CurveMark] = []
    times = [time_s for time_s, _ in run.course.root.reached]

    def step_at(time_s: float) -> int:
        at = bisect_right(times, time_s)
        return run.course.root.reached[at - 1][1] if at else 0

    for stay in run.course.members.intervals:
        if stay.party:
            continue
        began = step_at(stay.began_s)
        if began:
            found.append(CurveMark(began, MarkKind.JOIN, f"{stay.worker_id} joined"))
        if stay.is_lost and stay.ended_s is not None:
            step = step_at(stay.ended_s) if stay.step is None else stay.step
            found.append(CurveMark(step, MarkKind.DEATH, f"{stay.worker_id} lost: {stay.ending}"))
    return found
