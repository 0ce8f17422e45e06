"""Verified runs end as undisturbed ones on any schedule, whoever is wrong, comes or goes."""

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import DrainWorker, LeaveWorker, SubmitRun
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import DATA_PARALLEL, EVALUATION, GOSSIP, LOCAL
from tests.coordinator.core.simulation import RUN, member, register
from tests.coordinator.strategies.computing import Computing, Disturb, run, verified

pytestmark = pytest.mark.core

TAGS = ("gpu", "large")
PARTITIONS = [{"node_ids": [tag], "target": {"Tag": tag}} for tag in TAGS]
PIPELINE = {
    "type": "ModelParallel",
    "partitions": PARTITIONS,
    "communication": {"protocol": "Direct"},
}
STRATEGIES: list[dict[str, Any]] = [
    LOCAL,
    *({**DATA_PARALLEL, "options": {"min_replicas": number}} for number in (1, 2, 3)),
    {**GOSSIP, "options": {"min_replicas": 2}},
    *({**DATA_PARALLEL, "options": {"local_steps": 5, "upload_every": k}} for k in (1, 3)),
    PIPELINE,
    {**DATA_PARALLEL, "num_replicas": 2, "options": {"inner": PIPELINE}},
]
SETTINGS = [
    {"from_step": 0, "seed": 1, "params": {"optimizer.lr": 0.1}},
    {"from_step": 10, "seed": 2, "params": {"optimizer.lr": 0.2}},
]
EVALUATED = {**EVALUATION, "every": "5 steps", "mode": "min"}
PLATEAU = {"name": "plateau", "mode": "min", "factor": 0.5, "patience": 1, "min_lr": 0.001}
SECTIONS: list[dict[str, Any]] = [
    {},
    {"evaluation": EVALUATED},
    {"evaluation": {**EVALUATED, "stop": {"patience": 2}}},
    {
        "evaluation": EVALUATED,
        "optimizer": {"name": "sgd", "lr": 0.1, "schedule": PLATEAU},
    },
    {
        "epochs": None,
        "steps": 30,
        "hyperparameter_schedule": {"settings": SETTINGS, "last_step": 20},
    },
]
STABLE, LOOSE = "abcdefg", "xyz"
"""Workers that stay, and workers that come and go; of these, "z" may be wrong."""


@dataclass
class Coming:
    """Workers that come, are lost, end and come back."""

    simulation: Computing
    random: Random
    starts: dict[str, int]

    def change(self) -> None:
        name = self.random.choice(LOOSE)
        now = self.simulation.state.workers.get(member(name).worker_id)
        if now is None or not now.is_usable:
            self.starts[name] = self.starts.get(name, -1) + self.random.randrange(2)
            self.starts[name] = max(self.starts[name], 0)
            self.simulation.tell(register(name, self.starts[name], tags=TAGS))
        elif self.random.random() < 0.7:
            self.simulation.lose([name], self.starts[name])
        else:
            self.simulation.tell(DrainWorker(now.member))
            self.simulation.tell(LeaveWorker(now.member, "it was told to"))


def wrong(random: Random) -> tuple[Disturb, bool]:
    """Somebody who is wrong once, in one segment; or else "z", in some segments, always."""
    segment, number = random.randrange(1, 5), random.randrange(4)
    segments = random.sample(range(1, 5), random.randrange(1, 5))
    if random.random() < 0.5:
        return lambda _names, k, n: "?" * ((k, n) == (segment, number)), False
    return lambda names, k, _n: "!" * ("z" in names and k in segments), True


def scheduled(text: str, random: Random) -> Computing:
    """A run in which the next thing that happens is any that is under way."""
    disturb, is_permanent = wrong(random)
    simulation = Computing(disturb=disturb)
    simulation.come(STABLE, tags=TAGS)
    coming = Coming(simulation, random, {})
    simulation.tell(SubmitRun(RUN, text, 0.0))
    for number in range(2_000):
        if simulation.record.ended and not simulation.queue:
            break
        simulation.now_s += 1.0
        due = simulation.agenda.next_deadline
        if due is not None and not simulation.queue:
            simulation.tick(max(due, simulation.now_s))
        drawn = random.random()
        if drawn < 0.1 and number < 300:
            coming.change()
        elif drawn < 0.13:
            simulation.crash()
        elif simulation.queue:
            simulation.queue.rotate(-random.randrange(min(3, len(simulation.queue))))
            simulation.step()
    names = {fact.worker_id for fact in simulation.facts(f.WorkerQuarantined)}
    assert names <= ({"z"} if is_permanent else set()), "a right worker is quarantined"
    return simulation


@settings(max_examples=25, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES),
    sections=st.sampled_from(SECTIONS),
    on=st.sampled_from(["spare", "any"]),
    retention=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32),
)
def test_a_verified_run_ends_as_an_undisturbed_one(
    strategy: dict[str, Any], sections: dict[str, Any], on: str, retention: int, seed: int
) -> None:
    changes = {**sections, "retention": retention}
    if "steps" in sections:  # settings do not change between two joins of replicas
        strategy = LOCAL
    simulation = scheduled(verified(strategy, on=on, **changes), Random(seed))
    assert simulation.record.ended is RunPhase.COMPLETED, simulation.record.reason
    assert simulation.record.is_reproducible
    plain = run(verified(strategy, 0.0, **changes), *STABLE, tags=TAGS)
    assert bits(simulation) == bits(plain)
    assert simulation.record.metrics == plain.record.metrics


def bits(simulation: Computing) -> tuple[int, str]:
    """The segment and the state of the last commit, uploaded later or not."""
    last = simulation.record.commits[-1]
    return last.segment, last.digest[:40]
