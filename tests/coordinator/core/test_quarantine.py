"""Workers that are marked or quarantined: both belong to a name, and end with a release only."""

from dataclasses import replace

import pytest

from stratagem.common.base.ids import RunId, WorkerId
from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import decide
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.apply import CLUSTER, apply
from stratagem.coordinator.core.commands import JournalEntry
from stratagem.coordinator.core.fact_text import decode, encode, sentence
from stratagem.coordinator.core.retention import summary_of
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.world import RunPhase, WorkerRecord
from stratagem.coordinator.strategies.synchronous.local import STRATEGY as local
from tests.coordinator.core.jobs import DATA_PARALLEL, FEDERATED, LOCAL, job_text
from tests.coordinator.core.raising_strategies import with_local
from tests.coordinator.core.simulation import RUN, Simulation, member, register, start, trained

pytestmark = pytest.mark.core

A = WorkerId("a")
MARKED = f.WorkerMarked(worker_id=A, reason="segment 2 was refuted", run_id=RUN)
QUARANTINED = f.WorkerQuarantined(worker_id=A, reason="computes wrongly", run_id=RUN)
RELEASED = f.WorkerReleased(worker_id=A, by="client ops")


def happens(simulation: Simulation, *facts: f.Fact) -> None:
    """At second 9."""
    simulation.now_s = 9.0
    simulation.happen(*facts)


def of_a(simulation: Simulation) -> WorkerRecord:
    return simulation.state.workers[A]


def test_both_outlast_every_process_of_the_name_and_a_release_forgets_them() -> None:
    simulation = Simulation()
    simulation.come("ab")
    happens(simulation, MARKED, QUARANTINED)
    assert (of_a(simulation).quarantine, of_a(simulation).marked_s) == ("computes wrongly", 9.0)
    assert [w.member for w in simulation.agenda.world.usable()] == [member("b")]
    assert not simulation.agenda.world.holds(member("a"))
    assert simulation.tell(register("a")) == (), "its own repeated registration is no news"
    for number in (1, 2):
        simulation.come("a", number)
        assert of_a(simulation).member == member("a", number)
        assert (of_a(simulation).quarantine, of_a(simulation).marked_s) == ("computes wrongly", 9.0)
        simulation.lose("a", number)
        assert of_a(simulation).quarantine == "computes wrongly"
    simulation.come("a", 3)
    simulation.crash()
    happens(simulation, RELEASED)
    assert (of_a(simulation).quarantine, of_a(simulation).marked_s) == ("", 0.0)
    assert of_a(simulation).is_usable
    simulation.crash()


@pytest.mark.parametrize("fact", [MARKED, QUARANTINED])
@pytest.mark.parametrize("drains", [True, False])
def test_who_leaves_is_remembered_but_is_neither_alive_nor_lost(fact: f.Fact, drains: bool) -> None:
    simulation = Simulation()
    simulation.come("a")
    happens(simulation, fact)
    kept = (of_a(simulation).quarantine, of_a(simulation).marked_s)
    if drains:
        simulation.tell(c.DrainWorker(member("a")))
    simulation.tell(c.LeaveWorker(member("a"), "drained"))
    left = of_a(simulation)
    assert (left.has_left, left.is_listed) == (True, fact is QUARANTINED)
    assert (left.is_alive, left.reason, left.lost_s) == (False, "drained", 9.0)
    assert simulation.tell(c.LeaveWorker(member("a"), "drained")) == ()
    assert simulation.tell(c.LoseWorker(member("a"), "silent")) == ()
    simulation.come("a", 1)
    assert not of_a(simulation).has_left
    assert (of_a(simulation).quarantine, of_a(simulation).marked_s) == kept
    simulation.tell(c.LeaveWorker(member("a", 1), "drained"))
    happens(simulation, RELEASED)
    assert simulation.state.workers == {}, "nothing is left to remember"


def test_a_fact_about_an_unknown_worker_changes_nothing() -> None:
    simulation = Simulation()
    simulation.come("b")
    before = simulation.state
    for fact in (MARKED, QUARANTINED, RELEASED):
        assert apply(before, CLUSTER, fact, 9.0) == before


def test_a_quarantined_worker_is_never_forgotten_and_a_marked_one_as_others() -> None:
    simulation = Simulation()
    simulation.come("abc")
    happens(simulation, QUARANTINED, MARKED.model_copy(update={"worker_id": "b"}))
    simulation.lose("abc")
    simulation.tell(c.ForgetWorkers(10.0, 0))
    assert set(simulation.state.workers) == {"a"}


def test_a_summary_keeps_both_and_an_earlier_one_has_neither() -> None:
    simulation = Simulation()
    simulation.come("ab")
    happens(simulation, MARKED, QUARANTINED)
    (part,) = summary_of(simulation.state)
    kind, payload = encode(part)
    read = apply(CoordinatorState(simulation.strategies), CLUSTER, decode(kind, 1, payload), 0.0)
    assert read == simulation.state
    older = {"quarantine", "marked_s"}
    workers = tuple(
        f.KnownWorker(**each.model_dump(exclude=older, round_trip=True)) for each in part.workers
    )
    read = apply(read, CLUSTER, part.model_copy(update={"workers": workers}), 0.0)
    assert (read.workers[A].quarantine, read.workers[A].marked_s) == ("", 0.0)


def test_a_run_goes_on_elsewhere_and_the_end_of_the_process_is_no_death() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    simulation.until(f.SegmentCommitted)
    happens(simulation, QUARANTINED)
    formed = simulation.facts(f.MembersFormed)[-1]
    assert formed.members == (member("b"),)
    assert formed.reason.startswith("a left, 1 of 3 workers")
    simulation.come("a", 1)
    assert simulation.facts(f.ProcessDied) == []
    assert simulation.facts(f.MembersFormed)[-1] == formed
    simulation.complete()


def test_a_run_without_other_workers_says_what_it_waits_for_until_the_release() -> None:
    simulation = start(job_text(LOCAL), "a")
    happens(simulation, QUARANTINED)
    assert "no worker is available: a (quarantined: computes wrongly)" in simulation.reason
    happens(simulation, RELEASED)
    assert simulation.facts(f.MembersFormed)[-1].members == (member("a"),)
    simulation.complete()


def test_clients_of_a_quarantined_worker_train_elsewhere() -> None:
    simulation = start(job_text(FEDERATED), "a", "b")
    simulation.alone()
    assert {each.member for each in trained(simulation)} == {member("a"), member("b")}
    happens(simulation, QUARANTINED)
    assert {each.member for each in trained(simulation)} == {member("b")}


def test_what_a_strategy_decides_about_a_worker_is_a_fact_of_the_cluster() -> None:
    """The run's own facts follow, with the world after it."""
    wary = replace(
        local,
        decide=lambda job, run, world, now_s: (
            QUARANTINED.model_copy(update={"run_id": RunId("")})
            if world.workers and not world.workers[A].quarantine
            else local.decide(job, run, world, now_s)
        ),
    )
    simulation = start(job_text(LOCAL), "a", "b", strategies=with_local(wary))
    assert [(run_id, kind) for run_id, kind, _, _ in simulation.journal[3:5]] == [
        (CLUSTER, "WorkerQuarantined"),
        (RUN, "MembersFormed"),
    ]
    assert simulation.fact(f.WorkerQuarantined) == QUARANTINED
    assert simulation.fact(f.MembersFormed).members == (member("b"),)
    simulation.complete()


def test_a_strategy_that_never_ends_marking_fails_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "MAX_DECISIONS", 7)
    circling = replace(local, decide=lambda *_: MARKED)
    simulation = start(job_text(LOCAL), strategies=with_local(circling))
    assert len(simulation.facts(f.WorkerMarked)) == 7
    assert simulation.record.ended is RunPhase.FAILED
    assert simulation.record.reason.endswith("7 facts, the next one WorkerMarked")


def test_a_release_names_its_caller_and_is_refused_for_others() -> None:
    simulation = Simulation()
    simulation.come("ab")
    happens(simulation, QUARANTINED, MARKED.model_copy(update={"worker_id": "b"}))
    told = {name: c.ReleaseWorker(WorkerId(name), "client ops") for name in ("a", "b", "c")}
    assert [simulation.refusal(told[name]) for name in ("c", "b")] == [
        c.Refusal(c.RefusalKind.NOT_FOUND, "worker 'c' is not known"),
        c.Refusal(c.RefusalKind.PRECONDITION, "worker 'b' is not quarantined"),
    ]
    assert simulation.tell(told["a"]) == (JournalEntry(CLUSTER, RELEASED),)
    assert of_a(simulation).is_usable
    simulation.refusal(told["a"])


def test_the_sentences_name_the_worker_and_the_reason() -> None:
    assert [sentence(fact) for fact in (MARKED, QUARANTINED, RELEASED)] == [
        "worker a is marked by run run-1: segment 2 was refuted",
        "worker a is quarantined by run run-1: computes wrongly",
        "worker a released from quarantine by client ops",
    ]
