"""Federated rounds in the pure core: selection, assignment, quorum, deadline, late results."""

from collections import deque
from math import exp

import pytest

from stratagem.common.base.ids import Party, WorkerId
from stratagem.common.job.evaluation.client_spread import without_spreads
from stratagem.common.strategy import All, ByCapability, Random
from stratagem.coordinator.core.commands import (
    CancelRun,
    LoseWorker,
    Refusal,
    RefusalKind,
    Report,
    ResumeRun,
    Tick,
)
from stratagem.coordinator.core.effects import EvaluateState
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    ROOT,
    ClientBinding,
    ClientEvaluated,
    ClientsAssigned,
    ClientsSelected,
    Evaluated,
    ModelBuilt,
    PartyFailed,
    RosterFormed,
    RoundClosed,
    SegmentCommitted,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from stratagem.coordinator.strategies.federated.client_selection import select
from stratagem.coordinator.strategies.federated.federated_run import MAX_CLIENTS_AHEAD
from tests.coordinator.core.ask_every_run import next_deadline
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import (
    RUN,
    do,
    ending,
    member,
    phase,
    reason,
    register,
    start,
)
from tests.coordinator.strategies.open_round import opened, trained

pytestmark = pytest.mark.core

W = WorkerId("w")
ROSTER = tuple(
    ClientBinding(client=c, worker_id=W, tags=("gpu",) if c % 2 else ()) for c in range(10)
)


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
    assert [(e.client, e.member.worker_id) for e in trained(simulation)] == [
        (0, "a"),
        (1, "b"),
        (2, "a"),
        (3, "b"),
    ]
    kept = {e.client: e for e in trained(simulation)}
    simulation.tell(LoseWorker(member("b"), "killed"))
    moved = {e.client: e for e in trained(simulation)}
    assert moved[0] == kept[0]
    assert {e.member.worker_id for e in moved.values()} == {"a"}
    assert moved[1].membership > kept[1].membership
    assert phase(simulation) is RunPhase.RUNNING


def test_worker_local_clients_wait_for_their_worker() -> None:
    simulation = start(job_text({**FEDERATED, "num_clients": 2}, data={"worker_local": "ward"}))
    simulation.tell(register("a", local_data=("ward",)))
    simulation.tell(register("b"))
    simulation.run()
    assert phase(simulation) is RunPhase.PLACING
    assert reason(simulation) == "2 workers with data 'ward' are needed, 1 are here"
    assert not simulation.facts(ModelBuilt)
    simulation.tell(register("c", local_data=("ward",)))
    simulation.tell(simulation.queue.popleft())  # the model is built
    (roster,) = simulation.facts(RosterFormed)
    assert [binding.worker_id for binding in roster.clients] == ["a", "c"]
    simulation.queue.clear()
    simulation.tell(LoseWorker(member("c"), "killed"))
    assert [e.member.worker_id for e in trained(simulation)] == ["a"]
    assert "without a worker: client 1 (c)" in reason(simulation)
    simulation.tell(register("c", start=1, local_data=("ward",)))
    assert [e.member for e in trained(simulation)] == [member("a"), member("c", 1)]


def test_by_capability_waits_for_the_tags() -> None:
    strategy = {
        **FEDERATED,
        "client_selection": {"method": "ByCapability", "required_tags": ["gpu"]},
    }
    simulation = start(job_text(strategy), "a")
    simulation.run()
    assert reason(simulation) == "no client has a worker with the tags gpu"
    simulation.tell(register("g", tags=("gpu", "big")))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    assert all(
        {a.member.worker_id for a in fact.assignments if a.member} == {"g"}
        for fact in simulation.facts(ClientsAssigned)
    )


def test_deadline_with_quorum_leaves_the_late_out_and_says_so() -> None:
    strategy = {**FEDERATED, "options": {"quorum": 0.5, "round_deadline_s": 60.0}}
    simulation = opened(strategy, "a", "b")
    effects = trained(simulation)
    for effect in effects[:2]:
        simulation.tell(Report(RUN, do(effect)[0]))
    assert next_deadline(simulation.state) == 60.0
    simulation.now_s = 59.9
    simulation.tell(Tick())
    assert not simulation.facts(RoundClosed)
    simulation.now_s = 60.0
    simulation.tell(Tick())
    (closed,) = simulation.facts(RoundClosed)
    assert closed.reason == "round 1: 2 of 4 updates, deadline passed"
    assert [a.client for a in closed.accepted] == [0, 1]
    assert not simulation.state.runs[RUN].is_reproducible
    late = simulation.tell(Report(RUN, do(effects[3])[0]))
    assert isinstance(late, Refusal)
    assert late.reason == "round 1 is closed"


def test_over_selection_closes_with_the_first_that_suffice() -> None:
    strategy = {
        **FEDERATED,
        "num_clients": 8,
        "client_selection": {"method": "Random", "fraction": 0.25},
        "options": {"over_select": 3},
    }
    simulation = opened(strategy, "a", "b")
    (selected,) = simulation.facts(ClientsSelected)
    assert len(selected.clients) == 5
    assert selected.num_needed == 2
    effects = trained(simulation)
    for effect in effects[3:]:
        simulation.tell(Report(RUN, do(effect)[0]))
    (closed,) = simulation.facts(RoundClosed)
    assert [a.client for a in closed.accepted] == [e.client for e in effects[3:]]
    assert closed.reason == "round 1: 2 of 5 updates, 2 suffice"
    assert closed.by_policy
    late = simulation.tell(Report(RUN, do(effects[0])[0]))
    assert isinstance(late, Refusal)


def test_over_selection_with_a_quorum_needs_that_share_of_the_wanted() -> None:
    strategy = {
        **FEDERATED,
        "num_clients": 8,
        "client_selection": {"method": "Random", "fraction": 0.5},
        "options": {"over_select": 9, "quorum": 0.5},
    }
    (selected,) = opened(strategy, "a").facts(ClientsSelected)
    assert (len(selected.clients), selected.num_needed) == (8, 2)


def test_over_selection_that_is_answered_in_full_is_no_policy() -> None:
    strategy = {
        **FEDERATED,
        "num_clients": 3,
        "client_selection": {"method": "Random", "fraction": 0.7},
        "options": {"over_select": 1},
    }
    simulation = opened(strategy, "a")
    first, *others = trained(simulation)
    rejected = UpdateRejected(party=ROOT, round_num=1, client=first.client, reason="not finite")
    simulation.tell(Report(RUN, rejected))
    for effect in others:
        simulation.tell(Report(RUN, do(effect)[0]))
    (closed,) = simulation.facts(RoundClosed)
    assert len(closed.accepted) == 2
    assert not closed.by_policy


def test_clients_with_local_rows_evaluate_themselves() -> None:
    """What two clients say of a state, in any order, becomes one weighted mean."""
    data = {"worker_local": "ward"}
    evaluation = {"split": "test", "metrics": ["perplexity"]}
    text = job_text({**FEDERATED, "num_clients": 3, "rounds": 2}, data=data, evaluation=evaluation)
    simulation = start(text)
    for name in "abc":
        simulation.tell(register(name, local_data=("ward",)))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    said = simulation.facts(ClientEvaluated)
    assert {(fact.segment, fact.client) for fact in said} == {
        (segment, client) for segment in (1, 2) for client in range(3)
    }
    for fact in simulation.facts(Evaluated):
        assert without_spreads(fact.metrics) == {"test.loss": 2.0, "test.perplexity": exp(2.0)}
    assert len(simulation.facts(Evaluated)) == 2


def test_evaluation_waits_for_a_client_that_is_away() -> None:
    data, evaluation = {"worker_local": "ward"}, {"split": "test", "metrics": []}
    text = job_text({**FEDERATED, "num_clients": 2, "rounds": 1}, data=data, evaluation=evaluation)
    simulation = start(text)
    simulation.tell(register("a", local_data=("ward",)))
    simulation.tell(register("b", local_data=("ward",)))
    while not simulation.facts(ClientEvaluated):
        simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    (first,) = simulation.facts(ClientEvaluated)
    other = "ab"[1 - first.client]
    simulation.tell(LoseWorker(member(other), "killed"))
    assert not pending(simulation.state)
    simulation.tell(register(other, start=1, local_data=("ward",)))
    (effect,) = pending(simulation.state)
    assert isinstance(effect, EvaluateState)
    assert (effect.client, effect.members) == (1 - first.client, (member(other, 1),))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED


def test_a_state_that_waits_for_an_evaluation_is_kept_while_nobody_does_it() -> None:
    """Rounds go on without the client that is away, and supersede what it has to evaluate."""
    data, evaluation = {"worker_local": "ward"}, {"split": "test", "metrics": []}
    options = {"quorum": 1, "round_deadline_s": 60.0}
    strategy = {**FEDERATED, "num_clients": 2, "rounds": 3, "options": options}
    simulation = start(job_text(strategy, data=data, evaluation=evaluation, retention=1))
    simulation.tell(register("a", local_data=("ward",)))
    simulation.tell(register("b", local_data=("ward",)))
    while not (committed := simulation.facts(SegmentCommitted)):
        simulation.tell(simulation.queue.popleft())
    simulation.queue = deque(
        report
        for report in simulation.queue
        if not (isinstance(report.fact, ClientEvaluated | UpdateReceived) and report.fact.client)
    )
    simulation.tell(LoseWorker(member("b"), "killed"))
    while len(simulation.facts(SegmentCommitted)) < 2:
        simulation.run()
        simulation.now_s += 61.0
        simulation.tell(Tick())
    assert committed[0].digest in live_blobs(simulation.state)
    simulation.tell(CancelRun(RUN))
    simulation.run()
    assert committed[0].digest in live_blobs(simulation.state)
    simulation.tell(ResumeRun(RUN))
    simulation.tell(register("b", start=1, local_data=("ward",)))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    assert committed[0].digest not in live_blobs(simulation.state)


def test_states_that_wait_for_clients_that_are_gone_are_kept_within_bounds() -> None:
    """Clients go one after the other, each before it has evaluated the newest state, and rounds go
    on without them."""
    data, evaluation = {"worker_local": "ward"}, {"split": "test", "metrics": []}
    options = {"quorum": 1, "round_deadline_s": 60.0}
    strategy = {**FEDERATED, "num_clients": 5, "rounds": 8, "options": options}
    simulation = start(job_text(strategy, data=data, evaluation=evaluation, retention=2))
    for name in "abcde":
        simulation.tell(register(name, local_data=("ward",)))

    def after(num_commits: int, without: str) -> list[SegmentCommitted]:
        """Go on to so many commits, while these clients say nothing."""
        while len(committed := simulation.facts(SegmentCommitted)) < num_commits:
            for report in simulation.queue.copy():
                client = getattr(report.fact, "client", None)
                if client is not None and "abcde"[client] in without:
                    simulation.queue.remove(report)
            if simulation.queue:
                simulation.tell(simulation.queue.popleft())
            else:
                simulation.now_s += 61.0
                simulation.tell(Tick())
        return committed

    def waiting() -> list[int]:
        return [base.segment for base in simulation.state.runs[RUN].value.to_evaluate]

    for number, name in enumerate("bcde", start=1):
        after(number, without="bcde"[: number - 1])
        simulation.tell(LoseWorker(member(name), "killed"))
    assert waiting() == [1, 2, 3, 4]
    after(5, without="bcde")
    assert waiting() == [2, 3, 4, 5], "a client had a part in round 4, which is no long time ago"
    committed = after(8, without="bcde")
    simulation.run()
    assert waiting() == [3, 4]
    given_up = [fact for fact in simulation.facts(Evaluated) if fact.without]
    assert [(fact.segment, fact.without) for fact in given_up] == [(1, (1,)), (2, (2,))]
    live = live_blobs(simulation.state)
    assert {f.segment for f in committed if f.digest in live} == {3, 4, 7, 8}
    run = simulation.state.runs[RUN]
    assert not run.is_reproducible
    assert sentence(given_up[0]) == (
        "segment 1 evaluated without client 1, away too long: test.loss 2 (clients 2 to 2)"
    )
    assert "round 3 waits to be evaluated by client 3 (d), not here" in reason(simulation)
    before = simulation.state.runs
    simulation.crash()
    assert simulation.state.runs == before
    simulation.tell(register("d", start=1, local_data=("ward",)))
    simulation.tell(register("e", start=1, local_data=("ward",)))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED


def test_few_clients_of_a_worker_are_due_at_once() -> None:
    simulation = opened({**FEDERATED, "num_clients": 11}, "a", "b")
    assert [(e.client, e.member.worker_id) for e in trained(simulation)] == [
        (client, "ab"[client % 2]) for client in range(2 * MAX_CLIENTS_AHEAD)
    ]
    simulation.tell(Report(RUN, do(trained(simulation)[1])[0]))
    assert [e.client for e in trained(simulation)] == [0, 2, 3, 4, 5, 6, 7, 9]
    simulation.tell(LoseWorker(member("a"), "killed"))
    assert {e.member.worker_id for e in trained(simulation)} == {"b"}
    assert [e.client for e in trained(simulation)] == [0, 2, 3, 4]
    simulation.tell(LoseWorker(member("b"), "killed"))
    assert not trained(simulation)
    assert "without a worker: client 0 (a), client 2 (a)" in reason(simulation)
    simulation.tell(register("c"))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED


def test_deadline_without_quorum_fails_with_the_count() -> None:
    strategy = {**FEDERATED, "options": {"quorum": 3, "round_deadline_s": 60.0}}
    simulation = opened(strategy, "a")
    simulation.tell(Report(RUN, do(trained(simulation)[0])[0]))
    simulation.now_s = 61.0
    simulation.tell(Tick())
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == "round 1: 1 of 4 updates, deadline passed; 3 are needed"


def test_rejected_client_is_left_out_alone() -> None:
    simulation = opened(FEDERATED, "a")
    first, *others = trained(simulation)
    rejected = UpdateRejected(party=ROOT, round_num=1, client=first.client, reason="not finite")
    simulation.tell(Report(RUN, rejected))
    for effect in others:
        simulation.tell(Report(RUN, do(effect)[0]))
    (closed,) = simulation.facts(RoundClosed)
    assert [a.client for a in closed.accepted] == [1, 2, 3]
    assert closed.reason == "round 1: 3 of 4 updates, 1 rejected (client 0: not finite)"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_accepted_updates_stand_in_client_order(order: tuple[int, ...]) -> None:
    simulation = opened(FEDERATED, "a", "b")
    effects = trained(simulation)
    for client in order:
        simulation.tell(Report(RUN, do(effects[client])[0]))
    (closed,) = simulation.facts(RoundClosed)
    assert [a.client for a in closed.accepted] == [0, 1, 2, 3]
    assert [a.num_samples for a in closed.accepted] == [10, 11, 12, 13]


def test_second_answer_of_a_client_is_refused() -> None:
    simulation = opened(FEDERATED, "a")
    fact = do(trained(simulation)[0])[0]
    simulation.tell(Report(RUN, fact))
    again = simulation.tell(Report(RUN, fact))
    assert isinstance(again, Refusal)
    assert again.reason == "client 0 has answered round 1 already"


def test_random_rounds_select_from_the_roster() -> None:
    strategy = {**FEDERATED, "client_selection": {"method": "Random", "fraction": 0.5}}
    simulation = start(job_text(strategy), "a", "b")
    simulation.run()
    assert [len(fact.clients) for fact in simulation.facts(ClientsSelected)] == [2, 2, 2]


@pytest.mark.parametrize("moves", [False, True])
def test_client_that_ends_three_processes_is_rejected_alone(moves: bool) -> None:
    simulation = opened({**FEDERATED, "num_clients": 2}, "a", "b")
    num_deaths = 0
    while not simulation.facts(UpdateRejected):
        assert num_deaths < 3
        # Lost, the client moves to the other worker; that one is lost, too, and brings it back.
        name, number = ("ab"[num_deaths % 2], num_deaths // 2) if moves else ("a", num_deaths)
        if moves:
            simulation.tell(LoseWorker(member(name, number), "connection lost"))
        told = ending(name, number, status=-6, run_id=RUN, party="client0")
        simulation.tell(register(name, number + 1, told))
        num_deaths += 1
    assert num_deaths == 3
    (rejected,) = simulation.facts(UpdateRejected)
    assert (rejected.client, rejected.cause) == (0, "crashed")
    assert rejected.reason.startswith("it has ended 3 worker processes; the last one, ")
    assert rejected.reason.endswith(" ended by SIGABRT")
    assert not simulation.state.runs[RUN].is_reproducible
    (other,) = trained(simulation)
    assert other.client == 1
    simulation.tell(Report(RUN, do(other)[0]))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_all_that_a_worker_had_to_do_is_suspected_where_nobody_knows_what_it_did() -> None:
    simulation = opened({**FEDERATED, "num_clients": 4}, "a", "b")
    simulation.tell(register("a", 1))
    value = simulation.state.runs[RUN].value
    assert {task: deaths.num for task, deaths in value.deaths.items()} == {
        "client 0": 1,
        "client 2": 1,
    }
    told = ending("b", 0, run_id=RUN, party="client3", status=-9)
    simulation.tell(register("b", 1, told))
    value = simulation.state.runs[RUN].value
    assert value.deaths["client 3"].num == 1
    assert "client 1" not in value.deaths


def test_a_build_that_ends_every_process_which_tries_it_fails_the_run() -> None:
    simulation = start(job_text(FEDERATED), "a")
    for number in range(3):
        assert simulation.state.runs[RUN].ended is None
        simulation.queue.clear()
        told = ending("a", number, status=-11, run_id=RUN)
        simulation.tell(register("a", number + 1, told))
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == (
        "round 0: the build has ended 3 worker processes; the last one, a, ended by SIGSEGV"
    )


def test_a_model_is_built_but_the_rounds_wait_for_the_workers_of_all_clients() -> None:
    simulation = start(job_text({**FEDERATED, "num_clients": 2}, data={"worker_local": "ward"}))
    for name in "ab":
        simulation.tell(register(name, local_data=("ward",)))
    (built,) = simulation.queue
    simulation.tell(LoseWorker(member("b"), "killed"))
    simulation.tell(built)
    assert phase(simulation) is RunPhase.PLACING
    assert reason(simulation) == "2 workers with data 'ward' are needed, 1 are here"
    simulation.tell(LoseWorker(member("a"), "killed"))
    assert reason(simulation) == "no worker is available: a (killed), b (killed)"
    for name in "ab":
        simulation.tell(register(name, start=1, local_data=("ward",)))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED


def test_a_round_that_waits_for_an_evaluation_names_who_is_away() -> None:
    data, evaluation = {"worker_local": "ward"}, {"split": "test", "metrics": []}
    text = job_text({**FEDERATED, "num_clients": 2, "rounds": 1}, data=data, evaluation=evaluation)
    simulation = start(text)
    for name in "ab":
        simulation.tell(register(name, local_data=("ward",)))
    while not simulation.facts(SegmentCommitted):
        simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    simulation.tell(LoseWorker(member("b"), "killed"))
    assert phase(simulation) is RunPhase.RUNNING
    assert reason(simulation) == "round 1 waits to be evaluated by client 1 (b), not here"


def test_what_no_round_waits_for_is_refused() -> None:
    simulation = opened(FEDERATED, "a")
    before = simulation.state
    fact = PartyFailed(party=Party("client9"), reason="E: m")
    answer = simulation.tell(Report(RUN, fact))
    assert answer == Refusal(RefusalKind.STALE, "no round waits for PartyFailed")
    assert simulation.state is before


def test_clients_with_local_rows_evaluate_the_rounds_that_are_due_and_no_others() -> None:
    evaluation = {"split": "test", "metrics": [], "every": "2 rounds"}
    text = job_text(
        {**FEDERATED, "num_clients": 2}, data={"worker_local": "w"}, evaluation=evaluation
    )
    simulation = start(text)
    for name in "ab":
        simulation.tell(register(name, local_data=("w",)))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    assert [fact.segment for fact in simulation.facts(Evaluated)] == [2, 3]
