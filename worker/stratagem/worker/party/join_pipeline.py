"""Joining a party whose members hold stages of a model: meet, connect, load one's part of the base.

Members stand replica by replica. There is one rendezvous for all of them; then the ranks of each
replica are connected for activations, and equal ranks of the replicas, a *column*, for gradients.
What a rank holds is the only copy, so no rank heals: a new membership begins from the base. Runs in
the torch thread, but for the forming of connections.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from stratagem.common.base.errors import InvalidInputError
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
from stratagem.worker.exchange import ExchangeError, GradientBuckets, solo_exchange
from stratagem.worker.mesh import Forming
from stratagem.worker.mesh.backend_agreement import form_messages
from stratagem.worker.mesh.link import MessageLink
from stratagem.worker.mesh.peer_service import Group
from stratagem.worker.party.connect_members import (
    exchange_over,
    form_link,
    form_timeout_s,
    noting_failures,
    place_of,
)
from stratagem.worker.party.join import leave
from stratagem.worker.party.join_rendezvous import meet
from stratagem.worker.pipeline.build_stages import RankEndpoint, StageAssignment, build_stage_runner
from stratagem.worker.pipeline.held_stages import HeldStages, Lines
from stratagem.worker.pipeline.peer_transport import PeerTransport
from stratagem.worker.pipeline.rank_trainer import Reduce, StageRunner
from stratagem.worker.pipeline.replica_reduction import SumOverReplicas
from stratagem.worker.pipeline.stage_transport import LocalPost, LocalTransport
from stratagem.worker.session.context import ExecutionContext, Tally
from stratagem.worker.session.plan_control import MemberView


@dataclass(frozen=True, slots=True)
class _Where:
    """This member's place: rank `rank` of the `width` ranks of replica number `replica`."""

    view: MemberView
    width: int

    @property
    def replica(self) -> int:
        return self.view.rank // self.width

    @property
    def rank(self) -> int:
        return self.view.rank % self.width

    @property
    def num_replicas(self) -> int:
        return self.view.size // self.width


def join_stages(work: ExecutionContext, plan: pb.TrainPlan, view: MemberView) -> HeldStages:
    """Join the party; return this worker's stages under the view, at the step of all members.

    Raises ExchangeError when a member is lost meanwhile, ViewChanged when the view is no longer the
    current one.
    """
    holding = work.holding
    if holding.stages is not None and holding.stages.membership == view.membership:
        # Made by an earlier plan; from now on this one's control must be able to cut it.
        work.control.hold(holding.stages, view.membership)
        return holding.stages
    leave(work)
    if view.size > 1 and view.membership <= holding.spent:
        raise ExchangeError(f"the exchange of membership {view.membership} was given up")
    spec = _spec_of(work.job)
    where = _Where(view, len(set(plan.ranks)))
    if isinstance(spec.communication, DataStore):
        check = asyncio.to_thread(work.host.activations.check, work.host.worker_id)
        work.control.wait(check, view.membership)
    work.set_activity("waiting")
    lines = _connect(work, where, spec)
    failpoint("worker.stages.joined")
    try:
        work.control.hold(lines, view.membership)
        runner = _runner(work, plan, where, spec, lines)
        _load_base(work, plan.base, runner)
        reduce = _reduce(work, plan, where, runner, lines)
        names = _carrier(work, lines, spec), _columns(where, lines)
        holding.stages = HeldStages(view.membership, runner, reduce, lines, where.replica, *names)
    except BaseException:
        work.control.let_go()
        lines.cut()
        lines.close()
        raise
    work.control.hold(holding.stages, view.membership)
    return holding.stages


def _spec_of(job: JobSpec) -> ModelParallel:
    strategy = job.strategy
    inner = strategy.options.inner if isinstance(strategy, DataParallel) else strategy
    if not isinstance(inner, ModelParallel):
        raise InvalidInputError.at("strategy", "is not ModelParallel, but the plan names ranks")
    return inner


# ---- connecting ----


def _connect(work: ExecutionContext, where: _Where, spec: ModelParallel) -> Lines:
    if where.view.size == 1:
        return Lines(LocalTransport(LocalPost(1), 0))
    forming = Forming(lambda: _form(work, where, spec))
    work.control.hold(forming, where.view.membership)
    with noting_failures(work):
        return forming.link()


def _form(work: ExecutionContext, where: _Where, spec: ModelParallel) -> Lines:
    """Form the connections; all that others connect to is opened before the rendezvous."""
    lines = Lines(LocalTransport(LocalPost(1), 0))
    rendezvous = partial(_meet, work, where, lines)
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
            lines.transport, lines.carrier = PeerTransport(link), link
            return lines
        rendezvous(b"")
        if where.width > 1:
            key, store = work.key, work.host.activations
            membership = where.view.membership
            made = store.transport(key.run_id, key.party, membership, where.replica)
            lines.transport = made
            if where.view.rank == 0:
                store.clear_older(key.run_id, key.party, membership)
        return lines
    except BaseException:
        lines.cut()
        lines.close()
        raise


def _meet(work: ExecutionContext, where: _Where, lines: Lines, offer: bytes) -> list[bytes]:
    """Meet the whole party; return the offers of this replica's ranks for activations.

    Forms the column on the way, where there are replicas. A member's endpoint is the size of its
    offer for activations (4 bytes), that offer, and the one for the column.
    """
    activations: list[bytes] = []

    def exchange(column: bytes) -> list[bytes]:
        endpoint = len(offer).to_bytes(4, "big") + offer + column
        columns = []
        for peer in meet(work, where.view, endpoint):
            end = 4 + int.from_bytes(peer.endpoint[:4], "big")
            activations.append(peer.endpoint[4:end])
            columns.append(peer.endpoint[end:])
        return columns[where.rank :: where.width]

    if where.num_replicas == 1:
        exchange(b"")
    else:
        ranks = range(where.rank, where.view.size, where.width)
        group = _group(work, where.view, f"rank{where.rank}", ranks)
        lines.column = form_link(work, group, all_reduce_of(work.job.strategy), exchange)
    first = where.replica * where.width
    return activations[first : first + where.width]


def _group(work: ExecutionContext, view: MemberView, name: str, ranks: range) -> Group:
    """Return the group of the members of these ranks, of which this member is one."""
    party = f"{work.key.party}/{name}".lstrip("/")
    worker_ids = tuple(view.members[peer].worker_id for peer in ranks)
    rank, size = ranks.index(view.rank), len(ranks)
    return Group(work.key.run_id, party, view.term, view.membership, rank, size, worker_ids)


# ---- what goes over the connections ----


def _runner(
    work: ExecutionContext, plan: pb.TrainPlan, where: _Where, spec: ModelParallel, lines: Lines
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
        work.host.entrypoints,
        placement,
        RankEndpoint(where.rank, lines.transport, work.exchange_timeout_s),
        device=work.host.device,
        fresh=False,
        sources=work.sources(),
    )
    work.warn(runner.notes)
    return runner


def _load_base(work: ExecutionContext, base: pb.StateRef, runner: StageRunner) -> None:
    runner.load_state(*work.base_state(base))
    work.holding.tally = Tally(work.segment)
    failpoint("worker.stages.loaded")


def _reduce(
    work: ExecutionContext, plan: pb.TrainPlan, where: _Where, runner: StageRunner, lines: Lines
) -> Reduce | None:
    """Make the sum of this rank's gradients over the shards; None for one shard."""
    if plan.num_shards == 1:
        return None
    buckets = GradientBuckets(runner.params, num_extras=runner.num_extras)
    if lines.column is None:
        exchange = solo_exchange(buckets, plan.num_shards)
    else:
        exchange = exchange_over(work, buckets, lines.column, plan.num_shards)
    lines.exchange = exchange
    return SumOverReplicas(runner, exchange)


def _carrier(work: ExecutionContext, lines: Lines, spec: ModelParallel) -> str:
    communication = spec.communication
    kind = {"DataStore": "data store"}.get(type(communication).__name__)
    kind = kind or type(communication).__name__.lower()
    if isinstance(lines.transport, LocalTransport):
        return f"{kind}/local"
    return f"{kind}/{lines.carrier.name if lines.carrier else work.host.activations.name}"


def _columns(where: _Where, lines: Lines) -> str:
    if lines.column is None:
        return ""
    return f", {where.num_replicas} replicas over {lines.column.name}"
