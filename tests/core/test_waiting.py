"""Runs that no worker fits: what they wait for, how long, and that nothing else ends them."""

from typing import Any

import pytest

from stratagem.coordinator.core.asking import why_waiting
from stratagem.coordinator.core.commands import LoseWorker, SubmitRun, Tick
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.facts import RunSubmitted
from stratagem.coordinator.core.pending import next_deadline
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.watching.feed import Event, Feed
from stratagem.coordinator.watching.waiting import say_what_is_missing
from tests.core.simulation import RUN, Simulation, job, member, register

pytestmark = pytest.mark.core

PIPELINE = {
    "type": "ModelParallel",
    "partitions": [
        {"node_ids": ["0"], "target": {"Tag": "gpu"}},
        {"node_ids": ["1"], "target": {"Tag": "large"}},
    ],
    "communication": {"protocol": "Direct"},
}
LOCAL = {"type": "Local"}


def begun(strategy: dict[str, Any], *workers: str, **changes: Any) -> Simulation:
    """Submitted at 100 s."""
    simulation = Simulation(now_s=100.0)
    for name in workers:
        simulation.tell(register(name))
    simulation.tell(SubmitRun(RUN, job(strategy, **changes), 0.0))
    return simulation


def reason(simulation: Simulation) -> str:
    return why_waiting(simulation.state.runs[RUN], world_of(simulation.state))


def tick(simulation: Simulation, now_s: float) -> None:
    simulation.now_s = now_s
    simulation.tell(Tick())


def test_it_fails_in_time_and_names_the_tags_that_nobody_has() -> None:
    simulation = begun(PIPELINE, "a", placement_timeout_s=60)
    assert next_deadline(simulation.state) == 160.0
    tick(simulation, 159.9)
    assert simulation.state.runs[RUN].ended is None
    simulation.crash()
    tick(simulation, 160.0)
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason.startswith("without workers for 60 s: partition 0 needs ")
    assert "gpu" in run.reason
    assert "large" in run.reason
    assert next_deadline(simulation.state) is None


def test_it_waits_for_ever_unless_told() -> None:
    simulation = begun(PIPELINE, "a")
    assert "gpu" in reason(simulation)
    assert next_deadline(simulation.state) is None
    tick(simulation, 1e9)
    assert simulation.state.runs[RUN].ended is None


def test_time_with_workers_does_not_count() -> None:
    simulation = begun(LOCAL, "a", placement_timeout_s=60)
    assert (reason(simulation), next_deadline(simulation.state)) == ("", None)
    simulation.queue.clear()
    tick(simulation, 500.0)
    assert simulation.state.runs[RUN].ended is None
    simulation.tell(LoseWorker(member("a"), "gone"))
    assert next_deadline(simulation.state) == 560.0
    simulation.now_s = 550.0
    simulation.tell(register("b"))
    assert next_deadline(simulation.state) is None
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_watchers_are_told_when_it_changes() -> None:
    simulation = begun(PIPELINE)
    feed = Feed(history=None)  # type: ignore[arg-type]  # nothing is read back here
    submitted = RunSubmitted(job_json="{}", wall_s=0.0)
    feed.add_event(RUN, Event(0, 0.0, submitted, RunPhase.PLACING), is_last=False)
    say_what_is_missing(feed, simulation.state, world_of(simulation.state), {RUN})
    first = feed.progress(RUN)
    assert first is not None
    assert first.reason == reason(simulation)
    say_what_is_missing(feed, simulation.state, world_of(simulation.state), {RUN})
    assert feed.progress(RUN) is first
    simulation.tell(register("a", tags=("gpu", "large")))
    say_what_is_missing(feed, simulation.state, world_of(simulation.state), {RUN})
    assert feed.progress(RUN) is None
