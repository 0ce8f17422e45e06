"""The rendezvous of a party: its members' calls to the coordinator, with their retries.

Runs in the torch thread; the calls go through the event loop.
"""

from collections.abc import Sequence
from typing import Final

import grpc

from stratagem.common.process.failpoints import failpoint
from stratagem.v1 import coordinator_pb2, types_pb2
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.host.coordinator_retry import new_backoff
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import MemberView, ViewChanged

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
    """Wait for all members of the view at the rendezvous; return what they say, by rank. slices:
    what this member says of those that it holds."""
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
    """Report to the coordinator that the exchange of this view failed; it looks for the culprit."""
    request = coordinator_pb2.SuspectRequest(
        fence=fence_of(view), session=session_of(work), reason=reason[:1000]
    )
    work.control.wait(_suspect(work, request), view.membership)


async def _call_rendezvous(
    work: ExecutionContext, request: coordinator_pb2.RendezvousRequest
) -> Members:
    """Ask until all have come. A coordinator that restarts gets the same question again."""
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
    """Return the fence of calls about this view: receivers with a later view refuse them."""
    return types_pb2.Fence(term=view.term, membership=view.membership)


def session_of(work: ExecutionContext) -> types_pb2.SessionRef:
    """Return the reference by which calls name the session of this execution."""
    return types_pb2.SessionRef(
        run_id=work.key.run_id, party=work.key.party, member=work.key.member
    )
