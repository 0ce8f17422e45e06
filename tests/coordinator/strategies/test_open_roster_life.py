"""Federations with an open roster, through any order of joins, losses, refusals and crashes."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.effects import Effect, TrainClient
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.ask_every_run import next_deadline
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, do, member, rejected, trained

pytestmark = pytest.mark.core


NAMES = "abcdef"
NUM_CLIENTS = 4
"""Fewer than there are workers: not everybody can join."""
CAUSES = (Cause.EXCEPTION, Cause.NOT_FINITE, Cause.OUTSIDE_WINDOW, Cause.REFUSED_BY_SITE)
options = st.fixed_dictionaries(
    {
        "roster": st.fixed_dictionaries(
            {
                "open": st.just(True),
                "min_clients": st.integers(1, 3),
                "wait_s": st.sampled_from([40.0, 4000.0]),
            }
        )
    },
    optional={
        "strikes": st.fixed_dictionaries(
            {"limit": st.integers(1, 2), "bench_rounds": st.integers(1, 3)}
        ),
        "on_missing_quorum": st.sampled_from(["fail", "wait"]),
        "quorum": st.sampled_from([1, 2, 0.5, 1.0]),
        "over_select": st.integers(1, 2),
        "late_updates": st.just({"discount": 0.5}),
        "round_deadline_s": st.just(25.0),
    },
)
ALL = {"method": "All"}
RANDOM = {"method": "Random", "fraction": 0.6}
moves = st.lists(
    st.tuples(
        st.sampled_from(["come", "lose", "stop", "drain", "work", "fail", "late", "time", "crash"]),
        st.integers(0, 11),
    ),
    max_size=60,
)


def fitting(chosen: dict[str, Any]) -> dict[str, Any]:
    """The options without what is refused beside the others."""
    fits = dict(chosen)
    if "quorum" not in fits or fits["quorum"] == 2 > fits["roster"]["min_clients"]:
        fits.pop("quorum", None)
        fits.pop("round_deadline_s", None)
    if "round_deadline_s" not in fits and "over_select" not in fits:
        fits.pop("late_updates", None)
    return fits


def job_of(chosen: dict[str, Any], selection: dict[str, Any]) -> str:
    chosen = fitting(chosen)
    selection = RANDOM if {"over_select", "late_updates"} & chosen.keys() else selection
    strategy = {
        **FEDERATED,
        "num_clients": NUM_CLIENTS,
        "rounds": 4,
        "client_selection": selection,
        "options": chosen,
    }
    data, evaluation = {"worker_local": "ward"}, {"split": "test", "metrics": []}
    return job_text(strategy, data=data, evaluation=evaluation)


def due(simulation: Simulation) -> list[Effect]:
    return sorted(pending(simulation.state), key=repr)


class Life:
    """A simulation whose workers come and go, each with a number of starts."""

    def __init__(self, text: str) -> None:
        self.simulation = Simulation()
        self.simulation.tell(c.SubmitRun(RUN, text, 0.0))
        self.starts = dict.fromkeys(NAMES, 0)

    def move(self, kind: str, number: int) -> None:
        name = NAMES[number % len(NAMES)]
        present = member(name, self.starts[name])
        match kind:
            case "come":
                if name in self.simulation.state.workers:
                    self.starts[name] += number % 2
                self.simulation.sites(name, self.starts[name])
            case "lose":
                self.simulation.tell(c.LoseWorker(present, "killed"))
            case "stop":
                self.simulation.tell(c.LeaveWorker(present, "stopped"))
            case "drain":
                self.simulation.tell(c.DrainWorker(present))
            case "time":
                self.later(1.0 + 60.0 * (number % 3))
            case "crash":
                self.simulation.crash()
            case _:
                self.answer(kind, number)

    def answer(self, kind: str, number: int) -> None:
        """One piece of work ends, well or not."""
        effects = due(self.simulation)
        if not effects:
            return
        effect = effects[number % len(effects)]
        fact = do(effect)
        if kind != "work" and isinstance(effect, TrainClient):
            cause = CAUSES[number % len(CAUSES)]
            fact = rejected(effect.client, "x", cause, round_num=effect.round_num)
        self.simulation.tell(c.Report(RUN, fact))

    def later(self, seconds: float) -> None:
        self.simulation.tick(self.simulation.now_s + seconds)

    def check(self) -> None:
        simulation, run = self.simulation, self.simulation.record
        if run.ended is not None:
            return
        assert isinstance(simulation.reason, str)
        value = run.value
        assert [b.client for b in value.roster] == list(range(len(value.roster)))
        assert len({b.worker_id for b in value.roster}) == len(value.roster) <= NUM_CLIENTS
        deadline = next_deadline(simulation.state)
        assert deadline is None or deadline > simulation.now_s, "it would be asked for ever"
        for effect in trained(simulation):
            if effect.round_num == value.round_num:
                assert effect.client not in value.attendance.left
                assert value.attendance.benched.get(effect.client, 0) <= value.round_num
                assert value.roster[effect.client].worker_id == effect.member.worker_id

    def finish(self) -> None:
        """All come and work, again and again: the run ends."""
        for _ in range(40):
            if self.simulation.record.ended:
                return
            for name in NAMES:
                self.starts[name] += 1
                self.simulation.sites(name, self.starts[name])
            for _ in range(60):
                effects = due(self.simulation)
                if self.simulation.record.ended or not effects:
                    break
                self.simulation.tell(c.Report(RUN, do(effects[0])))
            self.check()
            self.later(30.0)
            self.check()


def joins(simulation: Simulation) -> Iterator[tuple[int, str]]:
    for fact in simulation.facts(f.ClientsJoined):
        for binding in fact.clients:
            yield binding.client, binding.worker_id


@given(options, st.sampled_from([ALL, RANDOM]), moves)
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_any_life_replays_and_ends(
    chosen: dict[str, Any], selection: dict[str, Any], played: list[tuple[str, int]]
) -> None:
    life = Life(job_of(chosen, selection))
    simulation = life.simulation
    for kind, number in played:
        life.move(kind, number)
        life.check()
    life.finish()
    run = simulation.record
    assert run.ended in (RunPhase.COMPLETED, RunPhase.FAILED), simulation.reason
    if run.ended is RunPhase.FAILED:
        assert "updates" in run.reason or "sites" in run.reason or "evaluation" in run.reason
    numbers: dict[int, str] = {}
    for client, name in joins(simulation):
        assert numbers.setdefault(client, name) == name, "a number was given twice"
    assert sorted(numbers) == list(range(len(numbers)))
    for closed in simulation.facts(f.RoundClosed):
        clients = [accepted.client for accepted in closed.accepted]
        assert clients == sorted(set(clients))
        asked = [
            it for it in simulation.facts(f.ClientsSelected) if it.round_num == closed.round_num
        ]
        on_time = {a.client for a in closed.accepted if not a.staleness}
        assert on_time <= {client for fact in asked for client in fact.clients}
    away = {fact.client for fact in simulation.facts(f.ClientLeft)}
    away |= {fact.client for fact in simulation.facts(f.ClientBenched)}
    assert away <= numbers.keys()
    simulation.crash()
