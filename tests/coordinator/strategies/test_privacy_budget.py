"""The privacy budget of a federated run in the pure core: accounted before it is spent."""

from typing import Any

import pytest

from stratagem.coordinator.core.commands import CancelRun, Refusal, Report, ResumeRun
from stratagem.coordinator.core.effects import AccountRound, AggregateRound
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    ClientsSelected,
    RoundAccounted,
    RoundClosed,
    RunFailed,
    SegmentCommitted,
    StoppedEarly,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.pending_effects import pending
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, do, phase, start
from tests.coordinator.strategies.open_round import opened, trained

pytestmark = pytest.mark.core

PRIVACY = {"clip": {"norm": 8.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}
TEN = {**FEDERATED, "num_clients": 10, "client_selection": {"method": "Random", "fraction": 0.5}}


def private(strategy: Any = FEDERATED, **privacy: Any) -> Simulation:
    return start(job_text(strategy, privacy={**PRIVACY, **privacy}), "a", "b")


def due(simulation: Simulation, kind: type[Any]) -> list[Any]:
    return [effect for effect in pending(simulation.state) if isinstance(effect, kind)]


def built(simulation: Simulation) -> Simulation:
    """With the model built, the first round not accounted."""
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    return simulation


def test_every_round_is_accounted_before_it_is_opened_and_published_with_what_is_spent() -> None:
    simulation = private()
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    in_order = ["RoundAccounted", "ClientsSelected", "SegmentCommitted"]
    assert [kind for _, kind, _, _ in simulation.journal if kind in in_order] == in_order * 3
    commits = simulation.facts(SegmentCommitted)
    assert [commit.metrics["privacy.epsilon"] for commit in commits] == [1.0, 2.0, 3.0]
    assert [commit.metrics["privacy.clip_norm"] for commit in commits] == [8.0, 4.0, 2.0]
    assert all(set(commit.metrics) == set(commits[0].metrics) for commit in commits)
    assert not any(name.startswith("train.") for name in commits[0].metrics)
    assert all(closed.by_policy for closed in simulation.facts(RoundClosed))
    text = sentence(simulation.facts(RoundAccounted)[1])
    assert text == ("round 2: epsilon 2 at delta 1e-05 with it, noise 1 times the clipping norm 4")


def test_seeded_noise_can_be_made_again() -> None:
    simulation = private(noise="seeded")
    simulation.run()
    assert not any(closed.by_policy for closed in simulation.facts(RoundClosed))


def test_those_who_were_drawn_train_with_the_norm_of_the_round() -> None:
    simulation = built(private(TEN))
    assert not trained(simulation)
    (account,) = due(simulation, AccountRound)
    assert account.candidates == tuple(range(10))
    fact = do(account)[0]
    assert isinstance(fact, RoundAccounted)
    simulation.tell(Report(RUN, fact))
    (selected,) = simulation.facts(ClientsSelected)
    assert selected.clients == fact.drawn == (1, 3, 5, 7, 9)
    assert {effect.clip_norm for effect in trained(simulation)} == {8.0}


def test_where_the_draw_is_no_secret_those_who_take_part_are_the_candidates() -> None:
    simulation = built(private(TEN, sampling="fixed"))
    (account,) = due(simulation, AccountRound)
    assert len(account.candidates) == 5


def test_a_round_without_clients_is_folded_and_spends() -> None:
    simulation = built(private(TEN))
    (account,) = due(simulation, AccountRound)
    fact = do(account)[0]
    assert isinstance(fact, RoundAccounted)
    simulation.tell(Report(RUN, fact.model_copy(update={"drawn": ()})))
    (closed,) = simulation.facts(RoundClosed)
    assert closed.accepted == ()
    assert closed.reason == "round 1: 0 of 0 updates"
    run = simulation.state.runs[RUN]
    shown = run.strategy.status(run.job, run.value, world_of(simulation.state))
    assert shown.strategy_phase == "AGGREGATING"
    (fold,) = due(simulation, AggregateRound)
    assert fold.privacy == fact.model_copy(update={"drawn": ()})
    simulation.tell(Report(RUN, do(fold)[0]))
    (after,) = due(simulation, AccountRound)
    assert (after.round_num, after.num_spent, after.clip_norm) == (2, 1, 4.0)


def test_rejected_clients_count_as_nothing_and_end_no_round() -> None:
    simulation = built(private())
    simulation.tell(Report(RUN, do(due(simulation, AccountRound)[0])[0]))
    for effect in trained(simulation):
        rejected = UpdateRejected(
            party=effect.party,
            round_num=1,
            client=effect.client,
            reason="KeyError: 'x'",
            cause=Cause.EXCEPTION,
        )
        simulation.tell(Report(RUN, rejected))
    (closed,) = simulation.facts(RoundClosed)
    assert closed.accepted == ()


def test_a_quorum_still_ends_a_run_whose_clients_fail() -> None:
    simulation = built(private({**FEDERATED, "options": {"quorum": 2}}))
    simulation.tell(Report(RUN, do(due(simulation, AccountRound)[0])[0]))
    for effect in trained(simulation):
        rejected = UpdateRejected(
            party=effect.party, round_num=1, client=effect.client, reason="x", cause=Cause.EXCEPTION
        )
        simulation.tell(Report(RUN, rejected))
    assert phase(simulation) is RunPhase.FAILED


def test_the_run_ends_before_the_round_that_would_spend_too_much() -> None:
    simulation = private(target={"epsilon": 2.94, "delta": 1e-5})
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    expected = "privacy budget: 2 of 2.94 spent, round 3 would cost 3"
    assert simulation.state.runs[RUN].reason == f"stopped early after 2 rounds: {expected}"
    (stopped,) = simulation.facts(StoppedEarly)
    assert stopped.step == 2
    assert len(simulation.facts(ClientsSelected)) == 2


def test_a_budget_that_no_round_fits_fails_the_run_with_what_would_help() -> None:
    simulation = private(target={"epsilon": 0.5, "delta": 1e-5})
    simulation.run()
    assert phase(simulation) is RunPhase.FAILED
    (failed,) = simulation.facts(RunFailed)
    assert failed.reason == (
        "privacy budget: 0 of 0.5 spent, round 1 would cost 1; more noise, or clients drawn more "
        "rarely, cost less"
    )


def test_what_was_spent_stays_spent_when_the_run_goes_back() -> None:
    simulation = private()
    while len(simulation.facts(SegmentCommitted)) < 2:
        simulation.tell(simulation.queue.popleft())
    while len(simulation.facts(ClientsSelected)) < 3:
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN, "stop"))
    simulation.run()
    assert not isinstance(simulation.tell(ResumeRun(RUN, from_segment=1)), Refusal)
    (account,) = due(simulation, AccountRound)
    assert (account.round_num, account.num_spent, account.fingerprint) == (2, 3, "f")
    assert account.clip_norm == 2.0
    simulation.run()
    assert simulation.facts(SegmentCommitted)[-1].metrics["privacy.epsilon"] == 5.0


def test_a_resumed_round_keeps_its_draw_and_is_paid_for_once() -> None:
    simulation = built(private(TEN))
    simulation.tell(Report(RUN, do(due(simulation, AccountRound)[0])[0]))
    before = [effect.client for effect in trained(simulation)]
    simulation.tell(CancelRun(RUN, "stop"))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    assert not due(simulation, AccountRound)
    assert [effect.client for effect in trained(simulation)] == before
    simulation.run()
    assert len(simulation.facts(ClientsSelected)) == 3


def test_calibrated_noise_stays_that_of_the_first_round() -> None:
    simulation = built(private(noise_multiplier=None, target={"epsilon": 9.0, "delta": 1e-5}))
    (account,) = due(simulation, AccountRound)
    assert account.noise_multiplier is None
    simulation.tell(Report(RUN, do(account)[0]))
    simulation.run()
    facts = simulation.facts(RoundAccounted)
    assert {fact.noise_multiplier for fact in facts} == {2.0}


def test_an_account_that_nobody_waits_for_is_refused() -> None:
    simulation = built(private())
    fact = do(due(simulation, AccountRound)[0])[0]
    simulation.tell(Report(RUN, fact))
    again = simulation.tell(Report(RUN, fact))
    assert isinstance(again, Refusal)
    assert again.reason == "round 1 does not wait to be accounted"
    other = opened(FEDERATED, "a", "b")
    assert isinstance(other.tell(Report(RUN, fact)), Refusal)


def test_no_round_is_accounted_while_an_evaluation_may_end_the_run() -> None:
    evaluation = {
        "split": "test",
        "metrics": ["accuracy"],
        "stop": {"metric": "loss", "mode": "min", "patience": 1},
    }
    text = job_text(FEDERATED, privacy=PRIVACY, evaluation=evaluation)
    simulation = start(text, "a", "b")
    simulation.run()
    assert len(simulation.facts(RoundAccounted)) == len(simulation.facts(ClientsSelected))
