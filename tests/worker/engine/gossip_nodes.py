"""Gossip jobs, and all their nodes on one member."""

from typing import Any

from stratagem.common.job import JobSpec
from stratagem.common.strategy import DataParallel, Decentralized
from stratagem.common.strategy.topology import graph_of, metropolis_hastings
from stratagem.worker.engine import GossipTrainer, Tally, build_gossip_trainer
from stratagem.worker.exchange import GossipExchange
from tests.jobs import job
from tests.reference.gossip_loop import gossip_loop
from tests.worker.engine.support import ALLOWED, CPU, assert_same_bits, trainer_of


def gossip_job(
    model: str | dict[str, Any], num_nodes: int, topology: str = "ring", **changes: Any
) -> JobSpec:
    strategy = {
        "type": "DataParallel",
        "num_replicas": num_nodes,
        "aggregation": {"method": "Decentralized", "topology": topology},
    }
    return job(model, strategy=strategy, **changes)


def trainer(spec: JobSpec) -> tuple[GossipTrainer, GossipExchange]:
    """All nodes on one member, as the model is built from the seed."""
    strategy = spec.strategy
    assert isinstance(strategy, DataParallel)
    assert isinstance(strategy.aggregation, Decentralized)
    nodes = range(strategy.num_replicas)
    weights = metropolis_hastings(graph_of(strategy.aggregation.topology, len(nodes), spec.seed))
    made = build_gossip_trainer(spec, ALLOWED, nodes, device=CPU, weights=weights)
    made.load_state(*trainer_of(spec).copy_state())
    return made, GossipExchange(None, 0, [nodes], weights, deadline_s=1.0, public=made.public)


def assert_nodes_equal_loop(spec: JobSpec, num_steps: int = 6) -> None:
    """All nodes have the losses of the gossip loop, and their mean has its bits."""
    made, exchange = trainer(spec)
    assert isinstance(spec.strategy, DataParallel)
    num_nodes = spec.strategy.num_replicas
    losses = [made.train_step(exchange, range(num_nodes), num_nodes).loss for _ in range(num_steps)]
    expected = gossip_loop(spec, ALLOWED, num_steps)
    assert losses == expected.losses
    made.end_segment(exchange, Tally())
    assert_same_bits(made.model.state_dict(), dict(expected.mean))
