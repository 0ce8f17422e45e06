"""Federated rounds without training as Flower is used today: a ServerApp and a ClientApp.

The server appends the end of each round to a file, as seconds of the monotonic clock.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

NUM_ARRAYS = 10

client = ClientApp()
server = ServerApp()


class Noted(FedAvg):  # type: ignore[misc]
    file = Path()

    def aggregate_train(self, *arguments: Any) -> Any:
        result = super().aggregate_train(*arguments)
        with self.file.open("a") as file:
            file.write(f"{time.monotonic()}\n")
        return result


@client.train()  # type: ignore[untyped-decorator]
def train(message: Any, _context: Any) -> Any:
    metrics = MetricRecord({"num-examples": 32})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Any, context: Any) -> None:
    config = context.run_config
    num_elements = config["mb"] * 1_000_000 // 4 // NUM_ARRAYS
    arrays = [np.zeros(num_elements, np.float32) for _ in range(NUM_ARRAYS)]
    strategy = Noted(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    strategy.file = Path(config["ends"])
    strategy.start(grid=grid, initial_arrays=ArrayRecord(arrays), num_rounds=config["rounds"])
