"""The parties below a run: how each one trains, the tree of them, and the pictures of each."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from stratagem.client.pictures.drawing.order import natural
from stratagem.client.pictures.party_tree import PartyRow, party_tree
from stratagem.client.report.federated_panels import federated_panels
from stratagem.client.report.panel import Panel, by_width
from stratagem.client.report.part_panels import node_panels, replica_panels, stage_panels
from stratagem.client.report.population_panels import population_panels
from stratagem.client.report.run_values import ReportedRun
from stratagem.client.report.topology_panel import topology_panels

MAX_NESTED: Final = 12
"""Parties below the root that have pictures of their own."""
Strategy = Mapping[str, Any]
"""As a job has it."""


def strategy_of(run: ReportedRun, path: str) -> Strategy:
    """Return the strategy that a party trains under, of one inside a strategy of somebody's own as
    far as what it has done tells; empty where it does not."""
    strategy = run.strategy
    for _ in filter(None, path.split("/")):
        if strategy.get("type") == "Custom":
            return _told(run, path)
        strategy = (strategy.get("options") or {}).get("inner") or {"type": "Local"}
    party = run.course.parties.get(path)
    has_rounds = party is not None and bool(party.rounds)
    return strategy if not has_rounds or strategy.get("type") == "Federated" else _told(run, path)


def _told(run: ReportedRun, path: str) -> Strategy:
    party = run.course.parties.get(path)
    if path in run.course.populations:
        return {"type": "PopulationBased"}
    if party is None:
        return {}
    if party.rounds:
        return {"type": "Federated"}
    return {"type": "ModelParallel" if party.ranks else "Local"} if party.worker_ids else {}


def strategy_name(strategy: Strategy) -> str:
    """Return a strategy in a word or two, as "Federated/FedAvg"."""
    methods = (strategy.get("aggregation") or {}).get("method"), strategy.get("coordinator")
    return "/".join(filter(None, [strategy.get("type"), *methods]))


def nested_panels(run: ReportedRun) -> list[Panel]:
    """Return the tree of the parties below the root, and the pictures of each, named by its
    path."""
    paths = sorted(_with_parents(run), key=natural)
    if not paths:
        return []
    drawn = [(path, found) for path in paths if (found := own_panels(run, path))]
    rest = len(drawn) - MAX_NESTED
    note = f"Pictures of {rest} more of them are left out." if rest > 0 else ""
    tree = partial(party_tree, [_row(run, path) for path in paths], title="Parties")
    return [
        Panel("parties", "Parties", by_width(tree), note),
        *(
            replace(panel, name=f"{path}:{panel.name}", title=f"{path}: {panel.title.lower()}")
            for path, found in drawn[:MAX_NESTED]
            for panel in found
        ),
    ]


def own_panels(run: ReportedRun, path: str = "") -> list[Panel]:
    """Return the pictures of one party by its strategy, without those of the parties in it."""
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
    """Yield the paths of all parties below the root, also of those that only hold others."""
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
    num_rounds = sum(not each.is_open for each in party.rounds)
    counted = f"{num_rounds} rounds" if party.rounds else f"{party.num_segments} segments"
    done = counted if not counted.startswith("1 ") else counted[:-1]
    return PartyRow(path, name, done, list(filter(math.isfinite, losses)), party.failure)
