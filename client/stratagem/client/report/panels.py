"""Make the pictures of a run for any width: members, topology and curves."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from stratagem.client.course.client_sums import ClientInRound, ClientState
from stratagem.client.course.members import failed_step
from stratagem.client.course.rounds import Round
from stratagem.client.pictures.curves import CurveMark, Line, MarkKind, curve, cut
from stratagem.client.pictures.lanes import Stay
from stratagem.client.pictures.lanes import members as members_picture
from stratagem.client.pictures.parties import topology
from stratagem.client.pictures.svg import Picture
from stratagem.client.report.run import MAX_PARTS, ReportedRun, groups, num_nodes, with_history
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.strategy.topology import graph_of, metropolis_hastings

# ---- Panels ----


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture of a run, with name, title and note, that can be drawn at any width."""

    name: str
    """The id of the picture, such as "loss" or "members"; unique within a run."""
    title: str
    draw: Callable[[int], Picture]
    note: str = ""
    """A sentence below the picture that helps to read it."""
    draw_log: Callable[[int], Picture] | None = None
    """A function that draws the picture with a logarithmic axis; None if it has no such form."""

    def picture(self, width: int, *, log: bool = False) -> Picture:
        """Draw the picture at a width. log: with a logarithmic axis, if it has such a form."""
        return (self.draw_log if log and self.draw_log else self.draw)(width)


def by_width(draw: Callable[..., Picture], most: int = 10_000) -> Callable[[int], Picture]:
    """Wrap a drawing function so that it takes only a width, limited to `most` pixels."""
    return lambda width: draw(width=min(width, most))


# ---- Members ----
#
# A lane for each worker shows its work by party and time.

EVALUATES: Final = "member that evaluates"
MAX_CLIENTS: Final = 1000
"""The largest number of a federation's clients, those of the newest rounds, to draw as bars."""


def member_panels(run: ReportedRun) -> list[Panel]:
    """Return the panel that has a lane per worker; an empty list if there were no members."""
    stays = [*_memberships(run), *_clients(run)]
    if not stays:
        return []

    aways = [
        (outage.began_s - run.began_s, outage.ended_s - run.began_s)
        for outage in run.course.outages.outages
    ]

    def draw(width: int) -> Picture:
        return members_picture(stays, title="Members", now=run.seconds, aways=aways, width=width)

    trained = max(
        sum(len(round_.clients) for round_ in party.rounds) for party in run.course.parties.values()
    )
    notes = []
    if trained:
        notes.append(
            "A client's bar reaches from its assignment to the arrival of its update, including "
            f"all waiting; the bar of a {EVALUATES} covers its whole membership."
        )
    if trained > MAX_CLIENTS:
        notes.append(f"Shows at most the newest {MAX_CLIENTS} clients.")
    if aways:
        notes.append(
            "While the coordinator was away, members continued with what they had; it may have "
            "left later than drawn, because only events are journaled."
        )
    return [Panel("members", "Members", draw, " ".join(notes))]


def _memberships(run: ReportedRun) -> Iterator[Stay]:
    for stay in run.course.members.intervals:
        # The members of a federation evaluate its states; its clients are trained by all.
        evaluates = bool(run.course.parties[stay.party].rounds)
        yield Stay(
            *(stay.worker_id, _of(stay.party, EVALUATES) if evaluates else stay.party),
            stay.began_s - run.began_s,
            None if stay.ended_s is None else stay.ended_s - run.began_s,
            stay.ending,
            stay.is_lost,
        )


def _clients(run: ReportedRun) -> Iterator[Stay]:
    """Yield the times in which workers trained a federation's clients in the newest rounds."""
    for path, party in run.course.parties.items():
        room = MAX_CLIENTS
        for round_ in reversed(party.rounds):
            room -= len(round_.clients)
            if room < 0 and round_ is not party.rounds[-1]:
                break
            for client in round_.clients[:MAX_CLIENTS]:
                if client.worker_id and client.assigned_s is not None and not client.staleness:
                    yield _stay(run, path, round_, client, client.assigned_s)


def _stay(
    run: ReportedRun, path: str, round_: Round, client: ClientInRound, began_s: float
) -> Stay:
    ended_s = client.answered_s
    if ended_s is None and round_.seconds is not None:
        ended_s = max(round_.began_s + round_.seconds, began_s)
    outcome = str(client.state) if ended_s is not None else "not answered so far"
    if client.state is ClientState.REJECTED:
        outcome = f"rejected: {client.reason}"
    return Stay(
        *(client.worker_id, _of(path, "clients"), began_s - run.began_s),
        None if ended_s is None else ended_s - run.began_s,
        f"round {round_.number}: {outcome}",
        task=f"client {client.client}",
    )


def _of(path: str, what: str) -> str:
    return f"{path}: {what}" if path else what


# ---- Topology ----
#
# A picture of a gossiping party shows who exchanges parameters with whom.


def topology_panels(run: ReportedRun, strategy: Mapping[str, Any], path: str = "") -> list[Panel]:
    """Return the panel with the topology of a party's gossip nodes; empty if it has none."""
    aggregation = strategy.get("aggregation") or {}
    if aggregation.get("method") != "Decentralized":
        return []
    num_nodes = strategy["num_replicas"]
    graph = graph_of(aggregation["topology"], num_nodes, run.job.get("seed", 0))
    names, workers = [f"node {node}" for node in range(num_nodes)], _workers(run, path, num_nodes)
    rows = enumerate(metropolis_hastings(graph))
    edges = [(a, b, weight) for a, row in rows for b, weight in row.items() if b > a]

    def draw(width: int) -> Picture:
        wide = min(width, 420)
        return topology(names, edges, title="Topology", workers=workers, width=wide, height=300)

    note = (
        f"The exchanges of parameters between nodes, with their weights: {aggregation['topology']}."
    )
    return [Panel("topology", "Topology", draw, note)]


def _workers(run: ReportedRun, path: str, num_nodes: int) -> list[str]:
    """Return the workers of each gossip node in the newest membership; empty without members."""
    party = run.course.parties[path]
    per_node = len(set(party.ranks)) or 1
    ids = party.worker_ids
    teams = [ids[at : at + per_node] for at in range(0, len(ids), per_node)]
    if not teams:
        return []
    owned = assign_shards(num_nodes, len(teams))
    of_node = {node: team for team, nodes in zip(teams, owned, strict=True) for node in nodes}
    return [", ".join(of_node[node]) for node in range(num_nodes)]


# ---- Curves ----
#
# The curves show the measured values of a run over its steps or rounds.

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
"""Explanations of metrics whose names do not explain them, keyed by name."""


def curve_panels(run: ReportedRun, steps: Steps | None = None) -> list[Panel]:
    """Return the curves of a run over the same steps: losses, then one per other metric. steps: the
    first and the last step to show, by default all."""
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
    note = " ".join(filter(None, (_of_nodes(run), _lost_steps(run))))
    return [replace(panels[0], note=note), *panels[1:]] if panels and note else panels


def lines_of(run: ReportedRun) -> dict[str, Line]:
    """Return the curves' lines of the whole run, keyed by the name of the metric."""
    return with_history(run.course.root.lines, run.history, num_nodes(run.job))


def _of_nodes(run: ReportedRun) -> str:
    """Return a note on how the loss is averaged over gossip nodes; "" if the run has none."""
    if f"node/0:{LOSS}" not in run.history or num_nodes(run.job) > MAX_PARTS:
        return ""
    return f"{LOSS}: the plain mean over the nodes, from the least to the greatest of any."


def _lost_steps(run: ReportedRun) -> str:
    """Return a note about steps that were lost when the run failed; "" if none were."""
    error = run.status.error
    step = failed_step(error.activity) if error is not None else None
    if run.status.phase != "FAILED" or step is None or unit_of(run) != "step":
        return ""
    end_step = max((line.step[-1] for line in lines_of(run).values() if len(line.step)), default=0)
    if step <= end_step + 1:
        return ""
    return (
        f"The steps after {end_step:,} are not kept: the run failed in step {step:,}, before their "
        "segment had ended."
    )


def between(lines: Mapping[str, Line], steps: Steps | None) -> dict[str, Line]:
    """Cut lines to a range of steps; drop lines without values in it."""
    if steps is None:
        return dict(lines)
    lines_there = {name: cut(line, *steps) for name, line in lines.items()}
    return {name: line for name, line in lines_there.items() if len(line.step)}


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
    """Return the unit of the horizontal axis: "round", or "step" (in a population: of a member)."""
    strategy = run.strategy
    if strategy.get("type") == "PopulationBased":
        strategy = (strategy.get("options") or {}).get("inner") or {}
    return "round" if strategy.get("type") == "Federated" else "step"


def _marks(run: ReportedRun) -> list[CurveMark]:
    """Return marks for workers that joined or were lost, of the root party, each at the step that
    the run had reached at that time."""
    marks: list[CurveMark] = []
    times = [time_s for time_s, _ in run.course.root.reached]

    def step_at(time_s: float) -> int:
        at = bisect_right(times, time_s)
        return run.course.root.reached[at - 1][1] if at else 0

    for stay in run.course.members.intervals:
        if stay.party:
            continue
        began = step_at(stay.began_s)
        if began:
            marks.append(CurveMark(began, MarkKind.JOIN, f"{stay.worker_id} joined"))
        if stay.is_lost and stay.ended_s is not None:
            step = step_at(stay.ended_s) if stay.step is None else stay.step
            marks.append(CurveMark(step, MarkKind.DEATH, f"{stay.worker_id} lost: {stay.ending}"))
    return marks
