"""Federated clients that are federations of their own, in the pure core."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import CancelRun, LoseWorker, Report, ResumeRun
from stratagem.coordinator.core.effects import AggregateRound, SumRegion, TrainClient
from stratagem.coordinator.core.facts import (
    ClientsSelected,
    PartyFailed,
    RosterFormed,
    SegmentCommitted,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import RunPhase, World
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.core.state_machine.strategy_boundary import objections_to, status_of
from stratagem.coordinator.runtime.plugins import BUILT_IN
from stratagem.coordinator.strategies.client_parties.region_members import roster_of_region
from stratagem.coordinator.strategies.client_parties.regional import rounds_inside
from tests.coordinator.core.jobs import FEDERATED, POPULATION_SECTIONS, job_text, population, silos
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    member,
    phase,
    reason,
    register,
    start,
)

pytestmark = pytest.mark.core

REGIONS = {"north": [4, 0], "east": [5, 1, 2], "west": [3]}


def inner(rounds: int = 1, num_clients: int = 3, **changes: Any) -> dict[str, Any]:
    return {**FEDERATED, "num_clients": num_clients, "rounds": rounds, **changes}


def regional(rounds_inside: int = 1, regions: Any = REGIONS, **options: Any) -> dict[str, Any]:
    size = max(map(len, regions.values())) if regions else 2
    own = {"inner": inner(rounds_inside, size), **options}
    return {**FEDERATED, "num_clients": 3, "options": {"regions": regions, **own}}


def commits(simulation: Simulation, party: str = "") -> list[tuple[int, str]]:
    facts = simulation.facts(SegmentCommitted)
    return [(fact.segment, fact.digest) for fact in facts if fact.party == party]


@pytest.mark.parametrize("workers", ["abcd", "a"])
def test_rounds_of_regions(workers: str) -> None:
    evaluation = {"split": "test", "every": "1 round", "metrics": ["accuracy"]}
    simulation = start(job_text(regional(2), evaluation=evaluation), *workers)
    seen, shown = set[Any](), set[str]()
    while simulation.queue:
        seen |= pending(simulation.state)
        shown |= {status_of(simulation.state.runs[RUN], World(simulation.state.workers, {})).reason}
        simulation.tell(simulation.queue.popleft())
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED, run.reason
    assert [number for number, _ in commits(simulation)] == [1, 2, 3]
    assert "round 2: 0 of 3 regions have answered" in shown
    assert [number for number, _ in commits(simulation, "client0")] == [1, 3, 5]
    shares = {(e.party, e.share) for e in seen if isinstance(e, TrainClient)}
    own = {"client0": [1, 2, 5], "client1": [0, 4], "client2": [3]}
    assert shares == {(party, (n, 6)) for party, all_ in own.items() for n in all_}
    sums = [e for e in seen if isinstance(e, SumRegion)]
    assert {(e.client, e.round_num, e.round_inside, len(e.accepted)) for e in sums} == {
        (region, n, 2 * n, size) for region, size in enumerate((3, 2, 1)) for n in (1, 2, 3)
    }
    folds = {(e.party, e.integers_of) for e in seen if isinstance(e, AggregateRound)}
    # Of clients with as many rows the lowest number counts: client 2 of east has most.
    assert folds == {("client0", None), ("client1", None), ("client2", None), ("", 0)}
    assert rounds_inside(run.job, run.value, 2)[:2] == [("client0", 3), ("client0", 4)]
    assert rounds_inside(run.job, None, 2) == []


def test_regions_without_names_are_alike() -> None:
    simulation = start(job_text(regional(1, None)), *"ab")
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    rosters = {
        str(f.party): [b.worker_id for b in f.clients] for f in simulation.facts(RosterFormed)
    }
    assert rosters[""] == ["0", "1", "2"]
    assert rosters["client1"] == ["a", "b"]


def test_crash_or_loss_after_any_command_ends_the_same() -> None:
    undisturbed = start(job_text(regional(2)), *"ab")
    undisturbed.run()
    for after in range(0, 70, 5):
        for disturb in ("crash", "lose"):
            simulation = start(job_text(regional(2)), *"ab")
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
            assert commits(simulation) == commits(undisturbed)


def test_a_region_that_fails_is_rejected_alone() -> None:
    simulation = start(job_text(regional()), *"ab")
    while simulation.queue:
        command = simulation.queue.popleft()
        if isinstance(command, Report) and isinstance(command.fact, UpdateReceived):
            fact = command.fact
            if fact.party == "client1":
                rejected_one = UpdateRejected(
                    party=fact.party,
                    round_num=fact.round_num,
                    client=fact.client,
                    reason="no rows",
                    cause=Cause.EXCEPTION,
                )
                command = Report(RUN, rejected_one)
        simulation.tell(command)
    assert phase(simulation) is RunPhase.COMPLETED, reason(simulation)
    rejected = [fact for fact in simulation.facts(UpdateRejected) if not fact.party]
    assert {fact.client for fact in rejected} == {1}
    assert "no rows" in rejected[0].reason
    assert {fact.client for fact in simulation.facts(UpdateReceived) if not fact.party} == {0, 2}


def test_a_region_whose_work_is_reported_to_have_failed_is_rejected_alone() -> None:
    simulation = start(job_text(regional()), *"ab")
    while not any(fact.party == "client1" for fact in simulation.facts(ClientsSelected)):
        simulation.tell(simulation.queue.popleft())
    simulation.tell(Report(RUN, PartyFailed(party=Party("client1"), reason="its rows are damaged")))
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED, reason(simulation)
    (rejected,) = [fact for fact in simulation.facts(UpdateRejected) if not fact.party]
    assert (rejected.client, rejected.reason) == (1, "its rows are damaged")


def test_a_run_that_is_resumed_goes_on_with_its_round_or_from_an_earlier_one() -> None:
    undisturbed = start(job_text(regional(2)), *"ab")
    undisturbed.run()
    simulation = start(job_text(regional(2)), *"ab")
    while len(simulation.facts(UpdateReceived)) < 3:
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    while len(commits(simulation)) < 2:
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN, from_segment=1))
    simulation.run()
    done = commits(simulation)
    assert [number for number, _ in done] == [1, 2, 2, 3]
    assert set(done) == set(commits(undisturbed))


def test_a_federation_of_regions_is_a_member_of_a_population() -> None:
    of_members = {"method": "Truncation", "fraction": 0.5}
    sections = {**POPULATION_SECTIONS, "evaluation": {"metrics": ["accuracy"], "best": "loss"}}
    text = job_text(population(2, 2, {**regional(), "rounds": 5}, of_members), **sections)
    simulation = start(text, *"ab")
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED, reason(simulation)


def test_status_says_which_region_lacks_workers() -> None:
    simulation = start(job_text(regional(regions=SITES), **LOCAL), "anna", "cork", "dover")
    for name in ("anna", "cork", "dover"):
        simulation.tell(register(name, local_data=("ward",)))
    simulation.run()
    told = status_of(simulation.state.runs[RUN], World(simulation.state.workers, {}))
    assert "2 of 3 regions have answered; region north: " in told.reason
    assert "client 1 (bern)" in told.reason


def test_facts_of_a_region_that_has_ended_its_part_are_stale() -> None:
    simulation = start(job_text(regional()), *"ab")
    simulation.run()
    run = simulation.state.runs[RUN]
    late = simulation.facts(UpdateReceived)[0]
    assert late.party
    assert "has ended its part" in run.strategy.reject_reason(run.job, run.value, late)
    assert run.strategy.status(run.job, run.value, World(simulation.state.workers, {})).members


def test_nobody_lives_where_there_are_no_workers() -> None:
    job = JobSpec.from_json(job_text(regional()))
    assert roster_of_region(job, Party("client0"), 0, []) is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "regions": (regional(regions={"a": [0, 1], "b": [2]}), "has 2 regions, and num_clients is 3"),
    "size": (regional(inner=inner(num_clients=4)), "4 is not 3, the clients of the largest"),
    "twice": (regional(regions={"a": [0], "b": [0], "c": [1]}), "in more than one place"),
    "prox": (regional() | {"aggregation": {"method": "FedProx", "mu": 0.1}}, "FedProx changes"),
    "tags": (
        regional() | {"client_selection": {"method": "ByCapability", "required_tags": ["x"]}},
        "live on one worker",
    ),
    "epochs": (regional(local_epochs=2), "set it there"),
    "strikes": (regional(strikes={"limit": 2, "bench_rounds": 1}), "of single clients"),
    "wait": (regional(on_missing_quorum="wait"), "not asked again"),
    "robust": (regional(robust={"name": "median"}), "a region tells only their sum"),
    "inner yogi": (
        regional(inner=inner(aggregation={"method": "FedProx", "mu": 0.1})),
        "makes no sum of clients",
    ),
    "inner tags": (
        regional(inner=inner(client_selection={"method": "ByCapability", "required_tags": ["x"]})),
        "in a region use All or Random",
    ),
    "inner rule": (regional(inner=inner(options={"q": 1})), "tells sums of its clients"),
    "inner of inner": (
        regional(inner=inner(options={"inner": silos()["options"]["inner"]})),
        "tells sums of its clients",
    ),
    "deadline": (
        regional(
            inner=inner(2, options={"quorum": 1, "round_deadline_s": 5}),
            quorum=1,
            round_deadline_s=10,
        ),
        "2 rounds of 5 s in a region must be over",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    strategy, said = REFUSED[case]
    with pytest.raises(InvalidInputError) as error:
        JobSpec.from_json(job_text(strategy))
    assert said in str(error.value)


SITES = {"north": ["anna", "bern"], "south": ["cork"], "west": ["dover"]}
LOCAL: dict[str, Any] = {"data": {"worker_local": "ward"}}


def test_refused_of_sites_and_plateaus() -> None:
    plateau = {"name": "sgd", "lr": 0.1, "schedule": {"name": "plateau"}}
    evaluation = {"split": "test", "metrics": ["accuracy"], "best": "loss", "mode": "min"}
    for changes, regions, said in (
        (LOCAL, None, "which sites are in which region"),
        (LOCAL | {"evaluation": evaluation}, SITES, "on their own rows"),
        ({"optimizer": plateau, "evaluation": evaluation}, REGIONS, "no region sees"),
    ):
        spec = JobSpec.from_json(job_text(regional(regions=regions), **changes))
        assert said in str(objections_to(spec, BUILT_IN))
