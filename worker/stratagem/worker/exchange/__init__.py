"""Exchanges of a party: they sum the gradients of logical shards, whichever members compute them.

A gossip exchange instead averages the parameters of neighbours.

Extras: float64 scalars that travel with a step's gradients, in the last bucket.
Set: one copy of all buckets, for the partial sums of some shards.
Launch: declare a bucket final, so that its transfer may begin.
Slice: the elements whose sum, and update, belong to one member.
Window: one of a few buffers that buckets use in turn.
"""

from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.gossip import GossipExchange
from stratagem.worker.exchange.parameter_server import ServerTransport
from stratagem.worker.exchange.reducer import (
    GradientReducer,
    Reducer,
    SingleMemberReducer,
    mesh_exchange,
    server_exchange,
    solo_exchange,
)
from stratagem.worker.exchange.sliced_reducer import sliced_exchange
from stratagem.worker.exchange.transports import StepScalars
from stratagem.worker.mesh.link import ExchangeError

__all__ = [
    "ExchangeError",
    "GossipExchange",
    "GradientBuckets",
    "GradientReducer",
    "Reducer",
    "ServerTransport",
    "SingleMemberReducer",
    "StepScalars",
    "mesh_exchange",
    "server_exchange",
    "sliced_exchange",
    "solo_exchange",
]
