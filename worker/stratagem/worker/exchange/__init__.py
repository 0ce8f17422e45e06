"""Gradient exchange: sums the gradients of logical shards, whichever members compute them.

`GradientBuckets` is the storage, `GradientReducer` the reducer, and a transport carries partial
sums: none (solo), member to member (mesh, or shared where they share memory), or through the
coordinator (server). `GossipExchange` adds nothing up for all: it averages parameters among
neighbours.
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
