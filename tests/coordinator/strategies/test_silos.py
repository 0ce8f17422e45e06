"""Federated clients that are parties of their own, in the pure core."""

from collections import Counter, deque
from typing import Any

import pytest

from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import CancelRun, LoseWorker, Report, ResumeRun
from stratagem.coordinator.core.effects import Build, CollectUpdate, RunSegment, TrainClient
from stratagem.coordinator.core.facts import (
    ErrorRecord,
    GenerationClosed,
    MembersFormed,
    PartyFailed,
    RoundClosed,
    SegmentCommitted,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from stratagem.coordinator.core.state_machine.strategy_boundary import objections_to
from stratagem.coordinator.runtime.plugins import BUILT_IN
from tests.coordinator.core.jobs import INNER, POPULATION_SECTIONS, job_text, population, silos
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    ending,
    member,
    phase,
    reason,
    register,
    start,
)

pytestmark = pytest.mark.core


def commits(simulation: Simulation) -> list[SegmentCommitted]:
    return [fact for fact in simulation.facts(SegmentCommitted) if not fact.party]


@pytest.mark.parametrize("workers", ["abcd", "ab", "a"])
def test_rounds_go_by_on_any_number_of_workers(workers: str) -> None:
    simulation = start(job_text(silos()), *workers)
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED, run.reason
    assert [fact.segment for fact in commits(simulation)] == [1, 2, 3]
    assert len(simulation.facts(UpdateReceived)) == 6
    assert run.is_reproducible


def test_silos_take_workers_of_their_own_where_there_are_enough() -> None:
    simulation = start(job_text(silos()), *"abcd")
    while not [e for e in pending(simulation.state) if isinstance(e, RunSegment)]:
        simulation.tell(simulation.queue.popleft())
    simulation.run()
    formed = {
        fact.party: {member.worker_id for member in fact.members}
        for fact in simulation.facts(MembersFormed)
        if fact.party
    }
    assert formed.keys() == {"client0", "client1"}
    first, second = formed.values()
    assert first.isdisjoint(second)
    assert len(first | second) == 4


def test_every_round_begins_from_the_global_state() -> None:
    simulation = start(job_text(silos()), *"abcd")
    bases: dict[str, set[tuple[int, str]]] = {}
    for _ in range(1000):
        for effect in pending(simulation.state):
            assert not isinstance(effect, TrainClient)
            if isinstance(effect, RunSegment):
                bases.setdefault(effect.party, set()).add((effect.lineage, effect.base.digest))
                assert (effect.segment, effect.base.step) == (1, 0)
            if isinstance(effect, CollectUpdate):
                assert effect.digest in live_blobs(simulation.state)
        if not simulation.queue:
            break
        simulation.tell(simulation.queue.popleft())
    assert set(bases) == {"client0", "client1"}
    assert len(bases["client0"]) == 3
    assert {digest for _, digest in bases["client0"]} == {d for _, d in bases["client1"]}


def test_crash_or_loss_after_any_command_ends_the_same() -> None:
    undisturbed = start(job_text(silos()), *"abc")
    undisturbed.run()
    expected = [(fact.segment, fact.digest) for fact in commits(undisturbed)]
    for after in range(0, 40, 3):
        for disturb in ("crash", "lose"):
            simulation = start(job_text(silos()), *"abc")
            for _ in range(after):
                if simulation.queue:
                    simulation.tell(simulation.queue.popleft())
            if disturb == "crash":
                simulation.crash()
            else:
                simulation.tell(LoseWorker(member("a"), "killed"))
                simulation.run()
                simulation.tell(register("a", start=1))
            simulation.run()
            assert [(fact.segment, fact.digest) for fact in commits(simulation)] == expected


ERROR = ErrorRecord(
    type="KeyError", message="'label'", traceback="at line 3", worker_id="a", activity="step 2"
)


def segments(simulation: Simulation) -> list[RunSegment]:
    return [each for each in pending(simulation.state) if isinstance(each, RunSegment)]


def fail_silos(simulation: Simulation, *clients: int, error: ErrorRecord | None = ERROR) -> None:
    """Once these silos train, their parties fail; goes on until the end."""
    while simulation.queue:
        for effect in segments(simulation):
            if effect.party in {f"client{n}" for n in clients}:
                failed = PartyFailed(party=effect.party, reason="KeyError: 'label'", error=error)
                simulation.tell(Report(RUN, failed))
        if simulation.queue:
            simulation.tell(simulation.queue.popleft())


def test_a_silo_whose_code_raises_is_rejected_alone_in_every_round() -> None:
    simulation = start(job_text(silos()), *"abcd")
    fail_silos(simulation, 1)
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    assert run.reason == "3 rounds committed; rejected: client 1 in 3 rounds (KeyError: 'label')"
    rejected = simulation.facts(UpdateRejected)
    assert [(fact.round_num, fact.client, fact.cause) for fact in rejected] == [
        (number, 1, Cause.EXCEPTION) for number in (1, 2, 3)
    ]
    assert [[a.client for a in fact.accepted] for fact in simulation.facts(RoundClosed)] == [
        [0]
    ] * 3
    assert run.is_reproducible
    final = run
    simulation.crash()
    assert simulation.state.runs[RUN] == final


def test_a_silo_that_cannot_even_be_built_is_rejected_alone_in_every_round() -> None:
    """It never says how many rows it has; its party keeps its memberships from round to round."""
    simulation = start(job_text(silos()), *"abcd")
    while simulation.queue:
        for effect in pending(simulation.state):
            if isinstance(effect, Build) and effect.party == "client1":
                failed = PartyFailed(party=Party("client1"), reason="no rows", error=ERROR)
                simulation.tell(Report(RUN, failed))
        if simulation.queue:
            simulation.tell(simulation.queue.popleft())
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    assert len(simulation.facts(UpdateRejected)) == 3
    formed = [
        fact.membership for fact in simulation.facts(MembersFormed) if fact.party == "client1"
    ]
    assert len(formed) == len(set(formed)) == 3


def test_silos_that_all_fail_end_the_run_with_the_exception() -> None:
    simulation = start(job_text(silos()), *"abcd")
    fail_silos(simulation, 0, 1)
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.FAILED
    assert run.reason == "round 1: 0 of 2 updates; 2 raised KeyError: 'label' (clients 0, 1)"
    assert run.error == ERROR


def test_a_silo_that_fails_ends_a_run_in_which_none_may() -> None:
    options = {"inner": INNER, "on_client_error": "fail"}
    simulation = start(job_text(silos(options=options)), *"abcd")
    fail_silos(simulation, 1)
    run = simulation.state.runs[RUN]
    assert (run.ended, run.reason) == (RunPhase.FAILED, "round 1: client 1: KeyError: 'label'")
    assert run.error == ERROR


def test_a_silo_that_ends_its_processes_is_rejected_as_crashed() -> None:
    simulation = start(job_text(silos(rounds=1)), *"abcd")
    starts = Counter[str]()
    while not simulation.facts(UpdateRejected):
        assert starts.total() < 12  # those that die side by side count as one
        while not (mine := [e for e in segments(simulation) if e.party == "client1"]):
            simulation.tell(simulation.queue.popleft())
        name = mine[0].members[0].worker_id
        told = ending(name, starts[name], status=3, run_id=RUN, party="client1", step=2)
        starts[name] += 1
        simulation.queue = deque(
            each for each in simulation.queue if getattr(each.fact, "party", "") != "client1"
        )
        simulation.tell(register(name, starts[name], told))
    (rejected,) = simulation.facts(UpdateRejected)
    assert (rejected.client, rejected.cause) == (1, Cause.CRASHED)
    assert "has ended 3 worker processes" in rejected.reason
    assert not simulation.state.runs[RUN].is_reproducible


def test_a_silo_is_not_asked_again_in_its_round() -> None:
    options = {"inner": INNER, "on_missing_quorum": "wait"}
    found = JobSpec.from_json(job_text(silos(options=options)))
    (violation,) = objections_to(found, BUILT_IN)
    assert violation.field == "strategy.options.on_missing_quorum"


def test_rounds_with_some_of_the_silos() -> None:
    selection = {"method": "Random", "fraction": 0.5}
    simulation = start(
        job_text(silos(num_clients=4, rounds=4, client_selection=selection)), *"abcd"
    )
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    assert [len(fact.accepted) for fact in simulation.facts(RoundClosed)] == [2] * 4


@pytest.mark.parametrize(
    ("changes", "sections", "field"),
    [
        ({"aggregation": {"method": "FedProx", "mu": 0.1}}, {}, "strategy.aggregation.method"),
        (
            {"client_selection": {"method": "ByCapability", "required_tags": []}},
            {},
            "strategy.client_selection.method",
        ),
        ({}, {"data": {"worker_local": "ward"}}, "data.worker_local"),
        (
            {},
            {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": "cosine"}},
            "optimizer.schedule",
        ),
        (
            {"options": {"inner": {**INNER, "num_replicas": 99}}},
            {},
            "strategy.options.inner.num_replicas",
        ),
        (
            {"options": {"inner": {"type": "Custom", "coordinator": "mine", "config": None}}},
            {},
            "strategy.options.inner.coordinator",
        ),
    ],
)
def test_what_a_silo_cannot_do_is_refused(
    changes: dict[str, Any], sections: dict[str, Any], field: str
) -> None:
    found = JobSpec.from_json(job_text(silos(**changes), **sections))
    assert [violation.field for violation in objections_to(found, BUILT_IN)] == [field]


def test_an_inner_local_is_no_silo() -> None:
    found = JobSpec.from_json(job_text(silos(inner={"type": "Local"})))
    assert BUILT_IN.of(found) is BUILT_IN.built_in["Federated"]


def test_a_population_is_no_client() -> None:
    found = JobSpec.from_json(job_text(silos(inner=population())))
    assert [str(violation) for violation in objections_to(found, BUILT_IN)] == [
        "strategy.options.inner: a population is no client: its members end with different models"
    ]


def test_a_silo_that_fails_without_a_known_cause_counts_as_one_whose_code_raised() -> None:
    simulation = start(job_text(silos(rounds=1)), *"abcd")
    fail_silos(simulation, 1, error=None)
    (rejected,) = simulation.facts(UpdateRejected)
    assert (rejected.client, rejected.cause) == (1, Cause.EXCEPTION)
    assert rejected.reason == "KeyError: 'label'"


def test_a_run_that_was_stopped_in_a_round_ends_as_one_that_was_not() -> None:
    undisturbed = start(job_text(silos()), *"abcd")
    undisturbed.run()
    simulation = start(job_text(silos()), *"abcd")
    while not segments(simulation):
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    assert [fact.digest for fact in commits(simulation)] == [
        fact.digest for fact in commits(undisturbed)
    ]


def test_silos_without_workers_are_named() -> None:
    simulation = start(job_text(silos()), "a")
    while not segments(simulation):
        simulation.tell(simulation.queue.popleft())
    assert (phase(simulation), reason(simulation)) == (
        RunPhase.RUNNING,
        "round 1: 0 of 2 clients have answered",
    )
    simulation.queue.clear()
    simulation.tell(LoseWorker(member("a"), "killed"))
    assert phase(simulation) is RunPhase.RECOVERING
    assert reason(simulation) == (
        "round 1: 0 of 2 clients have answered; without workers: client 0, client 1: "
        "waiting for 1 of 2 workers: no worker is available: a (killed)"
    )


def test_a_federation_of_silos_is_a_member_of_a_population() -> None:
    """Each member has its rounds; a copy begins them from the state of its donor."""
    inner = silos(rounds=5)
    sections = {**POPULATION_SECTIONS, "evaluation": {"metrics": ["accuracy"], "best": "loss"}}
    text = job_text(population(2, 2, inner, {"method": "Truncation", "fraction": 0.5}), **sections)
    simulation = start(text, *"abcd")
    while not segments(simulation):
        simulation.tell(simulation.queue.popleft())
    failed = PartyFailed(party=Party("member0/client1"), reason="KeyError: 'label'", error=ERROR)
    simulation.tell(Report(RUN, failed))
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED, run.reason
    first, second = simulation.facts(GenerationClosed)
    assert None not in first.scores, "a silo that fails is not its member"
    assert len(first.copied) == 1
    assert None not in second.scores
