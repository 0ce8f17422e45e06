"""Federated rounds of Flower without training, over its fastest path: a standing gRPC stream.

    python benchmarks/peers/flower_rounds.py server 127.0.0.1:9000 MB ROUNDS CLIENTS
    python benchmarks/peers/flower_rounds.py client 127.0.0.1:9000

`start_server` and `start_client` are deprecated in favour of SuperLink, and answer at once where
that polls. The server prints when it begins, and the end of each round as seconds of the monotonic
clock.
"""

import sys
import time
from typing import Any

import numpy as np
from flwr.client import NumPyClient, start_client
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

NUM_ARRAYS = 10


def arrays(num_bytes: int) -> list[Any]:
    return [np.zeros(num_bytes // 4 // NUM_ARRAYS, np.float32) for _ in range(NUM_ARRAYS)]


class Timed(FedAvg):  # type: ignore[misc]
    def initialize_parameters(self, client_manager: Any) -> Any:
        print("begins", flush=True)
        return super().initialize_parameters(client_manager)

    def aggregate_fit(self, *arguments: Any) -> Any:
        result = super().aggregate_fit(*arguments)
        print("round", time.monotonic(), flush=True)
        return result


class Idle(NumPyClient):  # type: ignore[misc]
    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 32, {}


def serve(address: str, mb: int, rounds: int, clients: int) -> None:
    strategy = Timed(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        min_evaluate_clients=0,
        initial_parameters=ndarrays_to_parameters(arrays(mb * 1_000_000)),
    )
    start_server(server_address=address, config=ServerConfig(num_rounds=rounds), strategy=strategy)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        start_client(server_address=sys.argv[2], client=Idle().to_client())
