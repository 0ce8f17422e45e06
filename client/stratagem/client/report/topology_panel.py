"""The picture of a party that gossips: who exchanges parameters with whom."""

from collections.abc import Mapping
from typing import Any

from stratagem.client.pictures.picture import Picture
from stratagem.client.pictures.topology import topology
from stratagem.client.report.panel import Panel
from stratagem.client.report.run_values import ReportedRun
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.strategy.topology import graph_of, metropolis_hastings


def topology_panels(run: ReportedRun, strategy: Mapping[str, Any], path: str = "") -> list[Panel]:
    """Return who exchanges parameters with whom, in a party that gossips."""
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
        f"Which node exchanges parameters with whom, and at what weight: {aggregation['topology']}."
    )
    return [Panel("topology", "Topology", draw, note)]


def _workers(run: ReportedRun, path: str, num_nodes: int) -> list[str]:
    """Return the workers that have each node in the newest membership; empty without members."""
    party = run.course.parties[path]
    per_node = len(set(party.ranks)) or 1
    ids = party.worker_ids
    teams = [ids[at : at + per_node] for at in range(0, len(ids), per_node)]
    if not teams:
        return []
    owned = assign_shards(num_nodes, len(teams))
    of_node = {node: team for team, nodes in zip(teams, owned, strict=True) for node in nodes}
    return [", ".join(of_node[node]) for node in range(num_nodes)]
