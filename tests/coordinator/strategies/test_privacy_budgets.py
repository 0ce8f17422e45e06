"""The privacy budgets of federated runs in the pure core: of clients, accounted before it is spent;
and of rows, which each client accounts for: who can take part, and when a run ends."""

from typing import Any

import pytest

from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import CancelRun, ResumeRun
from stratagem.coordinator.core.effects import AccountRound, AggregateRound, RowsAsked
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, do, opened, rejected, start, trained

pytestmark = pytest.mark.core


PRIVACY = {"clip": {"norm": 8.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}
ROWS = {"unit": "row", "clip": {"norm": 1.0}, "noise_multiplier": 1.0}
TEN = {**FEDERATED, "num_clients": 10, "client_selection": {"method": "Random", "fraction": 0.5}}
THREE = {**FEDERATED, "num_clients": 3}


def private(strategy: Any = FEDERATED, **privacy: Any) -> Simulation:
    return start(job_text(strategy, privacy={**PRIVACY, **privacy}), "a", "b")


def built(strategy: Any = FEDERATED, **privacy: Any) -> tuple[Simulation, AccountRound]:
    """With the model built, the first round not accounted."""
    simulation = private(strategy, **privacy)
    simulation.alone()
    return simulation, simulation.due_one(AccountRound)


def accounted(effect: AccountRound, **changes: Any) -> f.RoundAccounted:
    fact = do(effect).model_copy(update=changes)
    assert isinstance(fact, f.RoundAccounted)
    return fact


def stop(simulation: Simulation) -> None:
    simulation.tell(CancelRun(RUN, "stop"))
    simulation.run()


def test_every_round_is_accounted_before_it_is_opened_and_published_with_what_is_spent() -> None:
    simulation = private()
    simulation.complete()
    in_order = ["RoundAccounted", "ClientsSelected", "SegmentCommitted"]
    assert simulation.kinds(*in_order) == in_order * 3
    commits = simulation.facts(f.SegmentCommitted)
    assert [commit.metrics["privacy.epsilon"] for commit in commits] == [1.0, 2.0, 3.0]
    assert [commit.metrics["privacy.clip_norm"] for commit in commits] == [8.0, 4.0, 2.0]
    assert all(set(commit.metrics) == set(commits[0].metrics) for commit in commits)
    assert not any(name.startswith("train.") for name in commits[0].metrics)
    assert all(closed.by_policy for closed in simulation.facts(f.RoundClosed))
    text = sentence(simulation.facts(f.RoundAccounted)[1])
    assert text == ("round 2: epsilon 2 at delta 1e-05 with it, noise 1 times the clipping norm 4")


@pytest.mark.parametrize("unit", [{}, ROWS], ids=["clients", "rows"])
def test_seeded_noise_can_be_made_again(unit: dict[str, Any]) -> None:
    simulation = private(**unit, noise="seeded")
    simulation.run()
    assert not any(closed.by_policy for closed in simulation.facts(f.RoundClosed))


def test_those_who_were_drawn_train_with_the_norm_of_the_round() -> None:
    simulation, account = built(TEN)
    assert not trained(simulation)
    assert account.candidates == tuple(range(10))
    fact = accounted(account)
    simulation.report(fact)
    assert simulation.fact(f.ClientsSelected).clients == fact.drawn == (1, 3, 5, 7, 9)
    assert {effect.clip_norm for effect in trained(simulation)} == {8.0}
    before = trained(simulation)
    stop(simulation)
    simulation.tell(ResumeRun(RUN))
    assert not simulation.due(AccountRound), "a resumed round keeps its draw and is paid for once"
    assert [each.client for each in trained(simulation)] == [each.client for each in before]
    simulation.run()
    assert len(simulation.facts(f.ClientsSelected)) == 3
    _, account = built(TEN, sampling="fixed")
    assert len(account.candidates) == 5, "the draw is no secret: those who take part"


def test_a_round_without_clients_is_folded_and_spends() -> None:
    simulation, account = built(TEN)
    fact = accounted(account, drawn=())
    simulation.report(fact)
    closed = simulation.fact(f.RoundClosed)
    assert (closed.accepted, closed.reason) == ((), "round 1: 0 of 0 updates")
    assert simulation.status.strategy_phase == "AGGREGATING"
    fold = simulation.due_one(AggregateRound)
    assert fold.privacy == fact
    simulation.report(do(fold))
    after = simulation.due_one(AccountRound)
    assert (after.round_num, after.num_spent, after.clip_norm) == (2, 1, 4.0)


@pytest.mark.parametrize("options", [{}, {"quorum": 2}])
def test_rejected_clients_count_as_nothing_and_end_no_run_without_a_quorum(options: Any) -> None:
    simulation, account = built({**FEDERATED, "options": options})
    simulation.report(do(account))
    simulation.report(*(rejected(effect.client) for effect in trained(simulation)))
    if options:
        assert simulation.phase is RunPhase.FAILED
    else:
        assert simulation.fact(f.RoundClosed).accepted == ()


def test_the_run_ends_before_the_round_that_would_spend_too_much() -> None:
    simulation = private(target={"epsilon": 2.94, "delta": 1e-5})
    simulation.complete()
    expected = "privacy budget: 2 of 2.94 spent, round 3 would cost 3"
    assert simulation.record.reason == f"stopped early after 2 rounds: {expected}"
    assert simulation.fact(f.StoppedEarly).step == 2
    assert len(simulation.facts(f.ClientsSelected)) == 2
    simulation = private(target={"epsilon": 0.5, "delta": 1e-5})
    simulation.run()
    assert simulation.phase is RunPhase.FAILED
    assert simulation.fact(f.RunFailed).reason == (
        "privacy budget: 0 of 0.5 spent, round 1 would cost 1; more noise, or clients drawn more "
        "rarely, cost less"
    )


def test_what_was_spent_stays_spent_when_the_run_goes_back() -> None:
    simulation = private()
    simulation.until(f.SegmentCommitted, 2)
    simulation.until(f.ClientsSelected, 3)
    stop(simulation)
    simulation.tell(ResumeRun(RUN, from_segment=1))
    account = simulation.due_one(AccountRound)
    assert (account.round_num, account.num_spent, account.fingerprint) == (2, 3, "f")
    assert account.clip_norm == 2.0
    simulation.run()
    assert simulation.facts(f.SegmentCommitted)[-1].metrics["privacy.epsilon"] == 5.0


def test_calibrated_noise_stays_that_of_the_first_round() -> None:
    simulation, account = built(noise_multiplier=None, target={"epsilon": 9.0, "delta": 1e-5})
    assert account.noise_multiplier is None
    simulation.report(do(account))
    simulation.run()
    assert {fact.noise_multiplier for fact in simulation.facts(f.RoundAccounted)} == {2.0}


def test_no_round_is_accounted_that_nobody_waits_for_or_an_evaluation_may_end() -> None:
    simulation, account = built()
    simulation.report(do(account))
    assert simulation.refusal(do(account)).reason == "round 1 does not wait to be accounted"
    opened(FEDERATED, "a", "b").refusal(do(account))
    stop = {"metric": "loss", "mode": "min", "patience": 1}
    evaluation = {"split": "test", "metrics": ["accuracy"], "stop": stop}
    simulation = start(job_text(FEDERATED, privacy=PRIVACY, evaluation=evaluation), "a", "b")
    simulation.run()
    assert len(simulation.facts(f.RoundAccounted)) == len(simulation.facts(f.ClientsSelected))


# ---- of rows ----


def protected(epsilon: float | None = None) -> Simulation:
    target = {"delta": 1e-5} if epsilon is None else {"epsilon": epsilon, "delta": 1e-5}
    return private(THREE, **ROWS, target=target)


def open_round(epsilon: float | None = None) -> Simulation:
    """The first one, in which nobody has answered."""
    simulation = protected(epsilon)
    simulation.alone()
    return simulation


def asked(simulation: Simulation) -> dict[int, RowsAsked | None]:
    return {effect.client: effect.rows for effect in trained(simulation)}


def answer(simulation: Simulation, *clients: int, **spent: Any) -> None:
    """Of clients of the open round, as their workers give it; with other costs where they are
    named."""
    for effect in trained(simulation):
        if effect.client in clients:
            fact = do(effect)
            assert isinstance(fact, f.UpdateReceived)
            assert fact.spent is not None
            costs = fact.spent.model_copy(update=spent)
            simulation.report(fact.model_copy(update={"spent": costs}))


def refuse(simulation: Simulation, *clients: int) -> None:
    reason = "privacy budget: 2.9 of 3 spent in 2 rounds, and one more would cost 3.1"
    simulation.report(*(rejected(client, reason, Cause.BUDGET) for client in clients))


def commit(simulation: Simulation) -> None:
    """The closed round."""
    simulation.report(do(simulation.due_one(AggregateRound)))


def test_each_client_is_told_what_it_was_asked_for_before() -> None:
    simulation = open_round()
    assert asked(simulation) == dict.fromkeys(range(3), RowsAsked(0, ""))
    answer(simulation, 0, fingerprint="site 0")
    answer(simulation, 1, 2)
    commit(simulation)
    again = RowsAsked(1, "f")
    assert asked(simulation) == {0: RowsAsked(1, "site 0"), 1: again, 2: again}


def test_clients_are_not_accounted_by_the_coordinator_and_no_loss_is_published() -> None:
    simulation = protected()
    simulation.complete()
    assert not simulation.kinds("RoundAccounted")
    commits = simulation.facts(f.SegmentCommitted)
    assert [commit.metrics["privacy.epsilon"] for commit in commits] == [1.0, 2.0, 3.0]
    assert not any(name.startswith("train.") for each in commits for name in each.metrics)
    assert all(closed.by_policy for closed in simulation.facts(f.RoundClosed))


def test_a_client_whose_next_round_costs_too_much_is_excused() -> None:
    simulation = open_round(3.0)
    answer(simulation, 0, next_epsilon=3.1)
    text = sentence(simulation.fact(f.UpdateReceived))
    assert text == "round 1: client 0 sent its update over 10 samples, loss 0.5, privacy.epsilon 1"
    answer(simulation, 1, next_epsilon=3.0)
    answer(simulation, 2)
    commit(simulation)
    assert sorted(asked(simulation)) == [1, 2]
    (excused,) = simulation.facts(f.ClientsSelected)[-1].excused
    assert (excused.reason, excused.clients) == ("privacy budget spent", (0,))


def test_a_client_that_refuses_is_left_out_and_never_asked_again() -> None:
    simulation = open_round(3.0)
    refuse(simulation, 1)
    answer(simulation, 0, 2)
    assert [accepted.client for accepted in simulation.fact(f.RoundClosed).accepted] == [0, 2]
    commit(simulation)
    assert sorted(asked(simulation)) == [0, 2]


def test_the_run_ends_when_no_client_has_budget_left() -> None:
    simulation = protected(2.5)
    simulation.complete()
    stopped = simulation.fact(f.StoppedEarly)
    assert stopped.step == 2
    assert stopped.reason == (
        "stopped early after 2 rounds: privacy budget: up to 2 of 2.5 spent by a client, and one "
        "more round would cost each of them more"
    )
    simulation = open_round(0.5)
    refuse(simulation, 0, 1, 2)
    assert simulation.phase is RunPhase.FAILED
    reason = simulation.fact(f.RunFailed).reason
    assert reason.startswith("round 1: 0 of 3 updates; 3 refused: privacy budget: 2.9 of 3")


def test_a_client_that_fails_has_paid_for_the_round_and_what_was_spent_stays_spent() -> None:
    simulation = open_round()
    simulation.report(rejected(0, "x", Cause.CRASHED))
    answer(simulation, 1, 2)
    commit(simulation)
    assert asked(simulation)[0] == RowsAsked(1, "")
    stop(simulation)
    simulation.tell(ResumeRun(RUN))
    assert asked(simulation)[0] == RowsAsked(1, ""), "the open round goes on"
    stop(simulation)
    simulation.tell(ResumeRun(RUN, from_segment=0))
    assert asked(simulation) == {0: RowsAsked(2, ""), 1: RowsAsked(2, "f"), 2: RowsAsked(2, "f")}


def test_without_a_target_everybody_goes_on_and_is_counted() -> None:
    simulation = open_round()
    for client in range(3):
        answer(simulation, client, epsilon=90.0 + client, next_epsilon=float("inf"))
    commit(simulation)
    assert len(asked(simulation)) == 3
    assert simulation.facts(f.SegmentCommitted)[-1].metrics["privacy.epsilon"] == 92.0


def test_an_old_journal_has_no_costs_and_a_fact_of_costs_is_read_back() -> None:
    fact = f.UpdateReceived.model_validate_json(
        '{"party": "", "round_num": 1, "client": 0, "digest": "d", "num_samples": 3, '
        '"loss": 1.0, "seconds": 1.0}'
    )
    assert fact.spent is None
    withheld = fact.model_copy(update={"loss": float("nan")})
    assert sentence(withheld) == "round 1: client 0 sent its update over 3 samples"
    costs = f.RowsSpent(epsilon=1.0, next_epsilon=float("inf"), fingerprint="f", accountant="a")
    written = fact.model_copy(update={"spent": costs}).model_dump_json()
    assert f.UpdateReceived.model_validate_json(written).spent == costs
