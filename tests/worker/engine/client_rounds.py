"""Federated jobs, and their rounds by hand."""

from typing import Any

from torch import Tensor

from stratagem.worker.federated.client_trainer import ClientRunner
from tests.jobs import job
from tests.reference.loops import federated_loop
from tests.worker.engine.support import ALLOWED, CPU, assert_same_bits, trainer_of

FEDAVG = {"method": "FedAvg"}


def federated(
    model: str | dict[str, Any] = "mlp",
    *,
    num_clients: int = 3,
    rounds: int = 3,
    aggregation: dict[str, Any] = FEDAVG,
    local_epochs: int = 1,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    strategy = {
        "type": "Federated",
        "num_clients": num_clients,
        "rounds": rounds,
        "aggregation": aggregation,
        "client_selection": {"method": "All"},
        "options": {"local_epochs": local_epochs, **(options or {})},
    }
    return job(model, strategy=strategy, **changes)


def run(spec: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The strategy by hand, with client rounds of the engine."""
    state = {name: t for name, t in trainer_of(spec).copy_state()[0].items() if "model/" in name}
    runner = ClientRunner(spec, ALLOWED, CPU)
    losses = []
    for round_num in range(1, spec.strategy.rounds + 1):
        num_clients = spec.strategy.num_clients
        updates = [runner.run(state, c, num_clients, round_num) for c in range(num_clients)]
        total = sum(update.num_samples for update in updates)
        largest = max(updates, key=lambda update: update.num_samples)
        state = {
            name: (
                sum(u.tensors[name].double() * u.num_samples for u in updates) / total  # type: ignore[union-attr]
            ).to(tensor.dtype)
            if tensor.is_floating_point()
            else largest.tensors[name]
            for name, tensor in state.items()
        }
        losses.append(sum(u.loss * u.num_samples for u in updates) / total)
    return {name.removeprefix("model/"): tensor for name, tensor in state.items()}, losses


def assert_clients_equal_loop(spec: Any) -> None:
    """All rounds have the losses and the bits of the federated loop."""
    state, losses = run(spec)
    expected = federated_loop(spec, ALLOWED)
    assert_same_bits(state, dict(expected.state))
    assert losses == expected.losses
