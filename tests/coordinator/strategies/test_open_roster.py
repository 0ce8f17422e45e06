"""Open rosters in the pure core: clients join, leave, return, are awaited and sit on the bench."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job.evaluation.client_spread import without_spreads
from stratagem.coordinator.core.commands import (
    CancelRun,
    DrainWorker,
    ForgetWorkers,
    LeaveWorker,
    LoseWorker,
    Refusal,
    Report,
    ResumeRun,
    SubmitRun,
    Tick,
)
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    ROOT,
    ClientBenched,
    ClientEvaluated,
    ClientLeft,
    ClientsJoined,
    ClientsSelected,
    Evaluated,
    Excused,
    RoundClosed,
    RoundWaits,
    RunFailed,
    StoppedEarly,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import RunPhase, RunRecord
from stratagem.coordinator.core.state_machine.pending_effects import pending
from tests.coordinator.core.ask_every_run import next_deadline
from tests.coordinator.core.jobs import (
    FEDERATED,
    POPULATION_SECTIONS,
    check_at_submit,
    job_text,
    population,
)
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    do,
    member,
    phase,
    reason,
    register,
    start,
)
from tests.coordinator.strategies.open_round import trained

pytestmark = pytest.mark.core

WARD = {"worker_local": "ward"}


def federation(num_clients: int = 5, rounds: int = 3, **options: Any) -> dict[str, Any]:
    roster = {"open": True, "min_clients": 2, "wait_s": 60.0} | options.pop("roster", {})
    options = {"roster": roster, **options}
    return {**FEDERATED, "num_clients": num_clients, "rounds": rounds, "options": options}


def begun(*workers: str, strategy: dict[str, Any] | None = None, **changes: Any) -> Simulation:
    """A federation of sites whose first round is open where they are enough, and nobody has
    answered."""
    changes = {"data": WARD} | changes
    changes = {name: value for name, value in changes.items() if value is not None}
    simulation = Simulation()
    for name in workers:
        here(simulation, name)
    simulation.tell(SubmitRun(RUN, job_text(strategy or federation(), **changes), 0.0))
    while simulation.queue and not simulation.facts(ClientsSelected):
        simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    return simulation


def here(simulation: Simulation, name: str, start: int = 0, **capability: Any) -> None:
    simulation.tell(register(name, start, local_data=("ward",), **capability))


def run_of(simulation: Simulation) -> RunRecord:
    run = simulation.state.runs[RUN]
    assert isinstance(run, RunRecord)
    return run


def round_num(simulation: Simulation) -> int:
    number: int = run_of(simulation).value.round_num
    return number


def answer(simulation: Simulation, *clients: int) -> None:
    """These clients of the open round send their updates; the round is folded if it closes."""
    for effect in trained(simulation):
        if effect.client in clients:
            simulation.tell(Report(RUN, do(effect)[0]))
    fold(simulation)


def fold(simulation: Simulation) -> None:
    """Let the fold of a closed round happen, and its evaluation, and nothing else."""
    simulation.seen = set()
    simulation.queue.clear()
    while run_of(simulation).value.accepted:
        effects = [e for e in pending(simulation.state) if type(e).__name__ == "AggregateRound"]
        simulation.tell(Report(RUN, do(effects[0])[0]))
    simulation.queue.clear()


def fail(simulation: Simulation, client: int, cause: Cause = Cause.EXCEPTION) -> object:
    fact = UpdateRejected(
        party=ROOT, round_num=round_num(simulation), client=client, reason=cause.value, cause=cause
    )
    said = simulation.tell(Report(RUN, fact))
    fold(simulation)
    return said


def roster(simulation: Simulation) -> dict[int, str]:
    return {b.client: b.worker_id for b in run_of(simulation).value.roster}


def selected(simulation: Simulation) -> list[tuple[int, tuple[int, ...]]]:
    return [(fact.round_num, fact.clients) for fact in simulation.facts(ClientsSelected)]


def later(simulation: Simulation, seconds: float) -> None:
    simulation.now_s += seconds
    simulation.tell(Tick())


def test_numbers_are_the_order_of_joining_and_stay() -> None:
    simulation = begun("m", "z", strategy=federation(rounds=5))
    assert roster(simulation) == {0: "m", 1: "z"}
    here(simulation, "a")  # while a round is open: it takes part in the next one
    assert selected(simulation) == [(1, (0, 1))]
    answer(simulation, 0, 1)
    assert roster(simulation) == {0: "m", 1: "z", 2: "a"}
    simulation.tell(LeaveWorker(member("m"), "stopped"))
    answer(simulation, 1, 2)
    assert [fact.client for fact in simulation.facts(ClientLeft)] == [0]
    here(simulation, "b")
    answer(simulation, 1, 2)
    here(simulation, "m", 1, tags=("new",))
    answer(simulation, 1, 2, 3)
    assert selected(simulation) == [
        (1, (0, 1)), (2, (0, 1, 2)), (3, (1, 2)), (4, (1, 2, 3)), (5, (0, 1, 2, 3)),
    ]  # fmt: skip
    assert roster(simulation) == {0: "m", 1: "z", 2: "a", 3: "b"}
    back = simulation.facts(ClientsJoined)[-1]
    assert back.clients[0].tags == ("new",)
    assert sentence(back) == "joined: client 0 (m)"
    answer(simulation, 0, 1, 2, 3)
    run = run_of(simulation)
    assert run.ended is RunPhase.COMPLETED
    assert not run.is_reproducible, "who was there when has decided"
    simulation.crash()
    assert run_of(simulation) == run


def test_no_more_than_num_clients_join_and_numbers_are_not_given_twice() -> None:
    simulation = begun("a", "b", strategy=federation(num_clients=3, rounds=9))
    here(simulation, "c")
    here(simulation, "d")
    answer(simulation, 0, 1)
    assert roster(simulation) == {0: "a", 1: "b", 2: "c"}
    simulation.tell(LeaveWorker(member("c"), "stopped"))
    answer(simulation, 0, 1)
    answer(simulation, 0, 1)
    assert roster(simulation) == {0: "a", 1: "b", 2: "c"}, "the place of c is kept for it"


def test_many_join_at_once_with_few_facts() -> None:
    simulation = begun("a", "b", strategy=federation(num_clients=1102))
    for number in range(1100):
        here(simulation, f"s{number:04}")
    answer(simulation, 0, 1)
    assert [len(fact.clients) for fact in simulation.facts(ClientsJoined)] == [2, 1000, 100]
    opened = simulation.facts(ClientsSelected)[-1]
    assert len(opened.clients) == 1102
    last = simulation.facts(ClientsJoined)[1]
    assert sentence(last).endswith("client 9 (s0007) and 992 more")


def test_too_few_wait_and_the_run_fails_after_its_time() -> None:
    simulation = begun("a")
    assert (phase(simulation), reason(simulation)) == (RunPhase.PLACING, "1 of 2 sites")
    (waits,) = simulation.facts(RoundWaits)
    assert sentence(waits) == "1 of 2 sites; the round waits"
    assert next_deadline(simulation.state) == 60.0
    later(simulation, 59.0)
    assert run_of(simulation).ended is None
    simulation.crash()
    later(simulation, 1.0)
    (failed,) = simulation.facts(RunFailed)
    assert failed.reason == "1 of 2 sites; waited 60 s for more"


def test_enough_come_in_time_and_the_patience_is_new_in_every_round() -> None:
    simulation = begun("a")
    later(simulation, 50.0)
    here(simulation, "b")
    assert next_deadline(simulation.state) is None
    simulation.tell(simulation.queue.popleft())  # the model is built
    simulation.queue.clear()
    answer(simulation, 0)
    simulation.tell(LoseWorker(member("a"), "killed"))
    answer(simulation, 1)
    assert phase(simulation) is RunPhase.RECOVERING
    assert reason(simulation) == "round 2: 1 of 2 sites; away: client 0 (a)"
    assert next_deadline(simulation.state) == 110.0
    here(simulation, "c")
    assert selected(simulation)[-1] == (2, (1, 2))
    opened = simulation.facts(ClientsSelected)[-1]
    assert opened.excused == (Excused(reason="away", clients=(0,)),)
    assert sentence(opened) == "round 2: 2 clients selected; not asked: 0: away"
    assert "2 clients have answered, 1 not asked" in reason(simulation)
    simulation.tell(LoseWorker(member("c"), "killed"))
    answer(simulation, 1)
    later(simulation, 60.0)
    fold(simulation)
    assert run_of(simulation).ended is None
    later(simulation, 60.0)
    (failed,) = simulation.facts(RunFailed)
    assert failed.reason == ("round 3: 1 of 2 sites; away: client 0 (a); waited 60 s for more")


def test_too_few_on_the_way_to_the_first_model_wait_too() -> None:
    """The only workers go while the model is built."""
    simulation = start(job_text(federation(), data=WARD))
    here(simulation, "a")
    here(simulation, "b")
    simulation.queue.clear()
    simulation.tell(LoseWorker(member("a"), "killed"))
    simulation.tell(LoseWorker(member("b"), "killed"))
    assert (phase(simulation), reason(simulation)) == (RunPhase.PLACING, "0 of 2 sites")
    here(simulation, "b", 1)
    here(simulation, "a", 1)
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED


def test_a_client_that_is_lost_in_its_round_is_waited_for_and_then_left_out() -> None:
    simulation = begun("a", "b", "c")
    answer(simulation, 0, 1)
    simulation.tell(LoseWorker(member("c"), "killed"))
    assert "without a worker: client 2 (c)" in reason(simulation)
    assert next_deadline(simulation.state) == 60.0
    later(simulation, 30.0)
    here(simulation, "c", 1)
    assert [e.client for e in trained(simulation)] == [2]
    assert next_deadline(simulation.state) is None
    simulation.tell(LoseWorker(member("c", 1), "killed"))
    later(simulation, 59.0)
    assert not simulation.facts(RoundClosed)
    later(simulation, 1.0)
    (left,) = simulation.facts(ClientLeft)
    assert sentence(left) == "client 2 has left: away for 60 s"
    (closed,) = simulation.facts(RoundClosed)
    assert closed.reason == "round 1: 2 of 3 updates, 1 left (client 2 (c))"
    assert closed.by_policy
    fold(simulation)
    assert selected(simulation)[-1] == (2, (0, 1))
    here(simulation, "c", 2)
    answer(simulation, 0, 1)
    assert selected(simulation)[-1] == (3, (0, 1, 2))


def test_a_client_whose_worker_is_stopped_in_its_round_is_not_waited_for() -> None:
    simulation = begun("a", "b", "c")
    answer(simulation, 0)
    simulation.tell(DrainWorker(member("b")))
    simulation.tell(LeaveWorker(member("c"), "asked to"))
    assert [(f.client, f.reason) for f in simulation.facts(ClientLeft)] == [
        (1, "its worker is being stopped"),
        (2, "its worker was stopped"),
    ]
    (closed,) = simulation.facts(RoundClosed)
    assert [a.client for a in closed.accepted] == [0]


def test_an_update_that_was_on_its_way_counts_and_a_failure_does_not() -> None:
    simulation = begun("a", "b", "c")
    (_, second, third) = trained(simulation)
    simulation.tell(DrainWorker(member("b")))
    simulation.tell(DrainWorker(member("c")))
    simulation.tell(Report(RUN, do(second)[0]))
    refusal = fail(simulation, third.client)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "client 2 has left round 1"
    answer(simulation, 0)
    (closed,) = simulation.facts(RoundClosed)
    assert [a.client for a in closed.accepted] == [0, 1]


def test_who_is_away_between_rounds_is_excused_with_the_reason() -> None:
    simulation = begun("a", "b", "c", "d", "e", strategy=federation(rounds=4), data=None)
    answer(simulation, 0, 1, 2, 3)
    simulation.tell(LoseWorker(member("a"), "killed"))
    simulation.tell(DrainWorker(member("b")))
    answer(simulation, 4)
    opened = simulation.facts(ClientsSelected)[-1]
    assert opened.clients == (2, 3, 4)
    assert opened.excused == (
        Excused(reason="away", clients=(0,)),
        Excused(reason="its worker is being stopped", clients=(1,)),
    )
    simulation.now_s = 1e6
    simulation.tell(ForgetWorkers(simulation.now_s, 0))
    answer(simulation, 2, 3, 4)
    assert [f.client for f in simulation.facts(ClientLeft)] == [0]


def test_a_site_outside_its_window_is_excused_without_a_strike() -> None:
    strategy = federation(strikes={"limit": 1, "bench_rounds": 9})
    simulation = begun("a", "b", "c", strategy=strategy)
    answer(simulation, 0, 1)
    fail(simulation, 2, Cause.OUTSIDE_WINDOW)
    (closed,) = simulation.facts(RoundClosed)
    assert closed.reason == "round 1: 2 of 3 updates, 1 left (client 2 (c))"
    assert selected(simulation)[-1] == (2, (0, 1))
    assert not simulation.facts(ClientBenched)
    answer(simulation, 0)
    later(simulation, 300.0)
    fail(simulation, 1, Cause.REFUSED_BY_SITE)
    assert selected(simulation)[-1] == (3, (0, 1, 2)), "after a while it is asked again"
    assert not run_of(simulation).value.attendance.strikes


def test_a_round_that_all_have_left_goes_on_when_somebody_is_back() -> None:
    strategy = federation(num_clients=3, roster={"wait_s": 1000.0})
    simulation = begun("a", "b", strategy=strategy)
    fail(simulation, 0, Cause.OUTSIDE_WINDOW)
    fail(simulation, 1, Cause.OUTSIDE_WINDOW)
    assert [w.reason for w in simulation.facts(RoundWaits)] == [
        "round 1: 0 of 2 updates; 1 is needed"
    ]
    assert phase(simulation) is RunPhase.RECOVERING
    assert reason(simulation).endswith("it waits for more clients")
    assert next_deadline(simulation.state) == 300.0
    simulation.now_s = 10.0
    here(simulation, "a", 1)
    assert [e.client for e in trained(simulation)] == [0]
    assert next_deadline(simulation.state) is None
    simulation.tell(DrainWorker(member("b")))
    simulation.now_s = 20.0
    here(simulation, "b")  # the same start, which takes work again
    answer(simulation, 0)
    (closed,) = simulation.facts(RoundClosed)
    assert closed.reason == "round 1: 1 of 2 updates, 1 left (client 1 (b))"
    assert selected(simulation)[-1] == (2, (0, 1))


def closed_until(simulation: Simulation, client: int, opens_in_s: float) -> None:
    fact = UpdateRejected(
        party=ROOT,
        round_num=round_num(simulation),
        client=client,
        reason=f"site {client} is closed: opens Mon 19:00",
        cause=Cause.OUTSIDE_WINDOW,
        opens_in_s=opens_in_s,
    )
    simulation.tell(Report(RUN, fact))
    fold(simulation)


def test_a_site_that_says_when_it_opens_is_asked_then() -> None:
    roster = {"min_clients": 1, "wait_s": 90_000.0}
    simulation = begun("a", "b", strategy=federation(roster=roster))
    closed_until(simulation, 0, 40_000.0)
    closed_until(simulation, 1, 50_000.0)
    assert phase(simulation) is RunPhase.RECOVERING
    assert reason(simulation) == (
        "round 1: 0 of 2 clients have answered, 2 left; "
        "site 0 is closed: opens Mon 19:00 (client 0); "
        "site 1 is closed: opens Mon 19:00 (client 1); "
        "that is too few: it waits for more clients"
    )
    assert next_deadline(simulation.state) == 40_000.0
    later(simulation, 39_999.0)
    assert not trained(simulation)
    simulation.crash()
    later(simulation, 1.0)
    assert [e.client for e in trained(simulation)] == [0]
    answer(simulation, 0)
    assert selected(simulation)[-1] == (2, (0,)), "the other one is still closed"
    assert reason(simulation) == (
        "round 2: 0 of 1 clients have answered; site 1 is closed: opens Mon 19:00 (client 1)"
    )
    later(simulation, 10_000.0)
    answer(simulation, 0)
    assert selected(simulation)[-1] == (3, (0, 1))


def test_a_run_that_waits_says_which_sites_are_closed_until_when() -> None:
    simulation = begun("a", "b", "c", strategy=federation(roster={"min_clients": 3}))
    answer(simulation, 0, 1)
    closed_until(simulation, 2, 40_000.0)
    assert reason(simulation) == (
        "round 2: 2 of 3 sites; site 2 is closed: opens Mon 19:00 (client 2)"
    )


def test_a_few_of_many_closed_sites_are_named() -> None:
    names = [f"s{number:02}" for number in range(12)]
    roster = {"min_clients": 12}
    simulation = begun(*names, strategy=federation(num_clients=12, roster=roster))
    answer(simulation, 0, 1)
    for client in range(2, 12):
        closed_until(simulation, client, 40_000.0)
    assert reason(simulation).endswith("(client 9); 2 more closed")


def test_sites_that_are_closed_are_asked_again_after_a_while() -> None:
    simulation = begun("a", "b", strategy=federation(roster={"wait_s": 1000.0}))
    fail(simulation, 0, Cause.OUTSIDE_WINDOW)
    fail(simulation, 1, Cause.OUTSIDE_WINDOW)
    later(simulation, 100.0)
    simulation.tell(LoseWorker(member("b"), "killed"))
    assert not trained(simulation)
    later(simulation, 200.0)
    assert [e.client for e in trained(simulation)] == [0]
    fail(simulation, 0, Cause.OUTSIDE_WINDOW)
    assert [(f.client, f.reason) for f in simulation.facts(ClientLeft)] == [(1, "away")]
    assert next_deadline(simulation.state) == 600.0
    simulation.crash()
    later(simulation, 300.0)
    answer(simulation, 0)
    (closed,) = simulation.facts(RoundClosed)
    assert [a.client for a in closed.accepted] == [0]
    later(simulation, 1000.0)
    (failed,) = simulation.facts(RunFailed)
    assert failed.reason == "round 2: 1 of 2 sites; waited 1000 s for more"


def test_a_round_with_too_few_updates_takes_in_who_joins() -> None:
    strategy = federation(num_clients=4, quorum=2)
    simulation = begun("a", "b", strategy=strategy)
    answer(simulation, 0)
    simulation.tell(LeaveWorker(member("b"), "stopped"))
    (waits,) = simulation.facts(RoundWaits)
    assert waits.reason == "round 1: 1 of 2 updates; 2 are needed"
    assert next_deadline(simulation.state) == 60.0
    later(simulation, 40.0)
    simulation.crash()
    here(simulation, "c")
    here(simulation, "d")
    assert selected(simulation) == [(1, (0, 1)), (1, (0, 2))]
    assert [e.client for e in trained(simulation)] == [2]
    assert next_deadline(simulation.state) is None
    answer(simulation, 2)
    (closed,) = simulation.facts(RoundClosed)
    assert [a.client for a in closed.accepted] == [0, 2]
    assert selected(simulation)[-1] == (2, (0, 2, 3))


def test_a_round_with_too_few_updates_fails_after_its_time() -> None:
    simulation = begun("a", "b", strategy=federation(quorum=2))
    answer(simulation, 0)
    simulation.tell(LeaveWorker(member("b"), "stopped"))
    later(simulation, 60.0)
    (failed,) = simulation.facts(RunFailed)
    assert failed.reason == "round 1: 1 of 2 updates; 2 are needed; waited 60 s for more"


def test_failures_end_the_run_unless_it_is_to_wait_for_others() -> None:
    for policy in ("fail", "wait"):
        strategy = federation(on_missing_quorum=policy)
        simulation = begun("a", "b", strategy=strategy)
        fail(simulation, 0)
        fail(simulation, 1)
        assert bool(simulation.facts(RunFailed)) is (policy == "fail")
    here(simulation, "c")
    assert selected(simulation) == [(1, (0, 1)), (1, (0, 1, 2))]
    here(simulation, "a", 1)
    answer(simulation, 2)
    (closed,) = simulation.facts(RoundClosed)
    assert [a.client for a in closed.accepted] == [2]


def test_a_failed_client_is_asked_again_while_the_round_waits() -> None:
    simulation = begun("a", "b", strategy=federation(on_missing_quorum="wait"))
    fail(simulation, 0)
    fail(simulation, 1)
    here(simulation, "b", 1)
    assert simulation.facts(RoundWaits)[-1].asked_again == (1,)
    assert [e.client for e in trained(simulation)] == [1]
    assert next_deadline(simulation.state) is None


def test_more_clients_than_needed_are_asked_for_and_the_need_stays() -> None:
    strategy = federation(num_clients=9, over_select=1, quorum=1.0, roster={"min_clients": 4})
    strategy["client_selection"] = {"method": "Random", "fraction": 0.5}
    simulation = begun("a", "b", "c", "d", strategy=strategy)
    (first,) = simulation.facts(ClientsSelected)
    assert (len(first.clients), first.num_needed) == (3, 2)
    gone = [roster(simulation)[client] for client in first.clients[:2]]
    for name in gone:
        simulation.tell(LeaveWorker(member(name), "stopped"))
    answer(simulation, first.clients[2])
    (_, second) = simulation.facts(ClientsSelected)
    assert second.num_needed == 2
    assert len(second.clients) == 2
    assert set(first.clients[2:]) < set(second.clients)
    answer(simulation, *second.clients)
    (closed,) = simulation.facts(RoundClosed)
    assert len(closed.accepted) == 2


def test_a_deadline_takes_in_others_too() -> None:
    strategy = federation(num_clients=3, quorum=2, round_deadline_s=5.0)
    simulation = begun("a", "b", strategy=strategy)
    answer(simulation, 0)
    simulation.tell(LoseWorker(member("b"), "killed"))
    here(simulation, "c")
    later(simulation, 5.0)
    assert simulation.facts(RunFailed)[0].reason.startswith("round 1: 1 of 2 updates, deadline")


@pytest.mark.parametrize("data", [WARD, None], ids=["worker-local", "shards"])
def test_a_client_is_trained_by_its_own_worker_alone(data: Any) -> None:
    changes = {} if data is None else {"data": data}
    simulation = start(job_text(federation(num_clients=3), **changes))
    here(simulation, "a")
    here(simulation, "b")
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    simulation.tell(LoseWorker(member("b"), "killed"))
    assert [(e.client, e.member.worker_id) for e in trained(simulation)] == [(0, "a")]
    assert all(effect.num_clients == 3 for effect in trained(simulation))


def test_clients_without_the_tags_join_and_are_not_asked() -> None:
    strategy = federation()
    strategy["client_selection"] = {"method": "ByCapability", "required_tags": ["gpu"]}
    simulation = begun("a", strategy=strategy)
    here(simulation, "b", tags=("gpu",))
    assert reason(simulation) == "1 of 2 sites"
    here(simulation, "c", tags=("gpu",))
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    assert selected(simulation) == [(1, (1, 2))]
    simulation.tell(LoseWorker(member("c"), "killed"))
    simulation.tell(LoseWorker(member("b"), "killed"))
    here(simulation, "d")
    later(simulation, 60.0)
    assert "round 1" in reason(simulation)


def test_sites_without_the_tags_are_no_round() -> None:
    strategy = federation(rounds=2)
    strategy["client_selection"] = {"method": "ByCapability", "required_tags": ["gpu"]}
    simulation = begun("c", "d", strategy=strategy)
    for name in "ab":
        here(simulation, name, tags=("gpu",))
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    assert selected(simulation) == [(1, (0, 1))]
    simulation.tell(Report(RUN, do(trained(simulation)[0])[0]))
    for name in "ab":
        simulation.tell(LeaveWorker(member(name), "stopped"))
    fold(simulation)
    assert reason(simulation) == "round 2: 2 of 2 sites, none with the tags that are required"


def test_an_update_that_comes_after_the_loss_of_its_worker_ends_the_waiting() -> None:
    simulation = begun("a", "b", "c")
    (_, second, _) = trained(simulation)
    simulation.tell(LoseWorker(member("b"), "killed"))
    assert next_deadline(simulation.state) == 60.0
    simulation.tell(Report(RUN, do(second)[0]))
    assert next_deadline(simulation.state) is None
    later(simulation, 60.0)
    assert not simulation.facts(ClientLeft)


EVALUATION = {"split": "test", "metrics": []}


def test_an_evaluation_goes_on_without_a_client_that_has_left() -> None:
    strategy = federation(rounds=2)
    simulation = begun("a", "b", "c", strategy=strategy, evaluation=EVALUATION)
    answer(simulation, 0, 1, 2)
    simulation.tell(LeaveWorker(member("c"), "stopped"))
    (said,) = simulation.facts(ClientEvaluated)
    assert (said.client, said.has_left) == (2, True)
    assert said.reason == "it has left: its worker was stopped"
    evaluate(simulation)
    (done,) = simulation.facts(Evaluated)
    assert done.without == ()
    assert without_spreads(done.metrics) == {"test.loss": 2.0}
    answer(simulation, 0, 1)
    simulation.tell(LoseWorker(member("a"), "killed"))
    evaluate(simulation)
    assert run_of(simulation).ended is None
    later(simulation, 60.0)
    assert run_of(simulation).ended is RunPhase.COMPLETED
    assert len(simulation.facts(Evaluated)) == 2


def evaluate(simulation: Simulation) -> None:
    for effect in sorted(pending(simulation.state), key=repr):
        if type(effect).__name__ == "EvaluateState":
            simulation.tell(Report(RUN, do(effect)[0]))
    simulation.queue.clear()


def test_who_was_lost_before_its_round_closed_is_awaited_to_evaluate() -> None:
    simulation = begun("a", "b", strategy=federation(rounds=1), evaluation=EVALUATION)
    answer(simulation, 0)
    simulation.tell(LoseWorker(member("a"), "killed"))
    answer(simulation, 1)
    evaluate(simulation)
    assert next_deadline(simulation.state) == 60.0
    here(simulation, "a", 1)
    assert next_deadline(simulation.state) is None
    evaluate(simulation)
    assert run_of(simulation).ended is RunPhase.COMPLETED


def test_an_evaluation_that_all_have_left_ends_without_metrics() -> None:
    simulation = begun("a", "b", strategy=federation(rounds=1), evaluation=EVALUATION)
    answer(simulation, 0, 1)
    simulation.tell(LeaveWorker(member("a"), "stopped"))
    simulation.tell(LeaveWorker(member("b"), "stopped"))
    (done,) = simulation.facts(Evaluated)
    assert (done.without, done.metrics) == ((0, 1), {})
    assert sentence(done) == "segment 1 evaluated by nobody: all its clients have left"
    assert run_of(simulation).ended is RunPhase.COMPLETED


def test_early_stop_follows_the_evaluations_of_those_that_are_there() -> None:
    evaluation = {**EVALUATION, "stop": {"metric": "loss", "mode": "min", "patience": 1}}
    simulation = begun("a", "b", strategy=federation(rounds=9), evaluation=evaluation)
    for _ in range(2):
        answer(simulation, 0, 1)
        evaluate(simulation)
    (stopped,) = simulation.facts(StoppedEarly)
    assert stopped.reason.startswith("stopped early after 2 rounds: test.loss has not improved")


def test_three_failures_in_a_row_put_a_client_on_the_bench() -> None:
    strikes = {"limit": 2, "bench_rounds": 2}
    strategy = {**FEDERATED, "num_clients": 2, "rounds": 8, "options": {"strikes": strikes}}
    simulation = begun("a", "b", strategy=strategy)
    for _ in range(2):
        answer(simulation, 0)
        fail(simulation, 1)
    (benched,) = simulation.facts(ClientBenched)
    assert (benched.client, benched.until_round) == (1, 5)
    assert sentence(benched) == (
        "client 1 takes no part until round 5: rejected in 2 rounds in a row: exception"
    )
    opened = simulation.facts(ClientsSelected)[-1]
    assert opened.clients == (0,)
    assert opened.excused == (Excused(reason="benched until round 5", clients=(1,)),)
    assert run_of(simulation).is_reproducible, "the failures of the job's own decide it"
    before = run_of(simulation)
    simulation.crash()
    assert run_of(simulation) == before
    answer(simulation, 0)
    answer(simulation, 0)
    assert selected(simulation)[-1] == (5, (0, 1))
    fail(simulation, 1)
    answer(simulation, 0)
    answer(simulation, 0, 1)  # which ends the row
    fail(simulation, 1)
    answer(simulation, 0)
    assert len(simulation.facts(ClientBenched)) == 1
    assert [clients for _, clients in selected(simulation)] == [
        (0, 1), (0, 1), (0,), (0,), (0, 1), (0, 1), (0, 1), (0, 1),
    ]  # fmt: skip


def test_a_failure_that_is_made_good_in_the_same_round_is_no_strike() -> None:
    options = {"strikes": {"limit": 1, "bench_rounds": 2}, "on_missing_quorum": "wait"}
    strategy = {**FEDERATED, "num_clients": 1, "options": options}
    simulation = begun("a", strategy=strategy)
    fail(simulation, 0)
    here(simulation, "a", 1)
    answer(simulation, 0)
    assert selected(simulation)[-1] == (2, (0,))
    assert not simulation.facts(ClientBenched)


def test_benched_clients_of_an_open_roster_do_not_count_as_here() -> None:
    strategy = federation(rounds=9, strikes={"limit": 1, "bench_rounds": 2})
    simulation = begun("a", "b", strategy=strategy)
    answer(simulation, 0)
    fail(simulation, 1)
    assert reason(simulation) == "round 2: 1 of 2 sites; benched until round 4: client 1 (b)"
    here(simulation, "c")
    assert selected(simulation)[-1] == (2, (0, 2))


def test_a_resumption_asks_whoever_is_here() -> None:
    simulation = begun("a", "b", strategy=federation(rounds=4))
    answer(simulation, 0)
    fail(simulation, 1, Cause.OUTSIDE_WINDOW)
    fail(simulation, 1, Cause.OUTSIDE_WINDOW)
    for segment in (None, 1):
        simulation.tell(CancelRun(RUN))
        for effect in pending(simulation.state):
            simulation.tell(Report(RUN, do(effect)[0]))
        simulation.tell(ResumeRun(RUN, from_segment=segment))
        answer(simulation, 0, 1)
    simulation.queue.clear()
    while run_of(simulation).ended is None:
        answer(simulation, 0, 1)
    assert run_of(simulation).ended is RunPhase.COMPLETED
    before = run_of(simulation)
    simulation.crash()
    assert run_of(simulation) == before


def test_a_run_of_an_earlier_commit_forgets_strikes() -> None:
    strikes = {"limit": 2, "bench_rounds": 2}
    strategy = {**FEDERATED, "num_clients": 2, "rounds": 8, "options": {"strikes": strikes}}
    simulation = begun("a", "b", strategy=strategy)
    for _ in range(3):
        answer(simulation, 0)
        fail(simulation, 1)
    simulation.tell(CancelRun(RUN))
    for effect in pending(simulation.state):
        simulation.tell(Report(RUN, do(effect)[0]))
    simulation.tell(ResumeRun(RUN, from_segment=2))
    assert not run_of(simulation).value.attendance.benched
    assert not run_of(simulation).is_reproducible


def refused(strategy: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(InvalidInputError) as error:
        check_at_submit(job_text(strategy, **changes))
    return str(error.value)


def test_what_is_not_defined_is_refused_at_submit() -> None:
    inside = population(inner=federation(rounds=5))
    assert "roster.open: inside another strategy" in refused(inside, **POPULATION_SECTIONS)
    assert "who joins an open roster is one" in refused(federation(inner={"type": "Local"}))
    assert "options.roster.min_clients: 9 is more than num_clients, 5" in refused(
        federation(roster={"min_clients": 9})
    )
    assert "belongs to an open roster" in refused(
        {**FEDERATED, "options": {"roster": {"open": False, "wait_s": 5.0}}}
    )
    assert "a round could not close" in refused(federation(quorum=3))
    assert "roster.min_clients: 2 is less than the 3 updates that robust needs" in refused(
        federation(robust={"name": "median"})
    )
    assert "no client fails twice" in refused(
        federation(strikes={"limit": 2}, on_client_error="fail")
    )
