"""Processes that end during a run: which are the doing of its job, and how many it survives."""

from typing import Any

from stratagem.coordinator.core.commands import (
    DrainWorker,
    LoseWorker,
)
from stratagem.coordinator.core.facts import (
    ProcessDied,
)
from stratagem.coordinator.core.state import RunPhase
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    LOCAL,
    job_text,
)
from tests.coordinator.core.simulation import (
    RUN,
    ending,
    member,
    register,
    start,
)


def test_a_job_that_ends_its_process_fails_after_three() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(simulation.queue.popleft())
    for number in range(3):
        assert simulation.state.runs[RUN].ended is None
        told = ending("a", number, run_id=RUN, step=4, status=3, lines=("loading", "bye"))
        simulation.tell(register("a", number + 1, told))
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == (
        "segment 1 has ended 3 worker processes and came no further than step 4; the last one, a, "
        "ended with exit status 3 and had printed: loading | bye"
    )


def test_processes_that_somebody_kills_fail_no_run_unless_it_comes_no_further_for_long() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(simulation.queue.popleft())
    for number in range(10):
        assert simulation.state.runs[RUN].ended is None
        simulation.now_s += 5.0
        simulation.tell(register("a", number + 1))
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == "segment 1 has ended 10 worker processes; the last one, a, ended unseen"


def test_all_workers_killed_at_once_are_one_death() -> None:
    simulation = start(job_text(DATA_PARALLEL), "a", "b")
    simulation.tell(simulation.queue.popleft())
    for number in range(9):
        for name in "ab":
            simulation.tell(LoseWorker(member(name, number), "connection lost"))
        for name in "ab":
            killed = ending(name, number, run_id=RUN, step=0, status=-9)
            simulation.tell(register(name, number + 1, killed))
    assert simulation.state.runs[RUN].value.deaths.num == 9
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_processes_that_were_stopped_or_did_something_else_are_not_counted() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(simulation.queue.popleft())
    tells: list[dict[str, Any]] = [
        {"status": -9, "is_stopped": True},
        {"status": -15},
        {"status": 3, "run_id": ""},
        {"status": 3, "run_id": "another-run"},
    ]
    for number, told in enumerate(tells):
        simulation.tell(register("a", number + 1, ending("a", number, **told)))
    assert not simulation.facts(ProcessDied)
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_what_the_next_process_tells_of_an_older_one_is_not_believed_of_this_one() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(simulation.queue.popleft())
    simulation.tell(register("a", 1, ending("a", 7, status=3, is_stopped=True)))
    (fact,) = simulation.facts(ProcessDied)
    assert (fact.status, fact.at, fact.lines) == (None, None, ())


def test_processes_that_had_not_begun_are_not_counted() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(simulation.queue.popleft())
    for start_number in range(1, 5):
        lost = member("a", start_number - 1)
        simulation.tell(LoseWorker(lost, "connection refused", is_blameless=True))
        simulation.tell(register("a", start=start_number))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_restarts_that_were_asked_for_are_no_deaths() -> None:
    simulation = start(job_text(LOCAL), "a")
    simulation.tell(simulation.queue.popleft())
    for start_number in range(1, 5):
        simulation.tell(DrainWorker(member("a", start_number - 1)))
        simulation.tell(register("a", start=start_number))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
