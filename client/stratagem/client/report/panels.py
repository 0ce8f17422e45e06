"""The pictures of a run by its strategy, each made for the width that it is asked for."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from stratagem.client.course.population import Population
from stratagem.client.course.rounds import ClientState, Round
from stratagem.client.pictures.client_grid import ClientCell, client_grid
from stratagem.client.pictures.curve import CurveMark, Line, MarkKind, curve
from stratagem.client.pictures.drawing.scales import duration
from stratagem.client.pictures.histogram import histogram
from stratagem.client.pictures.lineage import LineageNode, lineage
from stratagem.client.pictures.members import Stay
from stratagem.client.pictures.members import members as members_picture
from stratagem.client.pictures.parallel_axes import Trial, parallel_axes
from stratagem.client.pictures.picture import Picture
from stratagem.client.pictures.rounds import RoundBar
from stratagem.client.pictures.rounds import rounds as rounds_picture
from stratagem.client.pictures.scores import scores
from stratagem.client.pictures.stages import stages
from stratagem.client.pictures.time_line import time_line
from stratagem.client.pictures.topology import topology
from stratagem.client.report.lines import groups, with_history
from stratagem.client.report.run_values import ReportedRun
from stratagem.client.report.stage_plan import planned_tasks
from stratagem.common.base.wording import values_text
from stratagem.common.strategy.gossip_topology import graph_of, metropolis_hastings

MAX_CURVES = 8
MAX_NESTED = 12
"""Federations below the root that have pictures of their own."""


def _by_width(draw: Callable[..., Picture], most: int = 10_000) -> Callable[[int], Picture]:
    """Return what draws a picture for a width, but for no greater one than `most`."""
    return lambda width: draw(width=min(width, most))


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture that can be drawn for any width."""

    name: str
    """Of the picture, such as "loss" or "members"; unique within a run."""
    title: str
    draw: Callable[[int], Picture]
    note: str = ""
    """What to know about it, as a sentence."""


def curve_panels(run: ReportedRun) -> list[Panel]:
    """Return the curves of a run: losses first, then one for each other metric."""
    marks, unit = _marks(run), unit_of(run)
    lines = with_history(run.course.root.lines, run.history)
    return [
        _curve(name, of_one, marks if at == 0 else (), unit)
        for at, (name, of_one) in enumerate(groups(lines)[:MAX_CURVES])
    ]


def _curve(name: str, lines: Sequence[Line], marks: Sequence[CurveMark], unit: str) -> Panel:
    title = "Loss" if name == "loss" else name
    log = name == "train.consensus_distance"
    height = 260 if name == "loss" else 190

    def draw(width: int) -> Picture:
        return curve(lines, marks, title=title, unit=unit, width=width, height=height, log=log)

    return Panel(name, title, draw)


def unit_of(run: ReportedRun) -> str:
    """Return what a run counts to the right: rounds or steps."""
    return "round" if run.strategy.get("type") == "Federated" else "step"


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


def strategy_panels(run: ReportedRun) -> list[Panel]:
    """Return the pictures that belong to the run's strategy, and those of federations within it."""
    return [*_of_strategy(run), *_nested(run)]


def _nested(run: ReportedRun) -> list[Panel]:
    """Return the pictures of the federations below the root, each named by its path."""
    paths = [path for path, party in run.course.parties.items() if path and party.rounds]
    return [
        replace(panel, name=f"{path}:{panel.name}", title=f"{path}: {panel.title.lower()}")
        for path in paths[:MAX_NESTED]
        for panel in federated_panels(run, path)
    ]


def _of_strategy(run: ReportedRun) -> list[Panel]:
    match run.strategy.get("type"):
        case "Federated":
            return [*federated_panels(run), *_members(run)]
        case "PopulationBased":
            return [*population_panels(run), *_members(run)]
        case "ModelParallel":
            return [*_stages(run), *_members(run)]
        case "DataParallel":
            return [*_topology(run), *_members(run)]
        case _:
            return _members(run)


def _members(run: ReportedRun) -> list[Panel]:
    began = run.began_s
    stays = [
        Stay(
            *(each.worker_id, each.party, each.began_s - began),
            None if each.ended_s is None else each.ended_s - began,
            each.ending,
            each.is_lost,
        )
        for each in run.course.members.intervals
    ]
    if not stays:
        return []

    def draw(width: int) -> Picture:
        return members_picture(stays, title="Members", now=run.seconds, width=width)

    return [Panel("members", "Members", draw)]


def _topology(run: ReportedRun) -> list[Panel]:
    aggregation = run.strategy.get("aggregation") or {}
    if aggregation.get("method") != "Decentralized":
        return []
    names = run.course.root.worker_ids
    try:
        graph = graph_of(aggregation["topology"], len(names), run.job.get("seed", 0))
    except ValueError:  # of so many nodes there is none while workers are away
        return []
    rows = enumerate(metropolis_hastings(graph))
    edges = [(a, b, weight) for a, row in rows for b, weight in row.items() if b > a]

    def draw(width: int) -> Picture:
        return topology(names, edges, title="Topology", width=min(width, 420), height=300)

    note = f"Who exchanges parameters with whom: {aggregation['topology']}."
    return [Panel("topology", "Topology", draw, note)]


def _stages(run: ReportedRun) -> list[Panel]:
    root = run.course.root
    names, tasks = planned_tasks(root.ranks, root.engine, run.job)
    if not tasks:
        return []

    def draw(width: int) -> Picture:
        return stages(names, tasks, title="Stages", unit="forward passes", width=width)

    note = (
        "The planned order of one step, in forward passes of one stage: equal stages, "
        "a backward pass of twice their length, no time between stages."
    )
    return [Panel("stages", "Stages in one step", draw, note)]


# ---- federations ----


def federated_panels(run: ReportedRun, party: str = "") -> list[Panel]:
    """Return clients, rounds, and how long clients took."""
    course = run.course.parties[party]
    found, known = course.rounds, course.clients
    cells = [
        ClientCell(
            *(str(each.client), each.state or "", each.loss, each.num_samples),
            "; ".join(filter(None, [each.worker_id, each.reason and f"rejected: {each.reason}"])),
        )
        for each in known
    ]
    bars = [_bar(each) for each in found]
    times = [c.seconds for each in found for c in each.clients if c.num_samples]
    panels: list[Panel] = []
    if cells:
        note = "Each client in the newest round that it was selected for."
        grid = partial(client_grid, cells, title="Clients")
        panels.append(Panel("clients", "Clients", _by_width(grid), note))
    if bars:
        all_rounds = partial(rounds_picture, bars, title="Rounds")
        panels.append(Panel("rounds", "Rounds", _by_width(all_rounds)))
    if any(map(math.isfinite, times)):

        def seconds(width: int) -> Picture:
            name = "time of an update"
            title = "Time of the clients"
            wide = min(width, 420)
            return histogram(times, title=title, name=name, form=duration, width=wide)

        panels.append(Panel("client-times", "How long clients take", seconds))
    return panels


def _bar(found: Round) -> RoundBar:
    counts = {str(state): len(found.with_state(state)) for state in ClientState}
    return RoundBar(
        found.number, found.loss, counts, found.num_needed, found.seconds, found.deadline_s
    )


# ---- populations ----


def population_panels(run: ReportedRun) -> list[Panel]:
    """Return lineage, scores, and hyperparameters against the score."""
    found = run.course.population.population
    if not found.generations:
        return []
    nodes, best = _nodes(found), found.best
    by_generation = [
        [each.score if (each := generation.of(m)) else None for m in range(_size(found))]
        for generation in found.generations
        if any(member.is_scored for member in generation.members)
    ]
    said = "" if best is None else str(best)
    trials, names = _trials(found)
    is_min = found.mode == "min"

    def lineage_of(width: int) -> Picture:
        return lineage(nodes, title="Lineage", best=said, width=width)

    def scores_of(width: int) -> Picture:
        metric = found.metric
        return scores(
            by_generation, title="Scores", metric=metric, less_is_better=is_min, width=width
        )

    def axes_of(width: int) -> Picture:
        return parallel_axes(names, trials, title="Hyperparameters", width=width)

    note = f"Best: {said}." if said else ""
    panels = [Panel("lineage", "Lineage", lineage_of, note), Panel("scores", "Scores", scores_of)]
    return [*panels, Panel("hyperparameters", "Hyperparameters", axes_of)] if trials else panels


def _size(found: Population) -> int:
    return max(len(generation.members) for generation in found.generations)


def _nodes(found: Population) -> list[LineageNode]:
    best = found.best
    winner = None if best is None else found.generations[best.generation - 1].of(best.member)
    past = {(each.generation, each.member) for each in winner.past} if winner else set()
    return [
        LineageNode(
            *(each.member, generation.number, each.parent, each.score),
            values_text(each.params),
            (generation.number, each.member) in past,
        )
        for generation in found.generations
        for each in generation.members
    ]


def _trials(found: Population) -> tuple[list[Trial], list[str]]:
    """Return the members of the newest generation with scores, or that of the winner."""
    scored = [g for g in found.generations if any(m.score is not None for m in g.members)]
    if not scored:
        return [], []
    best = found.best
    newest = scored[-1] if best is None else found.generations[best.generation - 1]
    names = list(dict.fromkeys(name for each in newest.members for name in each.params))
    trials = [
        Trial(
            f"member {each.member}",
            {**each.params, **({} if each.score is None else {found.metric: each.score})},
            best is not None and each.member == best.member,
        )
        for each in newest.members
    ]
    return trials, [*names, found.metric]


# ---- everything ----


def time_line_panel(run: ReportedRun) -> Panel:
    """Return what happened when, in a lane for each kind of thing."""
    spans = run.course.time_marks.spans

    def draw(width: int) -> Picture:
        return time_line(spans, title="Time line", width=width, end=run.seconds)

    return Panel("time-line", "Time line", draw)
