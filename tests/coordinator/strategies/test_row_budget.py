"""The budgets of clients whose rows are protected, in the pure core: who can take part, and when a
run ends."""

from typing import Any

import pytest

from stratagem.coordinator.core.commands import CancelRun, Report, ResumeRun
from stratagem.coordinator.core.effects import AccountRound, RowsAsked
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    ClientsSelected,
    RoundClosed,
    RowsSpent,
    RunFailed,
    SegmentCommitted,
    StoppedEarly,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import pending
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, do, phase, start
from tests.coordinator.strategies.open_round import trained

pytestmark = pytest.mark.core

THREE = {**FEDERATED, "num_clients": 3}
ROWS = {"unit": "row", "clip": {"norm": 1.0}, "noise_multiplier": 1.0}


def protected(epsilon: float | None = None, **more: Any) -> Simulation:
    target = {"delta": 1e-5} if epsilon is None else {"epsilon": epsilon, "delta": 1e-5}
    return start(job_text(THREE, privacy={**ROWS, **more, "target": target}), "a", "b")


def asked(simulation: Simulation) -> dict[int, RowsAsked | None]:
    return {effect.client: effect.rows for effect in trained(simulation)}


def open_round(simulation: Simulation) -> Simulation:
    """The first one, in which nobody has answered."""
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    return simulation


def answer(simulation: Simulation, client: int, **spent: Any) -> None:
    """Of a client of the open round, as its worker gives it; with other costs where they are
    named."""
    (effect,) = (effect for effect in trained(simulation) if effect.client == client)
    fact = do(effect)[0]
    assert isinstance(fact, UpdateReceived)
    assert fact.spent is not None
    costs = fact.spent.model_copy(update=spent)
    simulation.tell(Report(RUN, fact.model_copy(update={"spent": costs})))


def refuse(simulation: Simulation, client: int) -> None:
    (effect,) = (effect for effect in trained(simulation) if effect.client == client)
    reason = "privacy budget: 2.9 of 3 spent in 2 rounds, and one more would cost 3.1"
    fact = UpdateRejected(
        party=effect.party,
        round_num=effect.round_num,
        client=client,
        reason=reason,
        cause=Cause.BUDGET,
    )
    simulation.tell(Report(RUN, fact))


def commit(simulation: Simulation) -> None:
    """The closed round."""
    (fold,) = (e for e in pending(simulation.state) if type(e).__name__ == "AggregateRound")
    simulation.tell(Report(RUN, do(fold)[0]))


def test_each_client_is_told_what_it_was_asked_for_before() -> None:
    simulation = open_round(protected())
    assert asked(simulation) == dict.fromkeys(range(3), RowsAsked(0, ""))
    answer(simulation, 0, fingerprint="site 0")
    for client in (1, 2):
        answer(simulation, client)
    commit(simulation)
    assert asked(simulation) == {
        0: RowsAsked(1, "site 0"),
        1: RowsAsked(1, "f"),
        2: RowsAsked(1, "f"),
    }


def test_clients_are_not_accounted_by_the_coordinator_and_no_loss_is_published() -> None:
    simulation = protected()
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    assert not any(kind == "RoundAccounted" for _, kind, _, _ in simulation.journal)
    commits = simulation.facts(SegmentCommitted)
    assert [commit.metrics["privacy.epsilon"] for commit in commits] == [1.0, 2.0, 3.0]
    assert not any(name.startswith("train.") for each in commits for name in each.metrics)
    assert all(closed.by_policy for closed in simulation.facts(RoundClosed))
    assert not any(isinstance(effect, AccountRound) for effect in pending(simulation.state))


def test_seeded_noise_can_be_made_again() -> None:
    simulation = protected(noise="seeded")
    simulation.run()
    assert not any(closed.by_policy for closed in simulation.facts(RoundClosed))


def test_a_client_whose_next_round_costs_too_much_is_excused() -> None:
    simulation = open_round(protected(3.0))
    answer(simulation, 0, next_epsilon=3.1)
    text = sentence(simulation.facts(UpdateReceived)[0])
    assert text == (
        "round 1: client 0 sent its update over 10 samples, loss 0.5, privacy.epsilon 1"
    )
    answer(simulation, 1, next_epsilon=3.0)
    answer(simulation, 2)
    commit(simulation)
    assert sorted(asked(simulation)) == [1, 2]
    (excused,) = simulation.facts(ClientsSelected)[-1].excused
    assert (excused.reason, excused.clients) == ("privacy budget spent", (0,))


def test_a_client_that_refuses_is_left_out_and_never_asked_again() -> None:
    simulation = open_round(protected(3.0))
    refuse(simulation, 1)
    for client in (0, 2):
        answer(simulation, client)
    (closed,) = simulation.facts(RoundClosed)
    assert [accepted.client for accepted in closed.accepted] == [0, 2]
    commit(simulation)
    assert sorted(asked(simulation)) == [0, 2]


def test_the_run_ends_when_no_client_has_budget_left() -> None:
    simulation = protected(2.5)
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    (stopped,) = simulation.facts(StoppedEarly)
    assert stopped.step == 2
    assert stopped.reason == (
        "stopped early after 2 rounds: privacy budget: up to 2 of 2.5 spent by a client, and one "
        "more round would cost each of them more"
    )


def test_a_first_round_that_every_client_refuses_fails_the_run_with_the_reason() -> None:
    simulation = open_round(protected(0.5))
    for client in range(3):
        refuse(simulation, client)
    assert phase(simulation) is RunPhase.FAILED
    (failed,) = simulation.facts(RunFailed)
    assert failed.reason.startswith("round 1: 0 of 3 updates; 3 refused: privacy budget: 2.9 of 3")


def test_a_client_that_fails_has_paid_for_the_round_and_what_was_spent_stays_spent() -> None:
    simulation = open_round(protected())
    (effect, *_) = trained(simulation)
    rejected = UpdateRejected(
        party=effect.party, round_num=1, client=0, reason="x", cause=Cause.CRASHED
    )
    simulation.tell(Report(RUN, rejected))
    for client in (1, 2):
        answer(simulation, client)
    commit(simulation)
    assert asked(simulation)[0] == RowsAsked(1, "")
    simulation.tell(CancelRun(RUN, "stop"))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    assert asked(simulation)[0] == RowsAsked(1, ""), "the open round goes on"
    simulation.tell(CancelRun(RUN, "stop"))
    simulation.run()
    simulation.tell(ResumeRun(RUN, from_segment=0))
    assert asked(simulation) == {0: RowsAsked(2, ""), 1: RowsAsked(2, "f"), 2: RowsAsked(2, "f")}


def test_without_a_target_everybody_goes_on_and_is_counted() -> None:
    simulation = open_round(protected())
    for client in range(3):
        answer(simulation, client, epsilon=90.0 + client, next_epsilon=float("inf"))
    commit(simulation)
    assert len(asked(simulation)) == 3
    assert simulation.facts(SegmentCommitted)[-1].metrics["privacy.epsilon"] == 92.0


def test_an_old_journal_has_no_costs_and_a_fact_of_costs_is_read_back() -> None:
    fact = UpdateReceived.model_validate_json(
        '{"party": "", "round_num": 1, "client": 0, "digest": "d", "num_samples": 3, '
        '"loss": 1.0, "seconds": 1.0}'
    )
    assert fact.spent is None
    withheld = fact.model_copy(update={"loss": float("nan")})
    assert sentence(withheld) == "round 1: client 0 sent its update over 3 samples"
    costs = RowsSpent(epsilon=1.0, next_epsilon=float("inf"), fingerprint="f", accountant="a")
    written = fact.model_copy(update={"spent": costs}).model_dump_json()
    assert UpdateReceived.model_validate_json(written).spent == costs
