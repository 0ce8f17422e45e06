"""State machines, observed: the pure core is driven through scenarios, and its journal is replayed.

Owns the scenarios and the arrows that come out of them. An arrow is one journaled fact that moved a
run from one phase to another, so a table cannot show what the code does not do; what it leaves
out is what no scenario reaches. Knows nothing of pages.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.apply import apply
from stratagem.coordinator.core.commands import (
    CancelRun,
    LoseWorker,
    Report,
    ReportTrouble,
    ResumeRun,
    Tick,
)
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.fact_text import decode
from stratagem.coordinator.core.facts import ROOT, RunFailed, UpdateRejected
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.state import CoordinatorState, RunPhase
from stratagem.coordinator.core.strategy_calls import parties_of
from stratagem.coordinator.core.strategy_contract import Status
from tests.coordinator.core.jobs import job_text
from tests.coordinator.core.simulation import RUN, Simulation, ending, member, register, start

START = "[*]"
LOCAL: dict[str, object] = {"type": "Local"}
DATA_PARALLEL: dict[str, object] = {
    "type": "DataParallel",
    "num_replicas": 2,
    "aggregation": {"method": "AllReduce"},
}
DECENTRALIZED = {**DATA_PARALLEL, "aggregation": {"method": "Decentralized", "topology": "ring"}}
FEDERATED: dict[str, object] = {
    "type": "Federated",
    "num_clients": 2,
    "rounds": 2,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
MODEL_PARALLEL: dict[str, object] = {
    "type": "ModelParallel",
    "partitions": [
        {"node_ids": ["0"], "target": {"WorkerId": "a"}},
        {"node_ids": ["1"], "target": {"WorkerId": "a"}},
    ],
    "communication": {"protocol": "Direct"},
}
POPULATION: dict[str, object] = {
    "type": "PopulationBased",
    "population_size": 2,
    "generations": 2,
    "exploit": {"method": "Truncation", "fraction": 0.5},
    "explore": {"method": "Resample"},
}
STRATEGIES = {
    "local": LOCAL,
    "data_parallel": DATA_PARALLEL,
    "decentralized": DECENTRALIZED,
    "model_parallel": MODEL_PARALLEL,
    "federated": FEDERATED,
    "population_based": POPULATION,
}
UNITS = {"Federated": "1 round", "PopulationBased": "1 generation"}
NUM_POINTS = 10
"""Disturbances happen after each of the first so many effects: later ones show no other arrow."""

PhaseOf = Callable[[RunPhase | None, Status], str]


@dataclass
class Observed:
    """The transitions between phases that were observed, with the facts that caused them."""

    arrows: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))


def run_phase(ended: RunPhase | None, status: Status) -> str:
    """The phase that every client sees."""
    return ended or status.phase


@dataclass(frozen=True, slots=True)
class _Moment:
    """The run after one fact of its journal."""

    kind: str
    ended: RunPhase | None
    status: Status


def observe(names: Iterable[str], phase_of: PhaseOf) -> Observed:
    """Replay the journals of all scenarios of these strategies."""
    observed = Observed()
    for name in names:
        for course in _played(name):
            before = START
            for moment in course:
                after = phase_of(moment.ended, moment.status)
                if before != after:
                    observed.arrows[before, after].add(moment.kind)
                before = after
    return observed


@cache
def _played(name: str) -> tuple[tuple[_Moment, ...], ...]:
    return tuple(tuple(_course(simulation)) for simulation in _scenarios(STRATEGIES[name]))


def _course(simulation: Simulation) -> Iterator[_Moment]:
    state = CoordinatorState(BUILT_IN)
    for run_id, kind, payload, time_s in simulation.journal:
        state = apply(state, run_id, decode(kind, 1, payload), time_s)
        run = state.runs.get(RUN)
        if run is not None:
            status = run.strategy.status(run.job, run.value, world_of(state))
            yield _Moment(kind, run.ended, status)


# ---- scenarios ----


def _scenarios(strategy: dict[str, object]) -> Iterator[Simulation]:
    federated = strategy["type"] == "Federated"
    every = UNITS.get(str(strategy["type"]), "1 epoch")
    evaluation = {"split": "test", "every": every, "metrics": ["accuracy"], "best": "accuracy"}
    sections: dict[str, object] = {"evaluation": evaluation}
    if strategy["type"] == "PopulationBased":
        sections["search_space"] = {"optimizer.lr": {"low": 0.01, "high": 1.0}}
        sections["steps_per_generation"] = 5
    text = job_text(strategy, **sections)
    for point in range(NUM_POINTS):
        yield _disturbed(text, point, _lose_one)
        yield _disturbed(text, point, _lose_all)
        yield _disturbed(text, point, _stop_and_resume)
        yield _disturbed(text, point, _user_error)
        yield _disturbed(text, point, _trouble)
        yield _disturbed(text, point, _stop_while_lost)
    yield _late_worker(text)
    yield _stopped_before_it_began(text)
    yield _dies_again(text)
    if federated:
        yield _rejected(text)
        yield from map(_deadline, (1, 2))
        yield _waits_for_quorum()
        yield _worker_local_lost()
        yield _secure()


def _disturbed(text: str, point: int, disturb: Callable[[Simulation], None]) -> Simulation:
    simulation = start(text, "a", "b")
    for _ in range(point):
        if simulation.queue:
            simulation.tell(simulation.queue.popleft())
    disturb(simulation)
    simulation.run()
    return simulation


def _lose_one(simulation: Simulation) -> None:
    simulation.tell(LoseWorker(member("a"), "killed"))
    simulation.tell(register("a", start=1))


def _lose_all(simulation: Simulation) -> None:
    simulation.queue.clear()
    for name in ("a", "b"):
        simulation.tell(LoseWorker(member(name), "killed"))
    for name in ("a", "b"):
        simulation.tell(register(name, start=1))


def _stop_and_resume(simulation: Simulation) -> None:
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN))


def _stop_while_lost(simulation: Simulation) -> None:
    simulation.queue.clear()
    for name in ("a", "b"):
        simulation.tell(LoseWorker(member(name), "killed"))
    simulation.tell(CancelRun(RUN))


def _user_error(simulation: Simulation) -> None:
    simulation.tell(Report(RUN, RunFailed(reason="ValueError: no")))
    simulation.run()
    simulation.tell(ResumeRun(RUN))


def _trouble(simulation: Simulation) -> None:
    for party, view in parties_of(simulation.state.runs[RUN]).items():
        simulation.tell(ReportTrouble(RUN, party, view.membership, "socket closed"))


def _late_worker(text: str) -> Simulation:
    simulation = start(text)
    simulation.tell(register("a"))
    simulation.run()
    return simulation


def _stopped_before_it_began(text: str) -> Simulation:
    simulation = start(text)
    simulation.tell(CancelRun(RUN))
    return simulation


def _dies_again(text: str) -> Simulation:
    simulation = start(text, "a")
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    for number in range(3):
        simulation.tell(register("a", number + 1, ending("a", number, status=3)))
        simulation.queue.clear()
    return simulation


def _rejected(text: str) -> Simulation:
    simulation = _opened(text)
    rejected = UpdateRejected(party=ROOT, round_num=1, client=0, reason="not finite")
    simulation.tell(Report(RUN, rejected))
    simulation.run()
    return simulation


def _deadline(quorum: int) -> Simulation:
    """The first client answers, then the deadline passes; one is enough for a quorum of one."""
    options = {"quorum": quorum, "round_deadline_s": 60.0}
    simulation = _opened(job_text({**FEDERATED, "options": options}))
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    simulation.now_s = 61.0
    simulation.tell(Tick())
    simulation.run()
    return simulation


def _waits_for_quorum() -> Simulation:
    """All clients fail, and are asked again on another worker."""
    simulation = _opened(job_text({**FEDERATED, "options": {"on_missing_quorum": "wait"}}))
    simulation.queue.clear()
    for client in (0, 1):
        rejected = UpdateRejected(party=ROOT, round_num=1, client=client, reason="ValueError: no")
        simulation.tell(Report(RUN, rejected))
    simulation.run()
    return simulation


def _secure() -> Simulation:
    """The sum of the updates is seen, and none of them."""
    options: dict[str, Any] = {"secure_aggregation": {}}
    simulation = start(job_text({**FEDERATED, "num_clients": 3, "options": options}), "a", "b")
    simulation.run()
    return simulation


def _worker_local_lost() -> Simulation:
    """Rows that lie on one worker only: its client is waited for."""
    simulation = start(job_text(FEDERATED, data={"worker_local": "ward"}))
    for name in ("a", "b"):
        simulation.tell(register(name, local_data=("ward",)))
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    simulation.tell(LoseWorker(member("b"), "killed"))
    simulation.tell(register("b", start=1, local_data=("ward",)))
    simulation.run()
    return simulation


def _opened(text: str) -> Simulation:
    """Until clients are being trained."""
    simulation = start(text, "a", "b")
    while not any(isinstance(effect, TrainClient) for effect in pending(simulation.state)):
        simulation.tell(simulation.queue.popleft())
    return simulation


# ---- tables ----


def arrow_table(observed: Observed) -> str:
    """By phase: where a run goes from it, and the facts that move it there."""
    lines = ["| from | to | by |", "|---|---|---|"]
    order = sorted(observed.arrows.items(), key=lambda arrow: (arrow[0][0] != START, arrow[0]))
    for (before, after), kinds in order:
        source = "*(begin)*" if before == START else before
        target = "*(end)*" if after == START else after
        lines.append(f"| {source} | {target} | {', '.join(sorted(kinds))} |")
    return "\n".join(lines)


def unseen_phases(observed: Observed) -> list[RunPhase]:
    """Phases of the protocol that no scenario has led to."""
    seen = {phase for arrow in observed.arrows for phase in arrow}
    return [phase for phase in RunPhase if phase not in seen]
