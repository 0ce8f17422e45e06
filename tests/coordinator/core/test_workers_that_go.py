"""Workers that come and go: who has left or was forgotten takes no place, and harms no run."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from stratagem.common.base.ids import WorkerId
from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.apply import apply
from stratagem.coordinator.core.decide import Agenda
from stratagem.coordinator.core.effects import Release
from stratagem.coordinator.core.fact_text import decode
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.state import CoordinatorState
from tests.coordinator.core.jobs import DATA_PARALLEL, FEDERATED, LOCAL, job_text
from tests.coordinator.core.simulation import RUN, Simulation, ending, member, register, start

pytestmark = pytest.mark.core


ALL = 1_000


@pytest.mark.parametrize("drains", [True, False])
def test_a_worker_that_leaves_is_not_lost_and_leaves_nothing_behind(drains: bool) -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    if drains:
        simulation.tell(c.DrainWorker(member("a")))
    simulation.tell(c.LeaveWorker(member("a"), "drained"))
    assert set(simulation.state.workers) == {"b"}
    assert simulation.facts(f.WorkerLost) == []
    assert simulation.facts(f.MembersFormed)[-1].members == (member("b"),)
    assert simulation.tell(c.LeaveWorker(member("a"), "drained")) == ()
    assert simulation.tell(c.LoseWorker(member("a"), "silent")) == ()
    assert simulation.tell(c.DrainWorker(member("a"))) == ()
    simulation.crash()
    simulation.come("a", 1)
    assert simulation.facts(f.ProcessDied) == []
    simulation.complete()


def test_silence_while_draining_is_no_loss_and_an_earlier_start_cannot_leave() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(c.DrainWorker(member("a")))
    simulation.lose("a", reason="no heartbeat for 10 s")
    kinds = [kind for kind in simulation.kinds() if kind.startswith("Worker")]
    assert kinds == ["WorkerRegistered", "WorkerDraining", "WorkerLeft"]
    assert simulation.state.workers == {}
    simulation = start(job_text(LOCAL), "a")
    simulation.come("a", 1)
    assert simulation.tell(c.LeaveWorker(member("a"), "late")) == ()
    assert simulation.state.workers[member("a").worker_id].member == member("a", 1)


def test_who_was_lost_long_ago_is_forgotten_and_a_replay_agrees() -> None:
    simulation = start(job_text(LOCAL), "a", "b", "c")
    simulation.lose("b")
    simulation.now_s = 100.0
    simulation.lose("c")
    assert simulation.tell(c.ForgetWorkers(0.0, ALL)) == ()
    simulation.tell(c.ForgetWorkers(50.0, ALL))
    assert simulation.fact(f.WorkersForgotten).names == ("b",)
    assert set(simulation.state.workers) == {"a", "c"}
    simulation.crash()
    simulation.tell(c.ForgetWorkers(101.0, ALL))
    assert set(simulation.state.workers) == {"a"}, "its time of loss is in the journal, too"
    simulation.come("b", 1)
    assert set(simulation.state.workers) == {"a", "b"}


def test_whose_name_does_not_come_back_is_forgotten_earlier_and_only_so_many_are_kept() -> None:
    simulation = Simulation()
    simulation.come("a")
    simulation.come("b", ephemeral=True)
    simulation.now_s = 100.0
    simulation.lose("ab")
    simulation.tell(c.ForgetWorkers(50.0, ALL, 100.0))
    assert set(simulation.state.workers) == {"a", "b"}
    simulation.tell(c.ForgetWorkers(50.0, ALL, 101.0))
    assert set(simulation.state.workers) == {"a"}
    simulation.tell(c.ForgetWorkers(101.0, ALL))
    assert simulation.state.workers == {}
    for number, name in enumerate("dcba"):
        simulation.come(name)
        simulation.now_s = float(number)
        simulation.lose(name)
    simulation.come("e")
    simulation.tell(c.ForgetWorkers(-1.0, 2))
    assert set(simulation.state.workers) == {"a", "b", "e"}, "the newest ones are kept"


def test_who_has_data_that_an_active_run_trains_on_is_kept_until_the_run_ends() -> None:
    ward = {"data": {"worker_local": "ward"}}
    simulation = start(job_text({**FEDERATED, "num_clients": 2}, **ward))
    simulation.sites("ab")
    simulation.come("c", local_data=("other",))
    simulation.lose("bc")
    simulation.tell(c.ForgetWorkers(1.0, ALL))
    assert set(simulation.state.workers) == {"a", "b"}
    simulation.tell(c.CancelRun(RUN))
    simulation.tell(c.ForgetWorkers(1.0, ALL))
    assert set(simulation.state.workers) == {"a"}


def test_the_agenda_keeps_no_load_of_workers_that_were_loaded_once() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a")
    simulation.step()
    assert simulation.facts(f.ModelBuilt)
    for number in range(10):
        name = f"passing-{number}"
        simulation.come([name])
        assert simulation.agenda.world.load == {"a": 1, name: 1}
        simulation.tell(c.LeaveWorker(member(name), "drained"))
    assert list(simulation.agenda.world.load.items()) == [(WorkerId("a"), 1)]
    assert list(simulation.agenda._load) == [WorkerId("a")], "every change walks them all"
    simulation.run()
    assert not simulation.agenda._load


def test_a_run_keeps_no_earlier_starts_of_its_workers() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    simulation.step()
    for number in range(1, 6):
        simulation.tell(register("a", number, ending("a", number - 1, status=-9)))
        assert simulation.facts(f.ProcessDied)[-1].member == member("a", number - 1)
        simulation.tell(c.LeaveWorker(member("b", number - 1), "drained"))
        simulation.come("b", number)
    now = {member("a", 5), member("b", 5)}
    assert simulation.record.touched == now
    simulation.lose("a", 5, reason="silent")
    assert simulation.record.touched == now, "it may come back, with what it holds"
    simulation.crash()
    assert _read_back(simulation).runs[RUN].touched == now
    simulation.tell(c.CancelRun(RUN))
    simulation.come("a", 6)
    assert Release(RUN, frozenset(now)) in pending(simulation.state), "a release is as it began"
    simulation.run()
    assert simulation.record.is_released


def _read_back(simulation: Simulation) -> CoordinatorState:
    """The state as a coordinator reads it from its journal: all facts of the cluster, then those of
    each run."""
    state = CoordinatorState(simulation.strategies)
    for run_id, kind, payload, time_s in sorted(simulation.journal, key=lambda fact: fact[0]):
        state = apply(state, run_id, decode(kind, 1, payload), time_s)
    return state


class Walked(frozenset[f.Member]):
    """Members that count how often somebody walks through them all."""

    num_walks = 0

    def __iter__(self) -> Iterator[f.Member]:
        self.num_walks += 1
        return super().__iter__()


def test_a_change_of_workers_walks_through_none_that_a_run_has_used() -> None:
    """Of workers whose names do not come back a run keeps those that were forgotten."""
    simulation = start(job_text(LOCAL), "a")
    simulation.step()
    run = simulation.record
    assert run.touched == {member("a")}
    used = Walked({member("a"), *(member(f"gone-{number}") for number in range(100))})
    simulation.state = replace(simulation.state, runs={RUN: replace(run, touched=used)})
    simulation.agenda = Agenda(simulation.state)
    used.num_walks = 0
    simulation.come("b")
    simulation.tell(register("gone-7"))
    assert simulation.agenda.world.load == {"a": 1, "gone-7": 1}
    simulation.lose("b", reason="silent")
    simulation.tell(c.ForgetWorkers(1.0, ALL))
    assert (set(simulation.state.workers), used.num_walks) == ({"a", "gone-7"}, 0)
    simulation.come("a", 1)
    assert simulation.agenda.world.load == {"a": 1, "gone-7": 1}
    simulation.complete()
