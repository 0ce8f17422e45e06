"""Federated rounds in the pure core: selection, assignment, quorum, deadline, late results, and
evaluation by clients."""

from math import exp
from typing import Any

import pytest

from stratagem.common.base.ids import Party, WorkerId
from stratagem.common.base.text import without_spreads
from stratagem.common.strategy import All, ByCapability, Random
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import CancelRun, Refusal, RefusalKind, ResumeRun
from stratagem.coordinator.core.effects import EvaluateState
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import live_blobs, pending
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies.federated.decisions import select
from stratagem.coordinator.strategies.federated.run import MAX_CLIENTS_AHEAD
from tests.coordinator.core.ask_every_run import next_deadline
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    do,
    ending,
    member,
    opened,
    register,
    rejected,
    start,
    trained,
)

pytestmark = pytest.mark.core


W = WorkerId("w")
ROSTER = tuple(
    f.ClientBinding(client=c, worker_id=W, tags=("gpu",) if c % 2 else ()) for c in range(10)
)
EVALUATION = {"split": "test", "metrics": []}


def local(num_clients: int, rounds: int = 3, options: Any = None, **changes: Any) -> Simulation:
    """A federation of so many sites, none of which is here."""
    strategy = {**FEDERATED, "num_clients": num_clients, "rounds": rounds, "options": options or {}}
    return start(job_text(strategy, data={"worker_local": "ward"}, **changes))


def drawn(num_clients: int, fraction: float, **options: Any) -> dict[str, Any]:
    selection = {"method": "Random", "fraction": fraction}
    changes = {"num_clients": num_clients, "client_selection": selection, "options": options}
    return {**FEDERATED, **changes}


def accepted(simulation: Simulation) -> list[int]:
    """The clients of the only round that was closed."""
    return [each.client for each in simulation.fact(f.RoundClosed).accepted]


def test_selection_is_seeded_by_round_and_drawn_from_the_roster() -> None:
    assert select(All(), ROSTER, 0, 1) == tuple(range(10))
    drawn = [select(Random(0.3), ROSTER, 7, r) for r in range(20)]
    assert all(len(set(clients)) == 3 and list(clients) == sorted(clients) for clients in drawn)
    assert len(set(drawn)) > 5
    assert drawn == [select(Random(0.3), ROSTER, 7, r) for r in range(20)]
    assert len(select(Random(0.01), ROSTER, 0, 1)) == 1
    assert len(select(Random(0.7), ROSTER, 0, 1)) == 7
    assert select(ByCapability(("gpu",)), ROSTER, 0, 1) == (1, 3, 5, 7, 9)
    assert select(ByCapability(()), ROSTER, 0, 1) == tuple(range(10))


def test_clients_are_spread_over_the_workers_and_moved_when_one_is_lost() -> None:
    simulation = opened(FEDERATED, "a", "b")
    kept = {e.client: e for e in trained(simulation)}
    assert {n: e.member.worker_id for n, e in kept.items()} == {0: "a", 1: "b", 2: "a", 3: "b"}
    simulation.lose("b")
    moved = {e.client: e for e in trained(simulation)}
    assert moved[0] == kept[0]
    assert {e.member.worker_id for e in moved.values()} == {"a"}
    assert moved[1].membership > kept[1].membership
    assert simulation.phase is RunPhase.RUNNING


def test_worker_local_clients_wait_for_their_worker() -> None:
    simulation = local(2)
    simulation.sites("a")
    simulation.come("b")
    simulation.run()
    assert (simulation.phase, simulation.reason) == (
        RunPhase.PLACING,
        "2 workers with data 'ward' are needed, 1 are here",
    )
    assert not simulation.facts(f.ModelBuilt)
    simulation.sites("c")
    simulation.alone()  # the model is built
    roster = simulation.fact(f.RosterFormed)
    assert [binding.worker_id for binding in roster.clients] == ["a", "c"]
    simulation.lose("c")
    assert [e.member.worker_id for e in trained(simulation)] == ["a"]
    assert "without a worker: client 1 (c)" in simulation.reason
    simulation.sites("c", 1)
    assert [e.member for e in trained(simulation)] == [member("a"), member("c", 1)]


def test_a_model_is_built_but_the_rounds_wait_for_the_workers_of_all_clients() -> None:
    simulation = local(2)
    simulation.sites("ab")
    (built,) = simulation.queue
    simulation.lose("b")
    simulation.tell(built)
    assert (simulation.phase, simulation.reason) == (
        RunPhase.PLACING,
        "2 workers with data 'ward' are needed, 1 are here",
    )
    simulation.lose("a")
    assert simulation.reason == "no worker is available: a (killed), b (killed)"
    simulation.sites("ab", 1)
    simulation.complete()


def test_by_capability_waits_for_the_tags() -> None:
    tagged = {"client_selection": {"method": "ByCapability", "required_tags": ["gpu"]}}
    simulation = start(job_text({**FEDERATED, **tagged}), "a")
    simulation.run()
    assert simulation.reason == "no client has a worker with the tags gpu"
    simulation.come("g", tags=("gpu", "big"))
    simulation.complete()
    for fact in simulation.facts(f.ClientsAssigned):
        assert {a.member.worker_id for a in fact.assignments if a.member} == {"g"}


def test_a_deadline_leaves_the_late_out_with_a_quorum_and_fails_without() -> None:
    strategy = {**FEDERATED, "options": {"quorum": 0.5, "round_deadline_s": 60.0}}
    simulation = opened(strategy, "a", "b")
    effects = trained(simulation)
    simulation.report(*map(do, effects[:2]))
    assert next_deadline(simulation.state) == 60.0
    simulation.tick(59.9)
    assert not simulation.facts(f.RoundClosed)
    simulation.tick(60.0)
    assert simulation.fact(f.RoundClosed).reason == "round 1: 2 of 4 updates, deadline passed"
    assert accepted(simulation) == [0, 1]
    assert not simulation.record.is_reproducible
    assert simulation.refusal(do(effects[3])).reason == "round 1 is closed"
    strategy = {**FEDERATED, "options": {"quorum": 3, "round_deadline_s": 60.0}}
    simulation = opened(strategy, "a")
    simulation.report(do(trained(simulation)[0]))
    simulation.tick(61.0)
    run = simulation.record
    assert run.ended is RunPhase.FAILED
    assert run.reason == "round 1: 1 of 4 updates, deadline passed; 3 are needed"


def test_over_selection_closes_with_the_first_that_suffice() -> None:
    simulation = opened(drawn(8, 0.25, over_select=3), "a", "b")
    selected, effects = simulation.fact(f.ClientsSelected), trained(simulation)
    assert (len(selected.clients), selected.num_needed) == (5, 2)
    simulation.report(*map(do, effects[3:]))
    closed = simulation.fact(f.RoundClosed)
    assert accepted(simulation) == [e.client for e in effects[3:]]
    assert (closed.reason, closed.by_policy) == ("round 1: 2 of 5 updates, 2 suffice", True)
    simulation.refusal(do(effects[0]))
    selected = opened(drawn(8, 0.5, over_select=9, quorum=0.5), "a").fact(f.ClientsSelected)
    assert (len(selected.clients), selected.num_needed) == (8, 2), "a share of the wanted"


def test_over_selection_that_is_answered_in_full_is_no_policy() -> None:
    simulation = opened(drawn(3, 0.7, over_select=1), "a")
    first, *others = trained(simulation)
    simulation.report(rejected(first.client, "not finite", Cause.UNKNOWN), *map(do, others))
    assert len(accepted(simulation)) == 2
    assert not simulation.fact(f.RoundClosed).by_policy


def test_few_clients_of_a_worker_are_due_at_once() -> None:
    simulation = opened({**FEDERATED, "num_clients": 11}, "a", "b")
    assert [(e.client, e.member.worker_id) for e in trained(simulation)] == [
        (client, "ab"[client % 2]) for client in range(2 * MAX_CLIENTS_AHEAD)
    ]
    simulation.report(do(trained(simulation)[1]))
    assert [e.client for e in trained(simulation)] == [0, 2, 3, 4, 5, 6, 7, 9]
    simulation.lose("a")
    assert {e.member.worker_id for e in trained(simulation)} == {"b"}
    assert [e.client for e in trained(simulation)] == [0, 2, 3, 4]
    simulation.lose("b")
    assert not trained(simulation)
    assert "without a worker: client 0 (a), client 2 (a)" in simulation.reason
    simulation.come("c")
    simulation.complete()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_accepted_updates_stand_in_client_order(order: tuple[int, ...]) -> None:
    simulation = opened(FEDERATED, "a", "b")
    effects = trained(simulation)
    simulation.report(do(effects[order[0]]))
    again = simulation.refusal(do(effects[order[0]]))
    assert again.reason == f"client {order[0]} has answered round 1 already"
    simulation.report(*(do(effects[client]) for client in order[1:]))
    assert accepted(simulation) == [0, 1, 2, 3]
    assert [a.num_samples for a in simulation.fact(f.RoundClosed).accepted] == [10, 11, 12, 13]


def test_what_no_round_waits_for_is_refused() -> None:
    simulation = opened(FEDERATED, "a")
    answer = simulation.refusal(f.PartyFailed(party=Party("client9"), reason="E: m"))
    assert answer == Refusal(RefusalKind.STALE, "no round waits for PartyFailed")


# ---- processes that end ----


@pytest.mark.parametrize("moves", [False, True])
def test_client_that_ends_three_processes_is_rejected_alone(moves: bool) -> None:
    simulation = opened({**FEDERATED, "num_clients": 2}, "a", "b")
    num_deaths = 0
    while not simulation.facts(f.UpdateRejected):
        assert num_deaths < 3
        # Lost, the client moves to the other worker; that one is lost, too, and brings it back.
        name, number = ("ab"[num_deaths % 2], num_deaths // 2) if moves else ("a", num_deaths)
        if moves:
            simulation.lose([name], number, reason="connection lost")
        told = ending(name, number, status=-6, run_id=RUN, party="client0")
        simulation.tell(register(name, number + 1, told))
        num_deaths += 1
    assert num_deaths == 3
    rejected = simulation.fact(f.UpdateRejected)
    assert (rejected.client, rejected.cause) == (0, "crashed")
    assert rejected.reason.startswith("it has ended 3 worker processes; the last one, ")
    assert rejected.reason.endswith(" ended by SIGABRT")
    assert not simulation.record.is_reproducible
    (other,) = trained(simulation)
    assert other.client == 1
    simulation.report(do(other))
    simulation.complete()


def test_all_that_a_worker_had_to_do_is_suspected_where_nobody_knows_what_it_did() -> None:
    simulation = opened({**FEDERATED, "num_clients": 4}, "a", "b")
    simulation.come("a", 1)
    deaths = simulation.record.value.losses.deaths
    assert {task: each.num for task, each in deaths.items()} == {"client 0": 1, "client 2": 1}
    told = ending("b", 0, run_id=RUN, party="client3", status=-9)
    simulation.tell(register("b", 1, told))
    deaths = simulation.record.value.losses.deaths
    assert deaths["client 3"].num == 1
    assert "client 1" not in deaths


def test_a_build_that_ends_every_process_which_tries_it_fails_the_run() -> None:
    simulation = start(job_text(FEDERATED), "a")
    for number in range(3):
        assert simulation.record.ended is None
        simulation.queue.clear()
        simulation.tell(register("a", number + 1, ending("a", number, status=-11, run_id=RUN)))
    assert simulation.record.ended is RunPhase.FAILED
    assert simulation.record.reason == (
        "round 0: the build has ended 3 worker processes; the last one, a, ended by SIGSEGV"
    )


def test_a_new_helper_evaluates_the_oldest_state_first() -> None:
    """It would refuse one that comes after a newer one, for ever."""
    simulation = start(job_text(FEDERATED, evaluation=EVALUATION), "a", "b")
    while simulation.record.value.round_num < 3:
        report = simulation.queue.popleft()
        if not isinstance(report.fact, f.Evaluated):
            simulation.tell(report)
    simulation.lose("a")
    for segment in (1, 2):
        effect = simulation.due_one(EvaluateState)
        assert (effect.base.segment, effect.members) == (segment, (member("b"),))
        simulation.report(do(effect))
    simulation.complete()
    assert [fact.segment for fact in simulation.facts(f.Evaluated)] == [1, 2, 3]


# ---- evaluation by clients ----


def test_clients_with_local_rows_evaluate_themselves() -> None:
    """What two clients say of a state, in any order, becomes one weighted mean."""
    simulation = local(3, 2, evaluation={"split": "test", "metrics": ["perplexity"]})
    simulation.sites("abc")
    simulation.complete()
    said = simulation.facts(f.ClientEvaluated)
    assert {(fact.segment, fact.client) for fact in said} == {
        (segment, client) for segment in (1, 2) for client in range(3)
    }
    for fact in simulation.facts(f.Evaluated):
        assert without_spreads(fact.metrics) == {"test.loss": 2.0, "test.perplexity": exp(2.0)}
    assert len(simulation.facts(f.Evaluated)) == 2
    some = local(2, evaluation={**EVALUATION, "every": "2 rounds"})
    some.sites("ab")
    some.complete()
    assert [fact.segment for fact in some.facts(f.Evaluated)] == [2, 3], "the rounds that are due"


def test_evaluation_waits_for_a_client_that_is_away() -> None:
    simulation = local(2, 1, evaluation=EVALUATION)
    simulation.sites("ab")
    simulation.until(f.ClientEvaluated)
    simulation.queue.clear()
    first = simulation.fact(f.ClientEvaluated)
    other = "ab"[1 - first.client]
    simulation.lose(other)
    assert not pending(simulation.state)
    simulation.sites(other, 1)
    effect = simulation.due_one(EvaluateState)
    assert (effect.client, effect.members) == (1 - first.client, (member(other, 1),))
    simulation.complete()


def test_states_that_wait_for_clients_that_are_gone_are_kept_within_bounds() -> None:
    """Clients go one after the other, each before it has evaluated the newest state, and rounds go
    on without them."""
    options = {"quorum": 1, "round_deadline_s": 60.0}
    simulation = local(5, 8, options, evaluation=EVALUATION, retention=2)
    simulation.sites("abcde")

    def after(num_commits: int, without: str) -> list[f.SegmentCommitted]:
        """Go on to so many commits, while these clients say nothing."""
        while len(committed := simulation.facts(f.SegmentCommitted)) < num_commits:
            for report in simulation.queue.copy():
                client = getattr(report.fact, "client", None)
                if client is not None and "abcde"[client] in without:
                    simulation.queue.remove(report)
            if simulation.queue:
                simulation.step()
            else:
                simulation.tick(simulation.now_s + 61.0)
        return committed

    def waiting() -> list[int]:
        return [*simulation.record.value.evaluations]

    for number, name in enumerate("bcde", start=1):
        after(number, without="bcde"[: number - 1])
        simulation.lose(name)
    assert waiting() == [1, 2, 3, 4]
    after(5, without="bcde")
    assert waiting() == [2, 3, 4, 5], "a client had a part in round 4, which is no long time ago"
    committed = after(8, without="bcde")
    simulation.run()
    assert waiting() == [3, 4]
    given_up = [fact for fact in simulation.facts(f.Evaluated) if fact.without]
    assert [(fact.segment, fact.without) for fact in given_up] == [(1, (1,)), (2, (2,))]
    live = live_blobs(simulation.state)
    assert {it.segment for it in committed if it.digest in live} == {3, 4, 7, 8}
    assert not simulation.record.is_reproducible
    assert sentence(given_up[0]) == (
        "segment 1 evaluated without client 1, away too long: test.loss 2 (clients 2 to 2)"
    )
    assert "round 3 waits to be evaluated by client 3 (d), not here" in simulation.reason
    simulation.tell(CancelRun(RUN))
    simulation.run()
    kept = {it.digest for it in committed if it.segment in (3, 4)}
    assert kept <= live_blobs(simulation.state), "a run that is stopped may go on"
    simulation.tell(ResumeRun(RUN))
    simulation.crash()
    simulation.sites("de", 1)
    simulation.complete()
    assert not kept & live_blobs(simulation.state)
