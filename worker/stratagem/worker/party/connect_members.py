"""Connects the members of a party: the engine that all of them have, and sums of gradients over it.

Runs in the torch thread, but for the forming of links.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stratagem.common.base.text import split_address
from stratagem.common.strategy import all_reduce_of
from stratagem.worker.exchange import GradientBuckets, GradientReducer, mesh_exchange
from stratagem.worker.exchange.coded.gradient_compressor import Compressor
from stratagem.worker.mesh import Link, Rendezvous, SharedGroup
from stratagem.worker.mesh.backend_agreement import MemberAddress, form_agreed
from stratagem.worker.mesh.backend_choice import PREFERENCE
from stratagem.worker.mesh.peer_service import Group
from stratagem.worker.pipeline.stage_exchange import Interruptible
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import MemberView

FORM_TIMEOUT_S: Final = 30.0
USABLE: Final = {
    "direct": PREFERENCE,
    "ring": ("nccl", "gloo", "grpc"),
    "full": ("shm", "gloo", "grpc"),
    "gossip": ("nccl", "gloo", "grpc"),
    "fragments": ("gloo", "grpc"),
    "native": ("nccl", "gloo"),
}
"""Engines by the method that goes over them."""


def form_link(
    work: ExecutionContext, group: Group, method: str, exchange_offers: Rendezvous
) -> Link | SharedGroup:
    """Block until a group is connected by an engine that all of it have and the method can use.

    exchange_offers: gets what this member offers and returns all offers, by rank.
    """
    engines = work.host.mesh.engines(USABLE[method])
    return form_agreed(place_of(work, group), engines, exchange_offers, form_timeout_s(work))


def place_of(work: ExecutionContext, group: Group) -> MemberAddress:
    """Return this worker's address in the group: host, peer hub and device, as engines need it."""
    host, _ = split_address(work.host.address)
    return MemberAddress(group, work.host.hub, host, work.host.device)


def form_timeout_s(work: ExecutionContext) -> float:
    """Return the longest wait for the connections of a membership, in seconds."""
    return min(FORM_TIMEOUT_S, work.host.exchange_timeout_s)


@contextmanager
def closing_on_failure(
    work: ExecutionContext, view: MemberView, connection: Interruptible | None
) -> Iterator[None]:
    """Have a newer view cut the connection, if there is one; close it when the block fails."""
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
    """Make the exchange that sums by the job's method; it takes the link over."""
    return mesh_exchange(
        buckets,
        link,
        num_shards,
        all_reduce=all_reduce_of(work.job.strategy),
        deadline_s=work.exchange_timeout_s,
        compressor=compressor,
    )
