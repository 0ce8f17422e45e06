"""Choose the panels (pictures) of a run by its strategy, and those of its nested parties."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from stratagem.client.pictures.lanes import DecisionMark, decisions, time_line
from stratagem.client.pictures.parties import PartyRow, party_tree, verification
from stratagem.client.pictures.svg import Picture, natural
from stratagem.client.report.panels import Panel, by_width, member_panels, topology_panels
from stratagem.client.report.run import ReportedRun
from stratagem.client.report.strategy_panels import (
    federated_panels,
    node_panels,
    population_panels,
    replica_panels,
    stage_panels,
)

# ---- Run ----


def strategy_panels(run: ReportedRun) -> list[Panel]:
    """Return the panels for the run's strategy, its verification and its nested parties."""
    panels = [*_of_root(run), *member_panels(run), *verification_panels(run)]
    return [*panels, *nested_panels(run)]


def _of_root(run: ReportedRun) -> list[Panel]:
    match run.strategy.get("type"):
        case "Custom":
            return _decisions(run)
        case _:
            return own_panels(run)


def _decisions(run: ReportedRun) -> list[Panel]:
    """Return the panel with the decisions of a custom strategy; empty if it recorded none."""
    marks = [
        DecisionMark(
            item.after_s, f"{item.party}: {item.kind}" if item.party else item.kind, item.reason
        )
        for item in run.course.decisions
    ]
    if not marks:
        return []
    draw = partial(decisions, marks, title="Decisions", end=run.seconds)
    newest = marks[-1]
    return [
        Panel("decisions", "Decisions", by_width(draw), f"The newest: {newest.kind} {newest.text}.")
    ]


def verification_panels(run: ReportedRun) -> list[Panel]:
    """Return the panel of a run's verified segments; empty if its job asks for no verification."""
    checks = run.course.verification.checks
    if not checks:
        return []
    draw = by_width(partial(verification, checks, title="Verification"))
    return [Panel("verification", "Verification", draw, run.status.verification)]


def time_line_panel(run: ReportedRun) -> Panel:
    """Return the time line panel, with a lane per kind of event."""
    spans = run.course.time_marks.spans

    def draw(width: int) -> Picture:
        return time_line(spans, title="Time line", width=width, end=run.seconds)

    return Panel("time-line", "Time line", draw)


# ---- Nested parties ----
#
# The tree of the parties shows how each one trains, followed by the pictures of each.

MAX_NESTED: Final = 12
"""The largest number of nested parties that get panels of their own."""
Strategy = Mapping[str, Any]
"""A strategy as plain values, as in the job."""


def strategy_of(run: ReportedRun, path: str) -> Strategy:
    """Return the strategy of a party. Inside a custom strategy it is inferred from events, or
    empty."""
    strategy = run.strategy
    for _ in filter(None, path.split("/")):
        if strategy.get("type") == "Custom":
            return _inferred(run, path)
        strategy = (strategy.get("options") or {}).get("inner") or {"type": "Local"}
    party = run.course.parties.get(path)
    has_rounds = party is not None and bool(party.rounds)
    if not has_rounds or strategy.get("type") == "Federated":
        return strategy
    return _inferred(run, path)


def _inferred(run: ReportedRun, path: str) -> Strategy:
    party = run.course.parties.get(path)
    if path in run.course.populations:
        return {"type": "PopulationBased"}
    if party is None:
        return {}
    if party.rounds:
        return {"type": "Federated"}
    return {"type": "ModelParallel" if party.ranks else "Local"} if party.worker_ids else {}


def strategy_name(strategy: Strategy) -> str:
    """Return the short name of a strategy, such as "Federated/FedAvg"."""
    methods = (strategy.get("aggregation") or {}).get("method"), strategy.get("coordinator")
    return "/".join(filter(None, [strategy.get("type"), *methods]))


def nested_panels(run: ReportedRun) -> list[Panel]:
    """Return a panel with the tree of nested parties, and the panels of each, named by its path."""
    paths = sorted(_with_parents(run), key=natural)
    if not paths:
        return []
    drawn = [(path, panels) for path in paths if (panels := own_panels(run, path))]
    rest = len(drawn) - MAX_NESTED
    note = f"The pictures of {rest} more parties are left out." if rest > 0 else ""
    tree = partial(party_tree, [_row(run, path) for path in paths], title="Parties")
    return [
        Panel("parties", "Parties", by_width(tree), note),
        *(
            replace(panel, name=f"{path}:{panel.name}", title=f"{path}: {panel.title.lower()}")
            for path, panels in drawn[:MAX_NESTED]
            for panel in panels
        ),
    ]


def own_panels(run: ReportedRun, path: str = "") -> list[Panel]:
    """Return the panels of one party by its strategy, without those of parties nested inside it."""
    if path not in run.course.parties:
        return []
    strategy = strategy_of(run, path)
    match strategy.get("type"):
        case "PopulationBased":
            return population_panels(run, path)
        case "Federated":
            return federated_panels(run, path, (strategy.get("options") or {}).get("quorum"))
        case "ModelParallel":
            return stage_panels(run, strategy, path)
        case "DataParallel":
            inner = (strategy.get("options") or {}).get("inner") or {}
            stages = stage_panels(run, inner, path, strategy.get("num_replicas") or 1)
            nodes = [] if path else [*node_panels(run), *replica_panels(run)]
            return [*topology_panels(run, strategy, path), *nodes, *stages]
        case _:
            return []


def _with_parents(run: ReportedRun) -> Iterator[str]:
    """Yield the paths of all nested parties and of the parties that contain them."""
    seen = {""}
    for path in run.course.parties:
        parts = path.split("/")
        for at in range(1, len(parts) + 1):
            above = "/".join(parts[:at])
            if above not in seen:
                seen.add(above)
                yield above


def _row(run: ReportedRun, path: str) -> PartyRow:
    name, party = strategy_name(strategy_of(run, path)), run.course.parties.get(path)
    if party is None:
        return PartyRow(path, name, "", ())
    line = party.lines.get("train.loss")
    losses = [float(loss) for loss in line.last] if line else []
    num_rounds = sum(not round_.is_open for round_ in party.rounds)
    counted = f"{num_rounds} rounds" if party.rounds else f"{party.num_segments} segments"
    done = counted if not counted.startswith("1 ") else counted[:-1]
    return PartyRow(path, name, done, list(filter(math.isfinite, losses)), party.failure)
