"""Make the panels (pictures) of a strategy: federation, population, and parts of a party."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from stratagem.client.course.client_sums import ClientState
from stratagem.client.course.population import Population
from stratagem.client.course.rounds import Round
from stratagem.client.course.step_history import History, MeasuredStep, StepSeries, measured_step
from stratagem.client.pictures.axes import duration
from stratagem.client.pictures.curves import Line, curve
from stratagem.client.pictures.federation import ClientCell, RoundBar, client_grid, histogram
from stratagem.client.pictures.federation import rounds as rounds_picture
from stratagem.client.pictures.parties import Task, stages
from stratagem.client.pictures.population import LineageNode, Trial, lineage, parallel_axes, scores
from stratagem.client.pictures.svg import Picture
from stratagem.client.report.panels import Panel, by_width
from stratagem.client.report.run import MAX_PARTS, ReportedRun, recorded_line
from stratagem.common.base.text import values_text
from stratagem.common.pipeline.schedules import SCHEDULES, Action, Schedule, TaskKind, choose
from stratagem.common.pipeline.simulation import consumers, required

# ---- Federations ----


def federated_panels(run: ReportedRun, party: str = "", quorum: float | None = None) -> list[Panel]:
    """Return the panels of a federation: clients, rounds, and durations of updates. quorum: the
    strategy's quorum, as a count or as a share of the selected clients."""
    course = run.course.parties[party]
    rounds, clients, times = course.rounds, course.clients, course.client_times
    cells = [
        ClientCell(
            *(str(c.client), c.state or "", c.loss, c.num_samples),
            "; ".join(filter(None, [c.worker_id, c.reason and f"rejected: {c.reason}"])),
            "" if c.benched_until is None else f"round {c.benched_until}",
        )
        for c in clients
    ]
    bars = [_bar(round_, quorum) for round_ in rounds]
    panels: list[Panel] = []
    if cells:
        note = "Each client in the newest round that it was selected for."
        grid = partial(client_grid, cells, title="Clients")
        panels.append(Panel("clients", "Clients", by_width(grid), note))
    if bars:
        all_rounds = partial(rounds_picture, bars, title="Rounds")
        panels.append(Panel("rounds", "Rounds", by_width(all_rounds)))
    if any(map(math.isfinite, times)):

        def seconds(width: int) -> Picture:
            name = "time of an update"
            title = "Time of the clients"
            wide = min(width, 420)
            return histogram(times, title=title, name=name, form=duration, width=wide)

        note = (
            "The time that a client's worker spent computing an update. Members shows the time "
            "from a client's assignment to the arrival of its update, including all waiting."
        )
        panels.append(Panel("client-times", "How long clients take", seconds, note))
    return panels


def _bar(round_: Round, quorum: float | None) -> RoundBar:
    counts = {str(state): round_.count(state) for state in ClientState}
    needed = round_.num_needed
    if needed is None and quorum is not None:
        selected = round_.num_selected
        needed = quorum if isinstance(quorum, int) else math.ceil(quorum * selected - 1e-9)
        needed = max(1, min(needed, selected))
    return RoundBar(round_.number, round_.loss, counts, needed, round_.seconds, round_.deadline_s)


# ---- Populations ----


def population_panels(run: ReportedRun, path: str = "") -> list[Panel]:
    """Return the panels of a population, which is the whole run or a party: lineage, scores, and
    scores by hyperparameters."""
    folding = run.course.populations.get(path)
    population = None if folding is None else folding.population
    if population is None or not population.generations:
        return []
    nodes, best = _nodes(population), population.best
    by_generation = [
        [record.score if (record := generation.of(m)) else None for m in range(_size(population))]
        for generation in population.generations
        if any(member.is_scored for member in generation.members)
    ]
    said = "" if best is None else str(best)
    trials, names = _trials(population)
    space = (run.job.get("search_space") or {}).get("dimensions") or ()
    log = {dimension["name"] for dimension in space if dimension.get("scale") == "Log"}
    is_min = population.mode == "min"

    def lineage_of(width: int) -> Picture:
        return lineage(nodes, title="Lineage", best=said, less_is_better=is_min, width=width)

    def scores_of(width: int) -> Picture:
        metric = population.metric
        return scores(
            by_generation, title="Scores", metric=metric, less_is_better=is_min, width=width
        )

    def axes_of(width: int) -> Picture:
        return parallel_axes(names, trials, title="Hyperparameters", log=log, width=width)

    note = f"Best: {said}." if said else ""
    panels = [Panel("lineage", "Lineage", lineage_of, note), Panel("scores", "Scores", scores_of)]
    return [*panels, Panel("hyperparameters", "Hyperparameters", axes_of)] if trials else panels


def _size(population: Population) -> int:
    return max(len(generation.members) for generation in population.generations)


def _nodes(population: Population) -> list[LineageNode]:
    best = population.best
    winner = None if best is None else population.generations[best.generation - 1].of(best.member)
    past = {(ancestor.generation, ancestor.member) for ancestor in winner.past} if winner else set()
    return [
        LineageNode(
            *(record.member, generation.number, record.parent, record.score),
            values_text(record.params),
            (generation.number, record.member) in past,
        )
        for generation in population.generations
        for record in generation.members
    ]


def _trials(population: Population) -> tuple[list[Trial], list[str]]:
    """Return the members of the winner's generation, or of the newest with scores, as trials, and
    the names of their axes."""
    scored = [g for g in population.generations if any(m.score is not None for m in g.members)]
    if not scored:
        return [], []
    best = population.best
    newest = scored[-1] if best is None else population.generations[best.generation - 1]
    names = list(dict.fromkeys(name for member in newest.members for name in member.params))
    trials = [
        Trial(
            f"member {item.member}",
            {**item.params, **({} if item.score is None else {population.metric: item.score})},
            best is not None and item.member == best.member,
        )
        for item in newest.members
    ]
    return trials, [*names, population.metric]


# ---- Parts of a party ----
#
# The parts are the stages of a pipeline, nodes that gossip, and replicas that take local steps.

MEGABYTE: Final = 1e6


def stage_panels(
    run: ReportedRun, strategy: Mapping[str, Any], path: str = "", num_replicas: int = 1
) -> list[Panel]:
    """Return the panels of a pipeline: the stages' work in one step, their idle share, and memory.
    strategy: the strategy of one replica."""
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
    newest = [float(values[-1]) for values in busy if len(values) and values[-1] > 0]
    names, tasks = planned_tasks(party.ranks, party.engine, strategy, num_rows, newest)
    if not tasks:
        return
    is_measured = len(newest) == len(party.ranks)
    unit = "" if is_measured else "forward passes"

    def draw(width: int) -> Picture:
        return stages(names, tasks, title="Stages", unit=unit, width=width)

    lengths = (
        "with each stage's work as long as it computed in the newest step"
        if is_measured
        else "in forward passes of one stage, all stages equal"
    )
    note = (
        f"The planned order of one step, {lengths}; a backward pass takes twice as long as a "
        "forward one, and no time passes between stages."
    )
    if is_measured and (measured := _measured_bubble(run)):
        note += f" Including all waiting, the bubble of that step was {measured[1][-1]:.0%}."
    yield Panel("stages", "Stages in one step", draw, note)


def _measured_work(run: ReportedRun, measured: MeasuredStep) -> Panel:
    """Return the panel with the measured work of the stages in one step."""
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
            " Workers of several machines have clocks of their own; the offsets between these "
            "follow from the messages between the workers, to "
            f"± {duration(measured.error_s)}."
        )
    if not measured.is_whole:
        note += " Not all micro-batches are shown; others were processed where nothing is drawn."
    return Panel("stages", "Stages in one step", draw, note)


def _bubble(run: ReportedRun) -> Iterator[Panel]:
    """Yield the panel with the bubble (idle share) of each step, if it was measured."""
    measured = _measured_bubble(run)
    if measured is None:
        return
    line = Line("bubble", measured[0], [100 * share for share in measured[1]])
    draw = partial(curve, [line], title="Bubble, in %", height=204)
    note = (
        "Measured: the share of a step, as long as the slowest worker's, in which the workers "
        "did not compute."
    )
    yield Panel("bubble", "Bubble, in %", by_width(draw), note)


def _measured_bubble(run: ReportedRun) -> tuple[list[int], list[float]] | None:
    """Return the steps, and the idle share of the pipeline in each; None if it was not measured."""
    if not isinstance(run.history, History):
        return None
    steps, shares = run.history.bubble()
    return (steps.tolist(), shares.tolist()) if len(steps) else None


def _memory(run: ReportedRun) -> Iterator[Panel]:
    lines = [
        Line(line.name, line.step, [value / MEGABYTE for value in line.last])
        for name, series in _parts(run, "stage", "memory_bytes")
        if len((line := recorded_line(name, series)).step)
    ]
    if lines:
        draw = partial(curve, lines, title="Memory of the stages, in MB", height=218)
        note = "The memory of the stage's worker process; on a GPU, that of its tensors."
        yield Panel("stage-memory", "Memory of the stages, in MB", by_width(draw), note)


def node_panels(run: ReportedRun) -> list[Panel]:
    """Return the panel with the losses of the first gossip nodes."""
    return list(_of_parts(run, "node", "train.loss", ("node-loss", "Loss of the nodes"), ""))


def replica_panels(run: ReportedRun) -> list[Panel]:
    """Return the panels of the first replicas with local steps: the drift of their parameters from
    the common ones, and their losses."""
    options = run.strategy.get("options") or {}
    count, overlap = options.get("fragments") or 1, options.get("overlap_steps") or 0
    note = (
        "The 2-norm of the difference between a replica's parameters and those that all have in "
        "common, at each step after which the differences are summed."
    )
    if count > 1:
        note += (
            f" Each value covers one of {count} parts of the parameters, in turn; after the last "
            "step of a training, all of them."
        )
    if overlap:
        note += f" The outer step follows {overlap} steps later."
    drift, loss = ("replica-drift", "Drift of the replicas"), ("replica-loss", "Loss of replicas")
    return [
        *_of_parts(run, "replica", "train.drift", drift, note),
        *_of_parts(run, "replica", "train.loss", loss, ""),
    ]


def _of_parts(
    run: ReportedRun, kind: str, series_name: str, named: tuple[str, str], note: str
) -> Iterator[Panel]:
    """Yield the panel with this series of each node or replica. named: its name and title."""
    parts = _parts(run, kind, series_name)
    lines = [recorded_line(name, series) for name, series in parts if len(series.step)]
    if not lines:
        return

    def draw(width: int, *, log: bool = False) -> Picture:
        return curve(lines, title=named[1], width=width, height=240, log=log)

    count = run.strategy["num_replicas"]
    first = f"Shows the first {len(lines)} of {count} {kind}s." if count > len(lines) else ""
    logarithmic = partial(draw, log=True)
    yield Panel(*named, draw, " ".join(filter(None, (note, first))), logarithmic)


def _parts(run: ReportedRun, kind: str, name: str) -> Sequence[tuple[str, StepSeries]]:
    """Return (name, series) for each node or replica that has recorded the series."""
    return [
        (f"{kind} {number}", series)
        for number in range(MAX_PARTS)
        if (series := run.history.get(f"{kind}/{number}:{name}")) is not None
    ]


# ---- Work of stages ----
#
# The work of a pipeline on the micro-batches of a step is shown as measured, or as planned.

MAX_TASKS: Final = 4096
_TAKES: Final = {
    TaskKind.FORWARD: 1.0,
    TaskKind.BACKWARD: 2.0,
    TaskKind.INPUT: 1.0,
    TaskKind.WEIGHT: 1.0,
}
"""The relative durations of kinds of work; a backward pass computes two gradients."""


def measured_tasks(measured: MeasuredStep) -> tuple[list[str], list[Task]]:
    """Return the names of a measured step's lanes, and the work and waiting in them, in seconds."""
    places = {stage: lane for lane, its in enumerate(measured.lanes.values()) for stage in its}
    tasks: list[Task] = []
    for stage, actions in measured.actions.items():
        for action in actions:
            begin, lane = action.begin_s, places[stage]
            tasks.append(Task(lane, begin, action.end_s, action.kind, action.micro_batch))
            if action.wait_s > 0.0:
                since = max(begin - action.wait_s, 0.0)
                tasks.append(Task(lane, since, begin, "wait", action.micro_batch))
    return [_name(its) for its in measured.lanes.values()], tasks


def planned_tasks(
    ranks: Sequence[int],
    engine: str,
    strategy: Mapping[str, Any],
    num_rows: int,
    busy_s: Sequence[float] = (),
) -> tuple[list[str], list[Task]]:
    """Simulate a pipeline's schedule: return the names of one replica's lanes, and the planned work
    in them; empty if the schedule is unknown.

    ranks: the rank of each stage in the newest membership. engine: text that names the schedule.
    strategy: the strategy of one replica. num_rows: the rows of its part of a batch. busy_s: how
    long each stage has computed in a step, if known; otherwise all stages are equal, and times are
    in forward passes. A backward pass takes twice as long as a forward pass, messages take no time.
    """
    size = (strategy.get("communication") or {}).get("micro_batch_size")
    if not ranks or not size or not num_rows:
        return [], []
    count = math.ceil(num_rows / size)
    if count * len(ranks) * 2 > MAX_TASKS:
        return [], []
    named = next((word for word in engine.split() if word in SCHEDULES), "1f1b")
    return [_lane(ranks, rank) for rank in range(max(ranks) + 1)], _played(
        choose(named, ranks, count),
        [seconds / (3 * count) for seconds in busy_s]
        if len(busy_s) == len(ranks)
        else [1.0] * len(ranks),
    )


def _lane(ranks: Sequence[int], rank: int) -> str:
    """Return the label of a rank's lane: "stage 1", or "stages 0, 2" if it has two stages."""
    return _name([stage for stage, its_rank in enumerate(ranks) if its_rank == rank])


def _name(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _played(schedule: Schedule, lengths: Sequence[float]) -> list[Task]:
    """Simulate a schedule in which each action begins as early as possible; return its tasks with
    their begin and end. lengths: the duration of a forward pass of each stage."""
    needs = [(stage - 1,) if stage else () for stage in range(len(lengths))]
    needed_by = consumers(needs)
    done: dict[Action, float] = {}
    tasks: list[Task] = []
    free, places = [0.0] * len(schedule), [0] * len(schedule)
    while any(places[rank] < len(actions) for rank, actions in enumerate(schedule)):
        before = len(tasks)
        for rank, actions in enumerate(schedule):
            for action in actions[places[rank] :]:
                wanted = required(action, needs, needed_by)
                if not all(any(needed in done for needed in group) for group in wanted):
                    break
                ready = [done[needed] for group in wanted for needed in group if needed in done]
                start = max([free[rank], *ready])
                free[rank] = done[action] = start + _TAKES[action.kind] * lengths[action.stage]
                kind = action.kind.name.lower()
                tasks.append(Task(rank, start, free[rank], kind, action.micro_batch))
                places[rank] += 1
        if len(tasks) == before:  # none of our schedules deadlocks
            return []
    return tasks
