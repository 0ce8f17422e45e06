"""Where clients of the next round train is guessed before it opens, to bring the state ahead."""

from typing import Any

import pytest

from stratagem.coordinator.core.effects import AggregateRound
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.strategies.federated.round_decisions import next_trainers
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, start
from tests.coordinator.strategies.open_round import trained

pytestmark = pytest.mark.core

EIGHT: dict[str, Any] = {**FEDERATED, "num_clients": 8, "rounds": 4}
WORKERS = ("a", "b", "c", "d")
PRIVACY = {"clip": {"norm": 8.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}


def guessed(simulation: Simulation) -> set[str] | None:
    """The workers that are guessed where a round is being aggregated."""
    run = simulation.state.runs[RUN]
    if not any(isinstance(effect, AggregateRound) for effect in pending(simulation.state)):
        return None
    return {str(name) for name in next_trainers(run.job, run.value)}


@pytest.mark.parametrize(
    ("changes", "fewer"),
    [
        ({}, False),
        ({"client_selection": {"method": "Random", "fraction": 0.25}}, True),
        (
            {
                "client_selection": {"method": "Random", "fraction": 0.125},
                "options": {"over_select": 1, "strikes": {"limit": 1, "bench_rounds": 1}},
            },
            True,
        ),
        ({"client_selection": {"method": "ByCapability", "required_tags": []}}, False),
    ],
)
def test_the_guess_is_where_they_train(changes: dict[str, Any], fewer: bool) -> None:
    simulation = start(job_text({**EIGHT, **changes}), *WORKERS)
    before, compared = None, []
    while simulation.queue:
        simulation.tell(simulation.queue.popleft())
        if (guess := guessed(simulation)) is not None:
            before = guess
        elif before is not None and (training := trained(simulation)):
            assert {str(effect.member.worker_id) for effect in training} == before
            compared.append(before)
            before = None
    assert len(compared) == EIGHT["rounds"] - 1
    assert any(len(names) < len(WORKERS) for names in compared) == fewer


def test_nobody_is_told_of_a_secret_draw() -> None:
    some = {**EIGHT, "client_selection": {"method": "Random", "fraction": 0.25}}
    simulation = start(job_text(some, privacy=PRIVACY), *WORKERS)
    seen = []
    while simulation.queue:
        simulation.tell(simulation.queue.popleft())
        if (guess := guessed(simulation)) is not None:
            seen.append(guess)
    assert seen
    assert not any(seen)
