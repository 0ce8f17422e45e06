"""Join a party whose members hold stages of a model: meet, connect, and load this rank's state.

Members stand replica by replica. There is one rendezvous for all of them; then the ranks of each
replica are connected for activations, and equal ranks of the replicas, a *column*, for gradients.
With a ParameterServer each column has its sums from the coordinator, and no connection of its own.
The stages of a rank exist nowhere else, so no rank copies from another: a new membership begins
from the base. Runs in the torch thread, but for the forming of connections.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import (
    DataParallel,
    DataStore,
    ModelParallel,
    Pipeline,
    all_reduce_of,
)
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import Joined
from stratagem.worker.exchange import GradientBuckets, server_exchange, solo_exchange
from stratagem.worker.mesh import Forming
from stratagem.worker.mesh.choice import form_messages
from stratagem.worker.mesh.link import MessageLink
from stratagem.worker.mesh.peers import Group
from stratagem.worker.party.rendezvous import (
    closing_on_failure,
    exchange_over,
    form_link,
    form_timeout_s,
    meet,
    place_of,
)
from stratagem.worker.pipeline.agreement import StageExchange
from stratagem.worker.pipeline.build import (
    RankEndpoint,
    StageAssignment,
    SumOverReplicas,
    build_stage_runner,
)
from stratagem.worker.pipeline.messages import LocalPost, LocalTransport, PeerTransport
from stratagem.worker.pipeline.rank_trainer import StageRunner
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.control import MemberView


@dataclass(frozen=True, slots=True)
class _Where:
    """This member's position: its rank among the `width` ranks of a replica, and the replica."""

    view: MemberView
    width: int
    has_server: bool
    """True if the coordinator sums the gradients of a column."""

    @property
    def replica(self) -> int:
        return self.view.rank // self.width

    @property
    def rank(self) -> int:
        return self.view.rank % self.width

    @property
    def num_replicas(self) -> int:
        return self.view.size // self.width


def join_stages(work: ExecutionContext, plan: pb.TrainPlan, view: MemberView) -> Joined:
    """Return this worker's stages, loaded from the base (the plan's initial state), and their
    connections under the membership view."""
    work.holding.drop()
    spec = _spec_of(work.job)
    is_server = plan.exchange == pb.EXCHANGE_METHOD_PARAMETER_SERVER
    where = _Where(view, len(set(plan.ranks)), is_server)
    if isinstance(spec.communication, DataStore):
        check = asyncio.to_thread(work.host.activations.check, work.host.worker_id)
        work.control.wait(check, view.membership)
    exchange = _connect(work, where, spec)
    failpoint("worker.stages.joined")
    with closing_on_failure(work, view, exchange):
        runner = _runner(work, plan, where, spec, exchange)
        _load_base(work, plan.base, runner)
        _sum_over_replicas(work, plan, where, runner, exchange)
        exchange.activations = _carrier(work, exchange, spec)
        exchange.schedule_text = lambda: runner.schedule_text
        carrier = exchange.column or (exchange.reducer if where.has_server else None)
        if carrier is not None:
            replicas = counted(where.num_replicas, "replica")
            exchange.columns = f", {replicas} over {carrier.name}"
    return Joined(runner, exchange)


def _spec_of(job: JobSpec) -> ModelParallel:
    strategy = job.strategy
    inner = strategy.options.inner if isinstance(strategy, DataParallel) else strategy
    if not isinstance(inner, ModelParallel):
        raise InvalidInputError.at("strategy", "is not ModelParallel, but the plan names ranks")
    return inner


# ---- Connections ----


def _connect(work: ExecutionContext, where: _Where, spec: ModelParallel) -> StageExchange:
    if where.view.size == 1:
        return StageExchange(LocalTransport(LocalPost(1), 0))
    forming = Forming(lambda: _form(work, where, spec))
    work.control.hold(forming, where.view.membership)
    return forming.link()


def _form(work: ExecutionContext, where: _Where, spec: ModelParallel) -> StageExchange:
    """Form the connections; sockets to which others connect are opened before the rendezvous."""
    exchange = StageExchange(LocalTransport(LocalPost(1), 0))
    rendezvous = partial(_meet, work, where, exchange)
    try:
        if where.width > 1 and not isinstance(spec.communication, DataStore):
            first = where.replica * where.width
            ranks = range(first, first + where.width)
            group = _group(work, where.view, f"replica{where.replica}", ranks)
            link: MessageLink = form_messages(
                place_of(work, group),
                (*work.host.mesh.engines(("shm",)), "grpc"),
                rendezvous,
                form_timeout_s(work),
            )
            exchange.transport, exchange.carrier = PeerTransport(link), link
            return exchange
        rendezvous(b"")
        if where.width > 1:
            key, store = work.key, work.host.activations
            membership = where.view.membership
            made = store.transport(key.run_id, key.party, membership, where.replica)
            exchange.transport = made
            if where.view.rank == 0:
                store.clear_older(key.run_id, key.party, membership)
        return exchange
    except BaseException:
        exchange.cut()
        exchange.close()
        raise


def _meet(
    work: ExecutionContext, where: _Where, exchange: StageExchange, offer: bytes
) -> list[bytes]:
    """Meet the whole party; return the offers of this replica's ranks for activations.

    Forms the column on the way, where there are replicas. A member's endpoint is the size of its
    offer for activations (4 bytes), that offer, and the one for the column.
    """
    activations: list[bytes] = []

    def exchange_offers(column: bytes) -> list[bytes]:
        endpoint = len(offer).to_bytes(4, "big") + offer + column
        columns = []
        for peer in meet(work, where.view, endpoint):
            end = 4 + int.from_bytes(peer.endpoint[:4], "big")
            activations.append(peer.endpoint[4:end])
            columns.append(peer.endpoint[end:])
        return columns[where.rank :: where.width]

    if where.num_replicas == 1 or where.has_server:
        exchange_offers(b"")
    else:
        ranks = range(where.rank, where.view.size, where.width)
        group = _group(work, where.view, f"rank{where.rank}", ranks)
        exchange.column = form_link(work, group, all_reduce_of(work.job.strategy), exchange_offers)
    first = where.replica * where.width
    return activations[first : first + where.width]


def _group(work: ExecutionContext, view: MemberView, name: str, ranks: range) -> Group:
    """Return the group for connections of the members with these ranks, this one included."""
    party = f"{work.key.party}/{name}".lstrip("/")
    worker_ids = tuple(view.members[peer].worker_id for peer in ranks)
    rank, size = ranks.index(view.rank), len(ranks)
    return Group(work.key.run_id, party, view.term, view.membership, rank, size, worker_ids)


# ---- Traffic over the connections ----


def _runner(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    where: _Where,
    spec: ModelParallel,
    exchange: StageExchange,
) -> StageRunner:
    communication = spec.communication
    placement = StageAssignment(
        partitions=tuple(partition.node_ids for partition in spec.partitions),
        ranks=tuple(plan.ranks),
        micro_batch_size=(
            communication.micro_batch_size if isinstance(communication, Pipeline) else None
        ),
        schedule=spec.options.schedule,
        numerics=work.numerics,
    )
    runner = build_stage_runner(
        work.job,
        work.entrypoints,
        placement,
        RankEndpoint(where.rank, exchange.transport, work.exchange_timeout_s),
        device=work.host.device,
        fresh=False,
        sources=work.sources(),
    )
    work.warn(runner.setup.notes)
    return runner


def _load_base(work: ExecutionContext, base: pb.StateRef, runner: StageRunner) -> None:
    runner.load_state(*work.base_state(base))
    work.holding.begin_sums(work.segment)
    failpoint("worker.stages.loaded")


def _sum_over_replicas(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    where: _Where,
    runner: StageRunner,
    exchange: StageExchange,
) -> None:
    """Make the reducer that sums this rank's gradients over all shards, if there are several."""
    if plan.num_shards == 1 and not where.has_server:
        return
    buckets = GradientBuckets(runner.params, num_extras=runner.num_extras)
    if where.has_server:
        exchange.reducer, transport = server_exchange(
            buckets,
            where.replica,
            where.num_replicas,
            plan.num_shards,
            deadline_s=work.exchange_timeout_s,
        )
        work.post(work.gradients.open, where.view.membership, runner.step, transport)
    elif exchange.column is None:
        exchange.reducer = solo_exchange(buckets, plan.num_shards)
    else:
        exchange.reducer = exchange_over(work, buckets, exchange.column, plan.num_shards)
    exchange.reduce = SumOverReplicas(runner, exchange.reducer)


def _carrier(work: ExecutionContext, exchange: StageExchange, spec: ModelParallel) -> str:
    communication = spec.communication
    kind = {"DataStore": "data store"}.get(type(communication).__name__)
    kind = kind or type(communication).__name__.lower()
    if isinstance(exchange.transport, LocalTransport):
        return f"{kind}/local"
    return f"{kind}/{exchange.carrier.name if exchange.carrier else work.host.activations.name}"
