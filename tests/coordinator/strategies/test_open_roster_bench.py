"""Open rosters in the pure core: clients evaluate, fail, sit on the bench, and are refused."""

from typing import Any

import pytest

from stratagem.common.base.text import without_spreads
from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import (
    FEDERATED,
    POPULATION_SECTIONS,
    job_text,
    population,
    refusal,
)
from tests.coordinator.core.simulation import RUN, do
from tests.coordinator.strategies.open_rosters import (
    EVALUATION,
    answer,
    begun,
    deadline,
    evaluate,
    fail,
    federation,
    later,
    leave,
    selected,
)

pytestmark = pytest.mark.core


# ---- evaluation ----


def test_an_evaluation_goes_on_without_a_client_that_has_left() -> None:
    simulation = begun("abc", federation(rounds=2), evaluation=EVALUATION)
    answer(simulation, 0, 1, 2)
    leave(simulation, "c")
    said = simulation.fact(f.ClientEvaluated)
    assert (said.client, said.has_left) == (2, True)
    assert said.reason == "it has left: its worker was stopped"
    evaluate(simulation)
    done = simulation.fact(f.Evaluated)
    assert done.without == ()
    assert without_spreads(done.metrics) == {"test.loss": 2.0}
    answer(simulation, 0, 1)
    simulation.lose("a")
    evaluate(simulation)
    assert simulation.record.ended is None
    later(simulation, 60.0)
    assert simulation.record.ended is RunPhase.COMPLETED
    assert len(simulation.facts(f.Evaluated)) == 2


def test_the_lost_are_awaited_to_evaluate_and_nobody_is_where_all_have_left() -> None:
    simulation = begun("ab", federation(rounds=1), evaluation=EVALUATION)
    answer(simulation, 0)
    simulation.lose("a")
    answer(simulation, 1)
    evaluate(simulation)
    assert deadline(simulation) == 60.0
    simulation.sites("a", 1)
    assert deadline(simulation) is None
    evaluate(simulation)
    assert simulation.record.ended is RunPhase.COMPLETED
    simulation = begun("ab", federation(rounds=1), evaluation=EVALUATION)
    answer(simulation, 0, 1)
    leave(simulation, "ab")
    done = simulation.fact(f.Evaluated)
    assert (done.without, done.metrics) == ((0, 1), {})
    assert sentence(done) == "segment 1 evaluated by nobody: all its clients have left"
    assert simulation.record.ended is RunPhase.COMPLETED


def test_early_stop_follows_the_evaluations_of_those_that_are_there() -> None:
    evaluation = {**EVALUATION, "stop": {"metric": "loss", "mode": "min", "patience": 1}}
    simulation = begun("ab", federation(rounds=9), evaluation=evaluation)
    for _ in range(2):
        answer(simulation, 0, 1)
        evaluate(simulation)
    reason = simulation.fact(f.StoppedEarly).reason
    assert reason.startswith("stopped early after 2 rounds: test.loss has not improved")


# ---- the bench ----


def striking(num_clients: int = 2, limit: int = 2, **options: Any) -> dict[str, Any]:
    strikes = {"strikes": {"limit": limit, "bench_rounds": 2}}
    return {**FEDERATED, "num_clients": num_clients, "rounds": 8, "options": strikes | options}


def test_failures_in_a_row_put_a_client_on_the_bench() -> None:
    simulation = begun("ab", striking())
    for _ in range(2):
        answer(simulation, 0)
        fail(simulation, 1)
    benched = simulation.fact(f.ClientBenched)
    assert (benched.client, benched.until_round) == (1, 5)
    assert sentence(benched) == (
        "client 1 takes no part until round 5: rejected in 2 rounds in a row: exception"
    )
    opened = simulation.facts(f.ClientsSelected)[-1]
    assert opened.clients == (0,)
    assert opened.excused == (f.Excused(reason="benched until round 5", clients=(1,)),)
    assert simulation.record.is_reproducible, "the failures of the job's own decide it"
    simulation.crash()
    simulation.queue.clear()
    back = simulation.fork()
    answer(simulation, 0)
    answer(simulation, 0)
    assert selected(simulation)[-1] == (5, (0, 1))
    fail(simulation, 1)
    answer(simulation, 0)
    answer(simulation, 0, 1)  # which ends the row
    fail(simulation, 1)
    answer(simulation, 0)
    assert len(simulation.facts(f.ClientBenched)) == 1
    assert [clients for _, clients in selected(simulation)] == [
        (0, 1), (0, 1), (0,), (0,), (0, 1), (0, 1), (0, 1), (0, 1),
    ]  # fmt: skip
    answer(back, 0)
    back.tell(c.CancelRun(RUN))
    back.run()
    back.tell(c.ResumeRun(RUN, from_segment=2))
    assert not back.record.value.attendance.benched, "an earlier commit forgets strikes"
    assert not back.record.is_reproducible


def test_a_failure_made_good_is_no_strike_and_benched_clients_do_not_count_as_here() -> None:
    simulation = begun("a", striking(1, 1, on_missing_quorum="wait"))
    fail(simulation, 0)
    simulation.sites("a", 1)
    answer(simulation, 0)
    assert selected(simulation)[-1] == (2, (0,))
    assert not simulation.facts(f.ClientBenched)
    simulation = begun("ab", federation(rounds=9, strikes={"limit": 1, "bench_rounds": 2}))
    answer(simulation, 0)
    fail(simulation, 1)
    assert simulation.reason == "round 2: 1 of 2 sites; benched until round 4: client 1 (b)"
    simulation.sites("c")
    assert selected(simulation)[-1] == (2, (0, 2))


def test_a_resumption_asks_whoever_is_here() -> None:
    simulation = begun("ab", federation(rounds=4))
    answer(simulation, 0)
    fail(simulation, 1, cause=Cause.OUTSIDE_WINDOW)
    for segment in (None, 1):
        simulation.tell(c.CancelRun(RUN))
        simulation.report(*map(do, pending(simulation.state)))
        simulation.tell(c.ResumeRun(RUN, from_segment=segment))
        answer(simulation, 0, 1)
    while simulation.record.ended is None:
        answer(simulation, 0, 1)
    assert simulation.record.ended is RunPhase.COMPLETED
    simulation.crash()


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (federation(inner={"type": "Local"}), "who joins an open roster is one"),
        (federation(roster={"min_clients": 9}), "min_clients: 9 is more than num_clients, 5"),
        (
            {**FEDERATED, "options": {"roster": {"open": False, "wait_s": 5.0}}},
            "belongs to an open roster",
        ),
        (federation(quorum=3), "a round could not close"),
        (federation(robust={"name": "median"}), "roster.min_clients: 2 is less than the 3 updates"),
        (federation(strikes={"limit": 2}, on_client_error="fail"), "no client fails twice"),
        (population(inner=federation(rounds=5)), "roster.open: inside another strategy"),
    ],
)
def test_what_is_not_defined_is_refused_at_submit(strategy: dict[str, Any], said: str) -> None:
    sections = POPULATION_SECTIONS if strategy["type"] == "PopulationBased" else {}
    assert said in refusal(job_text(strategy, **sections))
