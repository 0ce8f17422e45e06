"""What is foreseen is what happens, if nothing else does."""

from dataclasses import replace

import pytest

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.commands import CancelRun, Report
from stratagem.coordinator.core.effects import AggregateRound, TrainClient
from stratagem.coordinator.core.facts import ROOT, Noted, RunSubmitted, UpdateReceived
from stratagem.coordinator.core.state_machine import speculative_effects
from stratagem.coordinator.core.state_machine.apply import apply
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.core.state_machine.speculative_effects import foreseen
from stratagem.coordinator.strategies.synchronous.local import STRATEGY as local
from tests.coordinator.core.jobs import FEDERATED, LOCAL, job
from tests.coordinator.core.raising_strategies import with_local
from tests.coordinator.core.simulation import RUN, Simulation, do, start

pytestmark = pytest.mark.core


def updates(simulation: Simulation) -> list[UpdateReceived]:
    """What the clients that are due will have sent."""
    due = [each for each in pending(simulation.state) if isinstance(each, TrainClient)]
    facts = [fact for each in sorted(due, key=lambda e: e.client) for fact in do(each)]
    return [fact for fact in facts if isinstance(fact, UpdateReceived)]


def opened() -> Simulation:
    simulation = start(job(FEDERATED), "a", "b")
    while not updates(simulation):
        simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    return simulation


@pytest.mark.parametrize("num_known", [0, 1, 3])
def test_foreseen_is_what_the_reports_lead_to(num_known: int) -> None:
    simulation = opened()
    facts = updates(simulation)
    assert len(facts) > num_known
    before = simulation.state
    for fact in facts[:num_known]:
        simulation.tell(Report(RUN, fact))
    # Those that are known by now are stale, and do no harm.
    ahead = foreseen(simulation.state, world_of(before), RUN, facts, simulation.now_s)
    for fact in facts[num_known:]:
        simulation.tell(Report(RUN, fact))
    assert ahead == pending(simulation.state)
    assert any(isinstance(effect, AggregateRound) for effect in ahead)


def test_nothing_is_foreseen_of_a_run_that_has_ended() -> None:
    simulation = opened()
    facts = updates(simulation)
    simulation.tell(CancelRun(RUN))
    assert not foreseen(simulation.state, world_of(simulation.state), RUN, facts, 0.0)
    assert not foreseen(simulation.state, world_of(simulation.state), RunId("run"), facts, 0.0)


def test_nothing_is_foreseen_of_a_strategy_that_decides_in_a_circle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its run fails once it is asked in earnest; until then nothing is begun for it."""
    simulation = start(job(LOCAL), "a")
    monkeypatch.setattr(speculative_effects, "MAX_DECISIONS", 3)
    noted = Noted(party=ROOT, kind="again", data={})
    endless = with_local(replace(local, decide=lambda *_: noted))
    circling = Simulation(endless)
    circling.state = apply(circling.state, RUN, RunSubmitted(job_json=job(LOCAL), wall_s=0.0), 0.0)
    assert foreseen(circling.state, world_of(circling.state), RUN, [], 0.0) == frozenset()
    assert foreseen(simulation.state, world_of(simulation.state), RUN, [], 0.0)
