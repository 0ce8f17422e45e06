"""Open rosters in the pure core: clients join, leave, return and are awaited."""

from typing import Any

import pytest

from stratagem.common.base.ids import WorkerId
from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import job_text
from tests.coordinator.core.simulation import do, member, start, trained
from tests.coordinator.strategies.open_rosters import (
    GPU,
    WARD,
    answer,
    begun,
    clients_due,
    close_until,
    closing,
    deadline,
    drain,
    fail,
    failure,
    federation,
    fold,
    later,
    leave,
    left,
    roster,
    selected,
)

pytestmark = pytest.mark.core


# ---- who joins, and what is waited for ----


def test_numbers_are_the_order_of_joining_and_stay() -> None:
    simulation = begun("mz", federation(rounds=5))
    assert roster(simulation) == {0: "m", 1: "z"}
    simulation.sites("a")  # while a round is open: it takes part in the next one
    assert selected(simulation) == [(1, (0, 1))]
    answer(simulation, 0, 1)
    assert roster(simulation) == {0: "m", 1: "z", 2: "a"}
    leave(simulation, "m")
    answer(simulation, 1, 2)
    assert [client for client, _ in left(simulation)] == [0]
    simulation.sites("b")
    answer(simulation, 1, 2)
    simulation.sites("m", 1, tags=("new",))
    answer(simulation, 1, 2, 3)
    assert selected(simulation) == [
        (1, (0, 1)), (2, (0, 1, 2)), (3, (1, 2)), (4, (1, 2, 3)), (5, (0, 1, 2, 3)),
    ]  # fmt: skip
    assert roster(simulation) == {0: "m", 1: "z", 2: "a", 3: "b"}
    back = simulation.facts(f.ClientsJoined)[-1]
    assert back.clients[0].tags == ("new",)
    assert sentence(back) == "joined: client 0 (m)"
    answer(simulation, 0, 1, 2, 3)
    assert simulation.record.ended is RunPhase.COMPLETED
    assert not simulation.record.is_reproducible, "who was there when has decided"
    simulation.crash()


def test_a_quarantined_site_leaves_its_round_and_is_back_after_the_release() -> None:
    simulation = begun("abc", federation(rounds=5))
    why = "its worker is quarantined: computes wrongly"
    quarantined = f.WorkerQuarantined(worker_id=WorkerId("b"), reason="computes wrongly")
    simulation.happen(quarantined)
    assert clients_due(simulation) == [0, 2]
    assert left(simulation) == [(1, why)]
    simulation.sites("b", 1)
    answer(simulation, 0, 2)
    simulation.happen(f.WorkerReleased(worker_id=WorkerId("b")))
    answer(simulation, 0, 2)
    assert selected(simulation) == [(1, (0, 1, 2)), (2, (0, 2)), (3, (0, 1, 2))]
    answer(simulation, 1)
    simulation.happen(quarantined)
    answer(simulation, 0, 2)
    last = simulation.facts(f.ClientsSelected)[-1]
    assert (last.clients, last.excused) == ((0, 2), (f.Excused(reason=why, clients=(1,)),))
    simulation.tell(c.LeaveWorker(member("b", 1), "stopped"))
    answer(simulation, 0, 2)
    assert left(simulation) == [(1, why), (1, why)]
    simulation.crash()


def test_many_join_at_once_with_few_facts() -> None:
    simulation = begun("ab", federation(num_clients=1102))
    simulation.crowd([f"s{number:04}" for number in range(1100)], local_data=("ward",))
    answer(simulation, 0, 1)
    assert [len(fact.clients) for fact in simulation.facts(f.ClientsJoined)] == [2, 1000, 100]
    assert len(simulation.facts(f.ClientsSelected)[-1].clients) == 1102
    last = simulation.facts(f.ClientsJoined)[1]
    assert sentence(last).endswith("client 9 (s0007) and 992 more")


def test_too_few_wait_and_the_run_fails_after_its_time() -> None:
    simulation = begun("a")
    assert (simulation.phase, simulation.reason) == (RunPhase.PLACING, "1 of 2 sites")
    assert sentence(simulation.fact(f.RoundWaits)) == "1 of 2 sites; the round waits"
    assert deadline(simulation) == 60.0
    later(simulation, 59.0)
    assert simulation.record.ended is None
    simulation.crash()
    later(simulation, 1.0)
    assert simulation.fact(f.RunFailed).reason == "1 of 2 sites; waited 60 s for more"


def test_enough_come_in_time_and_the_patience_is_new_in_every_round() -> None:
    simulation = begun("a")
    later(simulation, 50.0)
    simulation.sites("b")
    assert deadline(simulation) is None
    simulation.alone()  # the model is built
    answer(simulation, 0)
    simulation.lose("a")
    answer(simulation, 1)
    assert (simulation.phase, simulation.reason) == (
        RunPhase.RECOVERING,
        "round 2: 1 of 2 sites; away: client 0 (a)",
    )
    assert deadline(simulation) == 110.0
    simulation.sites("c")
    assert selected(simulation)[-1] == (2, (1, 2))
    opened = simulation.facts(f.ClientsSelected)[-1]
    assert opened.excused == (f.Excused(reason="away", clients=(0,)),)
    assert sentence(opened) == "round 2: 2 clients selected; not asked: 0: away"
    assert "2 clients have answered, 1 not asked" in simulation.reason
    simulation.lose("c")
    answer(simulation, 1)
    later(simulation, 60.0)
    fold(simulation)
    assert simulation.record.ended is None
    later(simulation, 60.0)
    failed = simulation.fact(f.RunFailed)
    assert failed.reason == ("round 3: 1 of 2 sites; away: client 0 (a); waited 60 s for more")


def test_too_few_on_the_way_to_the_first_model_wait_too() -> None:
    """The only workers go while the model is built."""
    simulation = start(job_text(federation(), data=WARD))
    simulation.sites("ab")
    simulation.queue.clear()
    simulation.lose("ab")
    assert (simulation.phase, simulation.reason) == (RunPhase.PLACING, "0 of 2 sites")
    simulation.sites("ba", 1)
    simulation.complete()


# ---- who is lost, stopped, or away ----


def test_a_client_that_is_lost_in_its_round_is_waited_for_and_then_left_out() -> None:
    simulation = begun("abc")
    answer(simulation, 0, 1)
    simulation.lose("c")
    assert "without a worker: client 2 (c)" in simulation.reason
    assert deadline(simulation) == 60.0
    later(simulation, 30.0)
    simulation.sites("c", 1)
    assert clients_due(simulation) == [2]
    assert deadline(simulation) is None
    simulation.lose("c", 1)
    later(simulation, 59.0)
    assert not simulation.facts(f.RoundClosed)
    later(simulation, 1.0)
    assert sentence(simulation.fact(f.ClientLeft)) == "client 2 has left: away for 60 s"
    assert closing(simulation)[1] == "round 1: 2 of 3 updates, 1 left (client 2 (c))"
    assert simulation.fact(f.RoundClosed).by_policy
    fold(simulation)
    assert selected(simulation)[-1] == (2, (0, 1))
    simulation.sites("c", 2)
    answer(simulation, 0, 1)
    assert selected(simulation)[-1] == (3, (0, 1, 2))


def test_an_update_that_comes_after_the_loss_of_its_worker_ends_the_waiting() -> None:
    simulation = begun("abc")
    (_, second, _) = trained(simulation)
    simulation.lose("b")
    assert deadline(simulation) == 60.0
    simulation.report(do(second))
    assert deadline(simulation) is None
    later(simulation, 60.0)
    assert not simulation.facts(f.ClientLeft)


def test_nobody_waits_for_a_stopped_worker_but_an_update_on_its_way_counts() -> None:
    simulation = begun("abc")
    answer(simulation, 0)
    drain(simulation, "b")
    leave(simulation, "c", "asked to")
    assert left(simulation) == [(1, "its worker is being stopped"), (2, "its worker was stopped")]
    assert closing(simulation)[0] == [0]
    simulation = begun("abc")
    (_, second, third) = trained(simulation)
    drain(simulation, "bc")
    simulation.report(do(second))
    refusal = simulation.refusal(failure(simulation, third.client, Cause.EXCEPTION))
    assert refusal.reason == "client 2 has left round 1"
    answer(simulation, 0)
    assert closing(simulation)[0] == [0, 1]


def test_who_is_away_between_rounds_is_excused_with_the_reason() -> None:
    simulation = begun("abcde", federation(rounds=4), data=None)
    answer(simulation, 0, 1, 2, 3)
    simulation.lose("a")
    drain(simulation, "b")
    answer(simulation, 4)
    opened = simulation.facts(f.ClientsSelected)[-1]
    assert opened.clients == (2, 3, 4)
    assert opened.excused == (
        f.Excused(reason="away", clients=(0,)),
        f.Excused(reason="its worker is being stopped", clients=(1,)),
    )
    simulation.now_s = 1e6
    simulation.tell(c.ForgetWorkers(simulation.now_s, 0))
    answer(simulation, 2, 3, 4)
    assert [client for client, _ in left(simulation)] == [0]


# ---- sites that are closed, or refuse ----


def test_a_site_outside_its_window_is_excused_without_a_strike() -> None:
    simulation = begun("abc", federation(strikes={"limit": 1, "bench_rounds": 9}))
    answer(simulation, 0, 1)
    fail(simulation, 2, cause=Cause.OUTSIDE_WINDOW)
    assert closing(simulation)[1] == "round 1: 2 of 3 updates, 1 left (client 2 (c))"
    assert selected(simulation)[-1] == (2, (0, 1))
    assert not simulation.facts(f.ClientBenched)
    answer(simulation, 0)
    later(simulation, 300.0)
    fail(simulation, 1, cause=Cause.REFUSED_BY_SITE)
    assert selected(simulation)[-1] == (3, (0, 1, 2)), "after a while it is asked again"
    assert not simulation.record.value.attendance.strikes


def test_a_round_that_all_have_left_goes_on_when_somebody_is_back() -> None:
    simulation = begun("ab", federation(num_clients=3, roster={"wait_s": 1000.0}))
    fail(simulation, 0, 1, cause=Cause.OUTSIDE_WINDOW)
    assert simulation.fact(f.RoundWaits).reason == "round 1: 0 of 2 updates; 1 is needed"
    assert simulation.phase is RunPhase.RECOVERING
    assert simulation.reason.endswith("it waits for more clients")
    assert deadline(simulation) == 300.0
    simulation.now_s = 10.0
    simulation.sites("a", 1)
    assert clients_due(simulation) == [0]
    assert deadline(simulation) is None
    drain(simulation, "b")
    simulation.now_s = 20.0
    simulation.sites("b")  # the same start, which takes work again
    answer(simulation, 0)
    assert closing(simulation)[1] == "round 1: 1 of 2 updates, 1 left (client 1 (b))"
    assert selected(simulation)[-1] == (2, (0, 1))


def test_a_site_that_says_when_it_opens_is_asked_then() -> None:
    simulation = begun("ab", federation(roster={"min_clients": 1, "wait_s": 90_000.0}))
    close_until(simulation, 0, 40_000.0)
    close_until(simulation, 1, 50_000.0)
    assert simulation.phase is RunPhase.RECOVERING
    assert simulation.reason == (
        "round 1: 0 of 2 clients have answered, 2 left; "
        "site 0 is closed: opens Mon 19:00 (client 0); "
        "site 1 is closed: opens Mon 19:00 (client 1); "
        "that is too few: it waits for more clients"
    )
    assert deadline(simulation) == 40_000.0
    later(simulation, 39_999.0)
    assert not trained(simulation)
    simulation.crash()
    later(simulation, 1.0)
    assert clients_due(simulation) == [0]
    answer(simulation, 0)
    assert selected(simulation)[-1] == (2, (0,)), "the other one is still closed"
    assert simulation.reason == (
        "round 2: 0 of 1 clients have answered; site 1 is closed: opens Mon 19:00 (client 1)"
    )
    later(simulation, 10_000.0)
    answer(simulation, 0)
    assert selected(simulation)[-1] == (3, (0, 1))


def test_a_run_that_waits_names_a_few_of_the_sites_that_are_closed() -> None:
    simulation = begun("abc", federation(roster={"min_clients": 3}))
    answer(simulation, 0, 1)
    close_until(simulation, 2, 40_000.0)
    assert simulation.reason == (
        "round 2: 2 of 3 sites; site 2 is closed: opens Mon 19:00 (client 2)"
    )
    names = [f"s{number:02}" for number in range(12)]
    simulation = begun(names, federation(num_clients=12, roster={"min_clients": 12}))
    answer(simulation, 0, 1)
    for client in range(2, 12):
        close_until(simulation, client, 40_000.0)
    assert simulation.reason.endswith("(client 9); 2 more closed")


def test_sites_that_are_closed_are_asked_again_after_a_while() -> None:
    simulation = begun("ab", federation(roster={"wait_s": 1000.0}))
    fail(simulation, 0, 1, cause=Cause.OUTSIDE_WINDOW)
    later(simulation, 100.0)
    simulation.lose("b")
    assert not trained(simulation)
    later(simulation, 200.0)
    assert clients_due(simulation) == [0]
    fail(simulation, 0, cause=Cause.OUTSIDE_WINDOW)
    assert left(simulation) == [(1, "away")]
    assert deadline(simulation) == 600.0
    simulation.crash()
    later(simulation, 300.0)
    answer(simulation, 0)
    assert closing(simulation)[0] == [0]
    later(simulation, 1000.0)
    failed = simulation.fact(f.RunFailed)
    assert failed.reason == "round 2: 1 of 2 sites; waited 1000 s for more"


# ---- rounds with too few updates ----


def test_a_round_with_too_few_updates_takes_in_who_joins() -> None:
    simulation = begun("ab", federation(num_clients=4, quorum=2))
    answer(simulation, 0)
    leave(simulation, "b")
    assert simulation.fact(f.RoundWaits).reason == "round 1: 1 of 2 updates; 2 are needed"
    assert deadline(simulation) == 60.0
    waits = simulation.fork()
    later(waits, 60.0)
    assert waits.fact(f.RunFailed).reason == (
        "round 1: 1 of 2 updates; 2 are needed; waited 60 s for more"
    )
    later(simulation, 40.0)
    simulation.crash()
    simulation.sites("cd")
    assert selected(simulation) == [(1, (0, 1)), (1, (0, 2))]
    assert clients_due(simulation) == [2]
    assert deadline(simulation) is None
    answer(simulation, 2)
    assert closing(simulation)[0] == [0, 2]
    assert selected(simulation)[-1] == (2, (0, 2, 3))


def test_failures_end_the_run_unless_it_is_to_wait_for_others() -> None:
    for policy in ("fail", "wait"):
        simulation = begun("ab", federation(on_missing_quorum=policy))
        fail(simulation, 0, 1)
        assert bool(simulation.facts(f.RunFailed)) is (policy == "fail")
    again = simulation.fork()
    again.sites("b", 1)
    assert again.facts(f.RoundWaits)[-1].asked_again == (1,)
    assert clients_due(again) == [1]
    assert deadline(again) is None
    simulation.sites("c")
    assert selected(simulation) == [(1, (0, 1)), (1, (0, 1, 2))]
    simulation.sites("a", 1)
    answer(simulation, 2)
    assert closing(simulation)[0] == [2]


def test_more_clients_than_needed_are_asked_for_and_the_need_stays() -> None:
    strategy = federation(num_clients=9, over_select=1, quorum=1.0, roster={"min_clients": 4})
    strategy["client_selection"] = {"method": "Random", "fraction": 0.5}
    simulation = begun("abcd", strategy)
    first = simulation.fact(f.ClientsSelected)
    assert (len(first.clients), first.num_needed) == (3, 2)
    leave(simulation, "".join(roster(simulation)[client] for client in first.clients[:2]))
    answer(simulation, first.clients[2])
    (_, second) = simulation.facts(f.ClientsSelected)
    assert (second.num_needed, len(second.clients)) == (2, 2)
    assert set(first.clients[2:]) < set(second.clients)
    answer(simulation, *second.clients)
    assert len(closing(simulation)[0]) == 2


def test_a_deadline_takes_in_others_too() -> None:
    simulation = begun("ab", federation(num_clients=3, quorum=2, round_deadline_s=5.0))
    answer(simulation, 0)
    simulation.lose("b")
    simulation.sites("c")
    later(simulation, 5.0)
    assert simulation.facts(f.RunFailed)[0].reason.startswith("round 1: 1 of 2 updates, deadline")


# ---- where clients train, and with which tags ----


@pytest.mark.parametrize("changes", [{"data": WARD}, {}], ids=["worker-local", "shards"])
def test_a_client_is_trained_by_its_own_worker_alone(changes: dict[str, Any]) -> None:
    simulation = start(job_text(federation(num_clients=3), **changes))
    simulation.sites("ab")
    simulation.alone()
    simulation.lose("b")
    assert [(e.client, e.member.worker_id) for e in trained(simulation)] == [(0, "a")]
    assert all(effect.num_clients == 3 for effect in trained(simulation))


def test_sites_without_the_tags_join_but_are_not_asked_and_are_no_round() -> None:
    simulation = begun("a", federation() | {"client_selection": GPU})
    simulation.sites("b", tags=("gpu",))
    assert simulation.reason == "1 of 2 sites"
    simulation.sites("c", tags=("gpu",))
    simulation.alone()
    assert selected(simulation) == [(1, (1, 2))]
    simulation.lose("cb")
    simulation.sites("d")
    later(simulation, 60.0)
    assert "round 1" in simulation.reason
    simulation = begun("cd", federation(rounds=2) | {"client_selection": GPU})
    simulation.sites("ab", tags=("gpu",))
    simulation.alone()
    assert selected(simulation) == [(1, (0, 1))]
    simulation.report(do(trained(simulation)[0]))
    leave(simulation, "ab")
    fold(simulation)
    assert simulation.reason == "round 2: 2 of 2 sites, none with the tags that are required"
