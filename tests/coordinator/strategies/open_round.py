"""A federated run with an open round, and the clients that train in it."""

from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.state_machine.pending_effects import pending
from tests.coordinator.core.jobs import job_text
from tests.coordinator.core.simulation import (
    Simulation,
    start,
)


def trained(simulation: Simulation) -> list[TrainClient]:
    due = [e for e in pending(simulation.state) if isinstance(e, TrainClient)]
    return sorted(due, key=lambda e: e.client)


def opened(strategy: dict[str, object], *workers: str, **changes: object) -> Simulation:
    """A federated run whose first round is open and in which nobody has answered."""
    simulation = start(job_text(strategy, **changes), *workers)
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    return simulation
