"""Meet the other members of a party at the coordinator, and connect to them.

Runs in the torch thread, but for the forming of links; calls go through the event loop.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc

from stratagem.common.base.text import split_address
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import all_reduce_of
from stratagem.v1 import coordinator_pb2, types_pb2
from stratagem.worker.exchange import ExchangeError, GradientBuckets, GradientReducer, mesh_exchange
from stratagem.worker.exchange.compressor import Compressor
from stratagem.worker.host.clock import new_backoff
from stratagem.worker.mesh import Link, Rendezvous, SharedGroup
from stratagem.worker.mesh.choice import PREFERENCE, MemberAddress, form_agreed
from stratagem.worker.mesh.peers import Group
from stratagem.worker.pipeline.agreement import Interruptible
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.control import MemberView, ViewChanged

# ---- Calls to the coordinator ----
#
# A failed call to the coordinator is retried.

# The coordinator decides how long members may stay away; this only ends a call it has forgotten.
RENDEZVOUS_TIMEOUT_S: Final = 600.0
SUSPECT_TIMEOUT_S: Final = 10.0

_RETRIED: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)

Members = Sequence[coordinator_pb2.RendezvousMember]


def meet(
    work: ExecutionContext,
    view: MemberView,
    endpoint: bytes,
    slices: coordinator_pb2.HeldSlices | None = None,
) -> Members:
    """Wait for all members of the membership view at the rendezvous; return their messages, by
    rank. slices: the description of the slices that this member holds."""
    request = coordinator_pb2.RendezvousRequest(
        fence=fence_of(view),
        session=session_of(work),
        rank=view.rank,
        endpoint=endpoint,
        applied_step=work.holding.applied_step,
        address=work.host.address,
        slices=slices,
    )
    members = work.control.wait(_call_rendezvous(work, request), view.membership)
    failpoint("worker.rendezvous.answered")
    work.holding.spent = view.membership
    if len(members) != view.size:
        raise ExchangeError(f"the rendezvous named {len(members)} members, expected {view.size}")
    return members


def suspect(work: ExecutionContext, view: MemberView, reason: str) -> None:
    """Report to the coordinator that this membership's exchange failed; it looks for the cause."""
    request = coordinator_pb2.SuspectRequest(
        fence=fence_of(view), session=session_of(work), reason=reason[:1000]
    )
    work.control.wait(_suspect(work, request), view.membership)


async def _call_rendezvous(
    work: ExecutionContext, request: coordinator_pb2.RendezvousRequest
) -> Members:
    """Call the rendezvous until all members have come, also across restarts of the coordinator."""
    backoff = new_backoff()
    while True:
        try:
            answer = await work.host.coordinator.Rendezvous(request, timeout=RENDEZVOUS_TIMEOUT_S)
            return list(answer.members)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _RETRIED:
                raise ViewChanged from error
        await backoff.pause()


async def _suspect(work: ExecutionContext, request: coordinator_pb2.SuspectRequest) -> None:
    backoff = new_backoff()
    while True:
        try:
            await work.host.coordinator.Suspect(request, timeout=SUSPECT_TIMEOUT_S)
            return
        except grpc.aio.AioRpcError as error:
            if error.code() not in _RETRIED:
                return  # it knows better already; a newer view will come
        await backoff.pause()


def fence_of(view: MemberView) -> types_pb2.Fence:
    """Return the fence (leadership term and membership) of calls about this view: receivers with
    later ones refuse the call."""
    return types_pb2.Fence(term=view.term, membership=view.membership)


def session_of(work: ExecutionContext) -> types_pb2.SessionRef:
    """Return the reference that names this execution's session in calls."""
    return types_pb2.SessionRef(
        run_id=work.key.run_id, party=work.key.party, member=work.key.member
    )


# ---- Connections between members ----
#
# Members use the engine that all of them have, and sum gradients over it.

FORM_TIMEOUT_S: Final = 30.0
USABLE: Final = {
    "direct": PREFERENCE,
    "ring": ("nccl", "gloo", "grpc"),
    "full": ("shm", "gloo", "grpc"),
    "gossip": ("nccl", "gloo", "grpc"),
    "fragments": ("gloo", "grpc"),
    "native": ("nccl", "gloo"),
}
"""Engines that support each all-reduce method, by preference."""


def form_link(
    work: ExecutionContext, group: Group, method: str, exchange_offers: Rendezvous
) -> Link | SharedGroup:
    """Connect a group by an engine that all members have and that supports the method; block until
    done. exchange_offers: sends this member's offer and returns all offers, by rank."""
    engines = work.host.mesh.engines(USABLE[method])
    return form_agreed(place_of(work, group), engines, exchange_offers, form_timeout_s(work))


def place_of(work: ExecutionContext, group: Group) -> MemberAddress:
    """Return this worker's address in the group as engines need it: host, peer hub and device."""
    host, _ = split_address(work.host.address)
    return MemberAddress(group, work.host.hub, host, work.host.device)


def form_timeout_s(work: ExecutionContext) -> float:
    """Return the longest wait for the connections of a membership, in seconds."""
    return min(FORM_TIMEOUT_S, work.host.exchange_timeout_s)


@contextmanager
def closing_on_failure(
    work: ExecutionContext, view: MemberView, connection: Interruptible | None
) -> Iterator[None]:
    """Context manager that lets a newer membership view cut the connection, and closes the
    connection if the block fails."""
    if connection is None:
        yield
        return
    try:
        work.control.hold(connection, view.membership)
        yield
    except BaseException:
        work.control.let_go()
        connection.cut()
        connection.close()
        raise


def exchange_over(
    work: ExecutionContext,
    buckets: GradientBuckets,
    link: Link | SharedGroup,
    num_shards: int,
    compressor: Compressor | None = None,
) -> GradientReducer:
    """Make the exchange for the job's all-reduce method; it takes over the link."""
    return mesh_exchange(
        buckets,
        link,
        num_shards,
        all_reduce=all_reduce_of(work.job.strategy),
        deadline_s=work.exchange_timeout_s,
        compressor=compressor,
    )
