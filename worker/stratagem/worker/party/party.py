"""Joining a party: meet at the rendezvous, form the exchange, agree on one state.

Owns the talk with the coordinator and the fellow members that ends with a session that holds the
party's newest state and an exchange for the view. Runs in the torch thread; calls go through the
event loop. Must not know how a step is computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

import grpc
from torch import Tensor

from stratagem.common.errors import StratagemError
from stratagem.common.failpoints import failpoint
from stratagem.common.job import JobSpec
from stratagem.common.rpc.addresses import split_address
from stratagem.common.rpc.channel import open_channel
from stratagem.common.strategy import all_reduce_of
from stratagem.common.tensors.chunks import Sink
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.torch_codec import allocate
from stratagem.common.tensors.transfer import pull
from stratagem.v1 import coordinator_pb2, types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.worker_pb2_grpc import WorkerServiceStub
from stratagem.worker.agent import new_backoff
from stratagem.worker.control import Moved, PartyView
from stratagem.worker.engine import Trainer
from stratagem.worker.exchange import (
    AloneExchange,
    Exchange,
    ExchangeError,
    GossipExchange,
    GradientBuckets,
    mesh_exchange,
    server_exchange,
    solo_exchange,
)
from stratagem.worker.exchange.compressor import Compressor
from stratagem.worker.exchange.layout import BUCKET_BYTES, CODED_BUCKET_BYTES
from stratagem.worker.mesh import Forming, Link, Rendezvous, SharedGroup
from stratagem.worker.mesh.agree import Place, form_agreed
from stratagem.worker.mesh.choice import PREFERENCE
from stratagem.worker.mesh.segments import UnshareableError
from stratagem.worker.party.gossip import join_nodes
from stratagem.worker.peer import Group
from stratagem.worker.state_store import freeze
from stratagem.worker.work import Tally, Work

# The coordinator decides how long members may stay away; this only ends a call it has forgotten.
RENDEZVOUS_TIMEOUT_S: Final = 600.0
SUSPECT_TIMEOUT_S: Final = 10.0
FORM_TIMEOUT_S: Final = 30.0
USABLE: Final = {
    "direct": PREFERENCE,
    "ring": ("nccl", "gloo", "grpc"),
    "gossip": ("nccl", "gloo", "grpc"),
    "native": ("nccl", "gloo"),
}
"""Engines by the method that goes over them."""
_TALLY: Final = "tally"

_RETRIED: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)

Members = Sequence[coordinator_pb2.RendezvousMember]


def join(
    work: Work, plan: pb.TrainPlan, view: PartyView
) -> Exchange | AloneExchange | GossipExchange:
    """The exchange of this view; afterwards all members hold the same state.

    Raises ExchangeError when a member is lost meanwhile, Moved when the view is no longer the
    current one.
    """
    holding = work.holding
    if holding.exchange is not None and holding.membership == view.membership:
        # It was formed by an earlier plan; from now on this one's control must be able to cut it.
        work.control.hold(holding.exchange, view.membership)
        return holding.exchange
    leave(work)
    if view.size > 1 and view.membership <= holding.spent:
        raise ExchangeError(f"the exchange of membership {view.membership} was given up")
    work.be("waiting")
    link, members = _meet(work, plan, view)
    failpoint("worker.rendezvous.joined")
    try:
        if link is not None:
            work.control.hold(link, view.membership)
        if plan.exchange == pb.EXCHANGE_METHOD_GOSSIP:
            assert not isinstance(link, SharedGroup)  # see USABLE
            holding.exchange = join_nodes(work, plan, view, members, link)
        else:
            _agree_on_state(work, plan, view, members)
            holding.exchange = _exchange(work, plan, view, link)
    except BaseException:
        if link is not None:
            work.control.let_go()
            link.cut()
            link.close()
        raise
    holding.membership = view.membership
    work.control.hold(holding.exchange, view.membership)
    return holding.exchange


def give_up(work: Work, view: PartyView, reason: str) -> None:
    """Leave an exchange that failed and tell the coordinator, who looks for the culprit."""
    leave(work)
    request = coordinator_pb2.SuspectRequest(
        fence=_fence(view), session=_session(work), reason=reason[:1000]
    )
    work.control.wait(_suspect(work, request), view.membership)


def leave(work: Work) -> None:
    """Give up the exchange; the session holds what it has applied."""
    work.control.let_go()
    work.post(work.gradients.close)
    work.holding.leave()


# ---- meeting ----


def _meet(
    work: Work, plan: pb.TrainPlan, view: PartyView
) -> tuple[Link | SharedGroup | None, Members]:
    """Wait for all members of the view; what they say, and for AllReduce the link to them."""
    mine = coordinator_pb2.RendezvousMember(
        applied_step=work.holding.applied_step, address=work.host.address
    )
    if view.size == 1:
        return None, [mine]
    if plan.exchange == pb.EXCHANGE_METHOD_PARAMETER_SERVER:
        return None, meet(work, view, b"")
    members: list[coordinator_pb2.RendezvousMember] = []

    def exchange_offers(offer: bytes) -> list[bytes]:
        members.extend(meet(work, view, offer))
        return [each.endpoint for each in members]

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
    forming = Forming(lambda: form_link(work, group, method, exchange_offers))
    work.control.hold(forming, view.membership)
    with noting_failures(work):
        return forming.link(), members


def form_link(
    work: Work, group: Group, method: str, exchange_offers: Rendezvous
) -> Link | SharedGroup:
    """Blocks until a group is connected by an engine that all of it have and the method can use.

    exchange_offers gets what this member offers and answers with all offers, by rank.
    """
    engines = work.host.mesh.engines(USABLE[method])
    return form_agreed(place_of(work, group), engines, exchange_offers, form_timeout_s(work))


def place_of(work: Work, group: Group) -> Place:
    """Where this worker stands in the group."""
    host, _ = split_address(work.host.address)
    return Place(group, work.host.hub, host, work.host.device)


def form_timeout_s(work: Work) -> float:
    """Longest wait for the connections of a membership."""
    return min(FORM_TIMEOUT_S, work.host.exchange_timeout_s)


@contextmanager
def noting_failures(work: Work) -> Iterator[None]:
    """Shared memory that cannot be had counts against it."""
    try:
        yield
    except UnshareableError as error:
        work.host.mesh.sharing_fails(error)
        raise


def meet(work: Work, view: PartyView, endpoint: bytes) -> Members:
    """The rendezvous: what all members of the view say, by rank, once all are there."""
    request = coordinator_pb2.RendezvousRequest(
        fence=_fence(view),
        session=_session(work),
        rank=view.rank,
        endpoint=endpoint,
        applied_step=work.holding.applied_step,
        address=work.host.address,
    )
    members = work.control.wait(_call_rendezvous(work, request), view.membership)
    failpoint("worker.rendezvous.answered")
    work.holding.spent = view.membership
    if len(members) != view.size:
        raise ExchangeError(f"the rendezvous named {len(members)} members, expected {view.size}")
    return members


async def _call_rendezvous(work: Work, request: coordinator_pb2.RendezvousRequest) -> Members:
    """Ask until all have come. A coordinator that restarts gets the same question again."""
    backoff = new_backoff()
    while True:
        try:
            answer = await work.host.coordinator.Rendezvous(request, timeout=RENDEZVOUS_TIMEOUT_S)
            return list(answer.members)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _RETRIED:
                raise Moved from error
        await backoff.pause()


async def _suspect(work: Work, request: coordinator_pb2.SuspectRequest) -> None:
    backoff = new_backoff()
    while True:
        try:
            await work.host.coordinator.Suspect(request, timeout=SUSPECT_TIMEOUT_S)
            return
        except grpc.aio.AioRpcError as error:
            if error.code() not in _RETRIED:
                return  # it knows better already; a newer view will come
        await backoff.pause()


# ---- agreeing on one state ----


def _agree_on_state(work: Work, plan: pb.TrainPlan, view: PartyView, members: Members) -> None:
    """Everybody goes on from the newest state of the party, or from the base where none is."""
    held = [member.applied_step for member in members if member.HasField("applied_step")]
    newest = max(held, default=-1)
    mine = work.holding.applied_step
    if _keeps_residuals(work.job):
        # Nobody can copy them from a member that is gone: all hold the same step, or none counts.
        if len(held) < view.size or min(held) < newest or newest < plan.base.step:
            _load_base(work, plan.base)
    elif newest < plan.base.step:
        _load_base(work, plan.base)
    elif mine is None or mine < newest:
        donors = [
            member.address
            for member in members
            if member.HasField("applied_step") and member.applied_step == newest
        ]
        _copy_from(work, view, donors[view.rank % len(donors)])
    elif len(held) < view.size or min(held) < newest:
        _offer(work, view)


def _keeps_residuals(job: JobSpec) -> bool:
    return job.compression is not None and job.compression.keeps_state


def _load_base(work: Work, base: pb.StateRef) -> None:
    if base.digest:
        tensors, metadata = work.blob(base.digest)
        # Aggregated states (federated) carry no step of their own.
        work.load(tensors, {"step": str(base.step), "format": "1", **metadata})
    else:
        work.holding.drop()
        work.holding.trainer = work.new_trainer(fresh=True)
    work.holding.tally = Tally(work.segment)


def _copy_from(work: Work, view: PartyView, address: str) -> None:
    try:
        tensors, metadata = work.control.wait(_pull_live(work, view, address), view.membership)
    except StratagemError as error:  # the donor is gone, or no longer offers
        raise ExchangeError(f"no state from {address}: {error}") from error
    sums = metadata.pop(_TALLY, "")
    work.load(tensors, metadata)
    tally = Tally(**json.loads(sums)) if sums else Tally()
    work.holding.tally = tally if tally.segment == work.segment else Tally(work.segment)


async def _pull_live(
    work: Work, view: PartyView, address: str
) -> tuple[Mapping[str, Tensor], dict[str, str]]:
    """The state that another member has frozen for us."""
    ways_out: list[Callable[[], dict[str, Tensor]]] = []

    def accept(manifest: Manifest) -> Sink:
        sink, finish = allocate(manifest)
        ways_out.append(finish)
        return sink

    async with open_channel(address, work.host.hub.proof, to_worker="") as channel:
        stub = WorkerServiceStub(channel)
        # A session has the same name on every member.
        request = pb.GetStateRequest(fence=_fence(view), session=_session(work), live=True)
        manifest = await pull(
            lambda offset: stub.GetState(_from(request, offset)),
            accept,
            purpose=Purpose.STATE,
        )
    return ways_out[0](), dict(manifest.metadata)


def _from(request: pb.GetStateRequest, offset: int) -> pb.GetStateRequest:
    request.offset = offset
    return request


def _offer(work: Work, view: PartyView) -> None:
    """Freeze what we hold for members that are behind; dropped after the next step."""
    trainer = work.holding.trainer
    assert isinstance(trainer, Trainer)
    tensors, metadata = trainer.copy_state()
    sums = json.dumps(asdict(work.holding.tally))
    work.holding.is_offering = True
    work.post(work.states.set_live, view.membership, freeze(tensors, {**metadata, _TALLY: sums}))


# ---- the exchange ----


def _exchange(
    work: Work, plan: pb.TrainPlan, view: PartyView, link: Link | SharedGroup | None
) -> Exchange | AloneExchange:
    holding, deadline_s = work.holding, work.exchange_timeout_s
    trainer = holding.trainer
    assert isinstance(trainer, Trainer)
    is_server = plan.exchange == pb.EXCHANGE_METHOD_PARAMETER_SERVER
    is_alone = plan.num_shards == 1 and not is_server and trainer.compressor is None
    if is_alone and AloneExchange.fits(trainer.params):
        return AloneExchange(trainer.params, trainer.setup.numerics)
    if holding.buckets is None:
        holding.buckets = GradientBuckets(
            trainer.params,
            num_extras=trainer.num_extras,
            bucket_bytes=CODED_BUCKET_BYTES if trainer.compressor else BUCKET_BYTES,
        )
    if is_server:
        exchange, transport = server_exchange(
            holding.buckets,
            view.rank,
            view.size,
            plan.num_shards,
            deadline_s=deadline_s,
            compressor=trainer.compressor,
        )
        work.post(work.gradients.open, view.membership, trainer.step, transport)
        return exchange
    if link is None:
        return solo_exchange(holding.buckets, plan.num_shards, trainer.compressor)
    if work.job.execution.memory == "MinimalPeak":
        work.tell(
            [
                "execution.memory: under MinimalPeak the gradients of several workers keep their "
                "storage between steps; it belongs to their exchange"
            ]
        )
    return exchange_over(work, holding.buckets, link, plan.num_shards, trainer.compressor)


def exchange_over(
    work: Work,
    buckets: GradientBuckets,
    link: Link | SharedGroup,
    num_shards: int,
    compressor: Compressor | None = None,
) -> Exchange:
    """Sums by the job's method; takes the link over."""
    with noting_failures(work):
        exchange = mesh_exchange(
            buckets,
            link,
            num_shards,
            all_reduce=all_reduce_of(work.job.strategy),
            deadline_s=work.exchange_timeout_s,
            compressor=compressor,
        )
    if isinstance(link, SharedGroup):
        work.host.mesh.sharing_works()
    return exchange


def _fence(view: PartyView) -> types_pb2.Fence:
    return types_pb2.Fence(term=view.term, membership=view.membership)


def _session(work: Work) -> types_pb2.SessionRef:
    return types_pb2.SessionRef(
        run_id=work.key.run_id, party=work.key.party, member=work.key.member
    )
