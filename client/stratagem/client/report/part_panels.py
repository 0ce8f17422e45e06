"""The pictures of the parts of a party: the stages of a pipeline, nodes that gossip, and replicas
that take local steps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from stratagem.client.course.shapes import SeriesLike
from stratagem.client.history.measured_actions import MeasuredStep, measured_step
from stratagem.client.history.step_history import History
from stratagem.client.pictures.curve import curve
from stratagem.client.pictures.curve_rows import Line
from stratagem.client.pictures.drawing.scales import duration
from stratagem.client.pictures.picture import Picture
from stratagem.client.pictures.stages import stages
from stratagem.client.report.lines import MAX_PARTS, recorded_line
from stratagem.client.report.panel import Panel, by_width
from stratagem.client.report.run_values import ReportedRun
from stratagem.client.report.stage_plan import measured_tasks, planned_tasks

MEGABYTE: Final = 1e6


def stage_panels(
    run: ReportedRun, strategy: Mapping[str, Any], path: str = "", num_replicas: int = 1
) -> list[Panel]:
    """Return the stages of a pipeline at work on the micro-batches of one step, the bubble, and the
    memory of each. strategy: of one replica."""
    if strategy.get("type") != "ModelParallel":
        return []
    return [
        *_work(run, strategy, path, num_replicas),
        *([] if path else [*_bubble(run), *_memory(run)]),
    ]


def _work(
    run: ReportedRun, strategy: Mapping[str, Any], path: str, num_replicas: int
) -> Iterator[Panel]:
    party = run.course.parties[path]
    step = None if path else measured_step(run.history, len(party.ranks))
    if step is not None:
        yield _measured_work(run, step)
        return
    num_rows = math.ceil((run.job.get("batch_size") or 0) / num_replicas)
    busy = [] if path else [series.last for _, series in _parts(run, "stage", "busy_s")]
    newest = [float(each[-1]) for each in busy if len(each) and each[-1] > 0]
    names, tasks = planned_tasks(party.ranks, party.engine, strategy, num_rows, newest)
    if not tasks:
        return
    is_measured = len(newest) == len(party.ranks)
    unit = "" if is_measured else "forward passes"

    def draw(width: int) -> Picture:
        return stages(names, tasks, title="Stages", unit=unit, width=width)

    lengths = (
        "each stage's pieces of work together as long as it has computed in the newest step"
        if is_measured
        else "in forward passes of one stage, all stages equal"
    )
    note = (
        f"The planned order of one step, {lengths}; a backward pass takes twice as long as a "
        "forward one, and no time passes between stages."
    )
    if is_measured and (measured := _measured_bubble(run)):
        note += f" With all waiting, the bubble of that step was {measured[1][-1]:.0%}."
    yield Panel("stages", "Stages in one step", draw, note)


def _measured_work(run: ReportedRun, measured: MeasuredStep) -> Panel:
    """Return what the stages did when in one step."""
    names, tasks = measured_tasks(measured)
    shares = dict(zip(*(_measured_bubble(run) or ((), ())), strict=True))
    idle = None if measured.is_whole else shares.get(measured.step)

    def draw(width: int) -> Picture:
        return stages(names, tasks, title="Stages", idle=idle, width=width)

    note = (
        f"Measured in step {measured.step}, the last one of its segment. The bubble is the time in "
        "which a worker did not compute, from the first to the last work on a micro-batch."
    )
    if measured.error_s:
        note += (
            " Workers of several machines have clocks of their own; how far these are apart "
            "follows from what the workers have received from each other, to "
            f"± {duration(measured.error_s)}."
        )
    if not measured.is_whole:
        note += " Not all micro-batches are shown; others were worked on where nothing is drawn."
    return Panel("stages", "Stages in one step", draw, note)


def _bubble(run: ReportedRun) -> Iterator[Panel]:
    """Yield the share of each step that was not computed in, as it was measured."""
    measured = _measured_bubble(run)
    if measured is None:
        return
    line = Line("bubble", measured[0], [100 * share for share in measured[1]])
    draw = partial(curve, [line], title="Bubble, in %", height=204)
    note = (
        "Measured: the share of a step, as long as that of the slowest worker, in which the "
        "workers did not compute."
    )
    yield Panel("bubble", "Bubble, in %", by_width(draw), note)


def _measured_bubble(run: ReportedRun) -> tuple[list[int], list[float]] | None:
    """Return steps and their bubble, if it was measured."""
    if not isinstance(run.history, History):
        return None
    steps, shares = run.history.bubble()
    return (steps.tolist(), shares.tolist()) if len(steps) else None


def _memory(run: ReportedRun) -> Iterator[Panel]:
    lines = [
        Line(each.name, each.step, [value / MEGABYTE for value in each.last])
        for name, series in _parts(run, "stage", "memory_bytes")
        if len((each := recorded_line(name, series)).step)
    ]
    if lines:
        draw = partial(curve, lines, title="Memory of the stages, in MB", height=218)
        note = "Of the process of the worker that a stage is on, on a GPU of its tensors."
        yield Panel("stage-memory", "Memory of the stages, in MB", by_width(draw), note)


def node_panels(run: ReportedRun) -> list[Panel]:
    """Return the loss of each node that gossips, of the first ones."""
    return list(_of_parts(run, "node", "train.loss", ("node-loss", "Loss of the nodes"), ""))


def replica_panels(run: ReportedRun) -> list[Panel]:
    """Return how far each replica that takes local steps moves between two joins, and its loss, of
    the first ones."""
    options = run.strategy.get("options") or {}
    count, overlap = options.get("fragments") or 1, options.get("overlap_steps") or 0
    note = (
        "The 2-norm of what a replica has moved away from what all have in common, at each step "
        "after which this is summed."
    )
    if count > 1:
        note += (
            f" Each value is over one of {count} parts of the parameters, in turn; after the last "
            "step of a training over all."
        )
    if overlap:
        note += f" The outer step with it is made {overlap} steps later."
    drift, loss = ("replica-drift", "Drift of the replicas"), ("replica-loss", "Loss of replicas")
    return [
        *_of_parts(run, "replica", "train.drift", drift, note),
        *_of_parts(run, "replica", "train.loss", loss, ""),
    ]


def _of_parts(
    run: ReportedRun, kind: str, series_name: str, named: tuple[str, str], note: str
) -> Iterator[Panel]:
    """Yield the picture of a series that each node or replica has. named: its name and title."""
    found = _parts(run, kind, series_name)
    lines = [recorded_line(name, series) for name, series in found if len(series.step)]
    if not lines:
        return

    def draw(width: int, *, log: bool = False) -> Picture:
        return curve(lines, title=named[1], width=width, height=240, log=log)

    count = run.strategy["num_replicas"]
    first = f"Of the first {len(lines)} of {count} {kind}s." if count > len(lines) else ""
    logarithmic = partial(draw, log=True)
    yield Panel(*named, draw, " ".join(filter(None, (note, first))), logarithmic)


def _parts(run: ReportedRun, kind: str, name: str) -> Sequence[tuple[str, SeriesLike]]:
    """Return a series of each part that has it, by its name."""
    return [
        (f"{kind} {number}", series)
        for number in range(MAX_PARTS)
        if (series := run.history.get(f"{kind}/{number}:{name}")) is not None
    ]
