"""Joining a party that gossips: every member loads the nodes that it owns.

What a member holds is the only copy, so members cannot copy from each other: either all hold their
nodes at the same step, or all of them load the base. Runs in the torch thread.
"""

from collections.abc import Mapping, Sequence

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import DataParallel, Decentralized
from stratagem.common.strategy.topology import graph_of, metropolis_hastings
from stratagem.v1 import coordinator_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import GossipTrainer, Joined, build_gossip_trainer
from stratagem.worker.exchange import GossipExchange
from stratagem.worker.mesh import Link
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import MemberView


def join_nodes(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    view: MemberView,
    members: Sequence[coordinator_pb2.RendezvousMember],
    link: Link | None,
) -> Joined:
    """Return this member's nodes and the exchange of this view, which takes the link over."""
    weights = mixing_weights(work.job, plan.num_shards)
    steps = {m.applied_step if m.HasField("applied_step") else None for m in members}
    is_common = len(steps) == 1 and None not in steps
    holding = work.holding
    if not (is_common and isinstance(holding.trainer, GossipTrainer)):
        holding.trainer = _load_node(work, plan.base, view.me.shards, weights)
    exchange = GossipExchange(
        link,
        view.rank,
        [member.shards for member in view.members],
        weights,
        deadline_s=work.exchange_timeout_s,
        public=holding.trainer.public,
    )
    return Joined(holding.trainer, exchange)


def mixing_weights(job: JobSpec, num_nodes: int) -> tuple[dict[int, float], ...]:
    """Return the weights of each node's neighbours and itself, by the job's topology and seed."""
    strategy = job.strategy
    aggregation = strategy.aggregation if isinstance(strategy, DataParallel) else None
    if not isinstance(aggregation, Decentralized):
        raise InvalidInputError.at("strategy.aggregation.method", "is not Decentralized")
    try:
        return metropolis_hastings(graph_of(aggregation.topology, num_nodes, job.seed))
    except ValueError as error:
        raise InvalidInputError.at("strategy.aggregation.topology", str(error)) from error


def _load_node(
    work: ExecutionContext, base: pb.StateRef, nodes: range, weights: Sequence[Mapping[int, float]]
) -> GossipTrainer:
    work.holding.drop()
    tensors, metadata = work.base_state(base)
    failpoint("worker.gossip.loaded")
    trainer = build_gossip_trainer(
        work.job,
        work.entrypoints,
        nodes,
        device=work.host.device,
        sources=work.sources(),
        weights=weights,
        numerics=work.numerics,
    )
    work.warn(trainer.notes)
    trainer.load_state(tensors, metadata)
    work.holding.begin_sums(work.segment)
    return trainer
