"""Join a party: meet at the rendezvous, form the exchange, and agree on one state.

After a join the session holds the party's newest state and an exchange for the view (the party at
one membership). The module makes the calls to the coordinator and to the other members that this
needs. It runs in the torch thread; calls go through the event loop. It does not know how a step is
computed.
"""

from collections.abc import Mapping, Sequence

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import (
    DataParallel,
    Decentralized,
    all_reduce_of,
    local_steps_of,
    num_fragments_of,
    partitions_parameters,
)
from stratagem.common.strategy.topology import graph_of, metropolis_hastings
from stratagem.v1 import coordinator_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import (
    GossipTrainer,
    Joined,
    LocalStepsTrainer,
    Trainer,
    build_gossip_trainer,
    build_local_steps_trainer,
)
from stratagem.worker.engine.local_steps import OuterFragment
from stratagem.worker.exchange import (
    ExchangeError,
    GossipExchange,
    GradientReducer,
    Reducer,
    SingleMemberReducer,
    server_exchange,
    sliced_exchange,
    solo_exchange,
)
from stratagem.worker.exchange.sliced_reducer import FragmentExchange, FragmentLink
from stratagem.worker.mesh import Forming, Link, SharedGroup
from stratagem.worker.mesh.peers import Group
from stratagem.worker.party.join_pipeline import join_stages
from stratagem.worker.party.rendezvous import (
    Members,
    closing_on_failure,
    exchange_over,
    form_link,
    meet,
    suspect,
)
from stratagem.worker.party.state import agree_on_state, held_slices, share_of
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.control import MemberView

# ---- Join and leave ----


def join(work: ExecutionContext, plan: pb.TrainPlan, view: MemberView) -> Joined:
    """Join the party; return this member's trainer and the exchange for this membership view.

    Raises ExchangeError when a member is lost meanwhile, ViewChanged when the view is no longer the
    current one.
    """
    holding = work.holding
    joined = holding.joined(view.membership)
    if joined is None:
        leave(work)
        if view.size > 1 and view.membership <= holding.spent:
            raise ExchangeError(f"the exchange of membership {view.membership} was given up")
        work.set_activity("waiting")
        joined = (join_stages if plan.ranks else _join_replicas)(work, plan, view)
        holding.trainer, holding.exchange = joined
        holding.membership = view.membership
    # Even if an earlier plan joined: from now on this one's control must be able to cut it.
    work.control.hold(joined.exchange, view.membership)
    return joined


def _join_replicas(work: ExecutionContext, plan: pb.TrainPlan, view: MemberView) -> Joined:
    held = work.holding.trainer
    share = held.share if isinstance(held, Trainer) else None
    if share is not None and not share.is_mirrored and share != share_of(work, view):
        work.holding.drop()  # others have other slices of the state than this member needs
    link, members = _meet(work, plan, view)
    failpoint("worker.rendezvous.joined")
    with closing_on_failure(work, view, link):
        if plan.exchange == pb.EXCHANGE_METHOD_GOSSIP:
            assert not isinstance(link, SharedGroup)  # see USABLE
            return join_nodes(work, plan, view, members, link)
        if local_steps_of(work.job.strategy) is not None:
            replicas = hold_replicas(work, plan, view, members)
            return Joined(replicas, _fragment_exchange(work, plan, view, replicas, link))
        trainer = agree_on_state(work, plan, view, members)
        exchange = _exchange(work, plan, view, trainer, link)
        trainer.connect(exchange)
        return Joined(trainer, exchange)


def give_up(work: ExecutionContext, view: MemberView, reason: str) -> None:
    """Leave a failed exchange, and report it to the coordinator, which finds the cause."""
    leave(work)
    suspect(work, view, reason)


def leave(work: ExecutionContext) -> None:
    """Close the exchange; keep the state with all applied steps."""
    work.control.let_go()
    work.post(work.gradients.close)
    work.holding.leave()


# ---- Rendezvous of the members ----


def _meet(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView
) -> tuple[Link | SharedGroup | None, Members]:
    """Wait for all members of the membership view; return (link, for AllReduce; their messages)."""
    this_member = coordinator_pb2.RendezvousMember(
        applied_step=work.holding.applied_step,
        address=work.host.address,
        slices=held_slices(work),
    )
    if view.size == 1:
        return None, [this_member]
    if plan.exchange == pb.EXCHANGE_METHOD_PARAMETER_SERVER:
        return None, meet(work, view, b"")
    members: list[coordinator_pb2.RendezvousMember] = []

    def exchange_offers(offer: bytes) -> list[bytes]:
        members.extend(meet(work, view, offer, held_slices(work)))
        return [member.endpoint for member in members]

    group = Group(
        work.key.run_id,
        work.key.party,
        view.term,
        view.membership,
        view.rank,
        view.size,
        tuple(member.worker_id for member in view.members),
    )
    is_gossip = plan.exchange == pb.EXCHANGE_METHOD_GOSSIP
    method = "gossip" if is_gossip else all_reduce_of(work.job.strategy)
    if num_fragments_of(work.job.strategy) > 1:
        method = "fragments"
    if partitions_parameters(work.job.strategy):
        method = "full"
    forming = Forming(lambda: form_link(work, group, method, exchange_offers))
    work.control.hold(forming, view.membership)
    return forming.link(), members


# ---- Exchange of gradients ----


def _exchange(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    view: MemberView,
    trainer: Trainer,
    link: Link | SharedGroup | None,
) -> Reducer:
    if trainer.pieces is not None:
        return sliced_exchange(
            trainer.buckets,
            link,
            plan.num_shards,
            trainer.pieces.owners,
            is_mirrored=trainer.pieces.is_mirrored,
            held=trainer.pieces.held,
            deadline_s=work.exchange_timeout_s,
        )
    is_server = plan.exchange == pb.EXCHANGE_METHOD_PARAMETER_SERVER
    is_alone = plan.num_shards == 1 and not is_server and trainer.compressor is None
    if is_alone and SingleMemberReducer.fits(trainer.params):
        return SingleMemberReducer(trainer.params, trainer.setup.numerics)
    return _bucket_exchange(work, plan, view, trainer, trainer.step, link)


def _fragment_exchange(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    view: MemberView,
    trainer: LocalStepsTrainer,
    link: Link | SharedGroup | None,
) -> FragmentExchange:
    """Make the exchange of replicas: one reducer per fragment; several reducers share the link."""
    fragments = trainer.fragments
    shares = [link] * len(fragments)
    if link is not None and len(fragments) > 1:
        assert not isinstance(link, SharedGroup)  # see USABLE
        shares = [FragmentLink(link, index, len(fragments)) for index in range(len(fragments))]
    return FragmentExchange(
        [
            _bucket_exchange(work, plan, view, fragment, trainer.step, share)
            for fragment, share in zip(fragments, shares, strict=True)
        ]
    )


def _bucket_exchange(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    view: MemberView,
    summed: Trainer | OuterFragment,
    step: int,
    link: Link | SharedGroup | None,
) -> GradientReducer:
    compressor = summed.compressor
    if plan.exchange == pb.EXCHANGE_METHOD_PARAMETER_SERVER:
        exchange, transport = server_exchange(
            summed.buckets,
            view.rank,
            view.size,
            plan.num_shards,
            deadline_s=work.exchange_timeout_s,
            compressor=compressor,
        )
        work.post(work.gradients.open, view.membership, step, transport)
        return exchange
    if link is None:
        return solo_exchange(summed.buckets, plan.num_shards, compressor)
    if work.job.execution.memory == "MinimalPeak":
        work.warn(
            [
                "execution.memory: under MinimalPeak the gradients of several workers keep their "
                "storage between steps; it belongs to their exchange"
            ]
        )
    return exchange_over(work, summed.buckets, link, plan.num_shards, compressor)


# ---- Join a party of gossip nodes ----
#
# A member's nodes exist nowhere else, so members cannot copy from each other: either all hold their
# nodes at the same step, or all of them load the base.


def join_nodes(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    view: MemberView,
    members: Sequence[coordinator_pb2.RendezvousMember],
    link: Link | None,
) -> Joined:
    """Return this member's gossip nodes, and their exchange, which owns the link."""
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
    """Return the mixing weights of each node: its neighbours' and its own, by topology and seed."""
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
    work.warn(trainer.setup.notes)
    trainer.load_state(tensors, metadata)
    work.holding.begin_sums(work.segment)
    return trainer


# ---- Join a party of replicas with local steps ----
#
# A member's replicas exist nowhere else, so members cannot copy from each other: either all hold
# their replicas at the same step, or all of them load the base.


def hold_replicas(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, members: Members
) -> LocalStepsTrainer:
    """Return the trainer of this member's replicas, at one step on all members: the present one, or
    one loaded from the base."""
    steps = {m.applied_step if m.HasField("applied_step") else None for m in members}
    is_common = len(steps) == 1 and None not in steps
    held = work.holding.trainer
    if is_common and isinstance(held, LocalStepsTrainer):
        return held
    return _load_outer_base(work, plan, view.me.shards)


def _load_outer_base(
    work: ExecutionContext, plan: pb.TrainPlan, replicas: range
) -> LocalStepsTrainer:
    work.holding.drop()
    tensors, metadata = work.base_state(plan.base)
    if plan.kept:
        own_tensors, numbers = work.host.kept.load(work.key.run_id, plan.base.segment, plan.kept)
        tensors, metadata = {**tensors, **own_tensors}, {**metadata, **numbers}
    failpoint("worker.replicas.loaded")
    trainer = build_local_steps_trainer(
        work.job,
        work.entrypoints,
        replicas,
        device=work.host.device,
        sources=work.sources(),
        numerics=work.numerics,
    )
    work.warn(trainer.setup.notes)
    trainer.load_state(tensors, metadata)
    work.holding.trainer = trainer
    work.holding.begin_sums(work.segment)
    return trainer
