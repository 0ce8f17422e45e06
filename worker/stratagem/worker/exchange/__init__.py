"""The exchange of a party sums the gradients of logical shards, whichever members compute them.

A gossip exchange instead averages the parameters of neighbours.
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
