"""Federated clients that are parties of their own, in the pure core: silos that train together, and
regions, which are federations; and the tree in which updates are added up."""

from collections import Counter
from typing import Any

import pytest

from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import CancelRun, Report, ResumeRun
from stratagem.coordinator.core.effects import (
    AggregateRound,
    Build,
    CollectUpdate,
    RunSegment,
    SumRegion,
    TrainClient,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import live_blobs, pending
from stratagem.coordinator.core.strategy_calls import objections_to, status_of
from stratagem.coordinator.core.world import RunPhase, World
from stratagem.coordinator.strategies.federated.regions import roster_of_region, rounds_inside
from tests.coordinator.core.jobs import (
    FEDERATED,
    INNER,
    POPULATION_SECTIONS,
    job_text,
    population,
    refusal,
    silos,
)
from tests.coordinator.core.simulation import RUN, Simulation, ending, register, rejected, start

pytestmark = pytest.mark.core


ERROR = f.ErrorRecord(
    type="KeyError", message="'label'", traceback="at line 3", worker_id="a", activity="step 2"
)
BY_LOSS = {
    **POPULATION_SECTIONS,
    "evaluation": {"metrics": ["accuracy"], "best": "loss"},
    "steps_per_generation": 2,
}
LABEL = "KeyError: 'label'"


def commits(simulation: Simulation, party: str = "") -> list[tuple[int, str]]:
    facts = simulation.facts(f.SegmentCommitted)
    return [(fact.segment, fact.digest) for fact in facts if fact.party == party]


def test_rounds_go_by_on_one_worker() -> None:
    simulation = start(job_text(silos()), "a")
    simulation.complete()
    assert [segment for segment, _ in commits(simulation)] == [1, 2, 3]
    assert len(simulation.facts(f.UpdateReceived)) == 6
    assert simulation.record.is_reproducible


def test_silos_take_workers_of_their_own_and_begin_every_round_from_the_global_state() -> None:
    simulation = start(job_text(silos()), *"abcd")
    bases: dict[str, set[tuple[int, str]]] = {}
    while simulation.queue:
        for effect in pending(simulation.state):
            assert not isinstance(effect, TrainClient)
            if isinstance(effect, RunSegment):
                bases.setdefault(effect.party, set()).add((effect.lineage, effect.base.digest))
                assert (effect.segment, effect.base.step) == (1, 0)
            if isinstance(effect, CollectUpdate):
                assert effect.digest in live_blobs(simulation.state)
        simulation.step()
    assert set(bases) == {"client0", "client1"}
    assert len(bases["client0"]) == 3
    assert {digest for _, digest in bases["client0"]} == {d for _, d in bases["client1"]}
    formed = {
        it.party: {m.worker_id for m in it.members} for it in simulation.facts(f.MembersFormed)
    }
    first, second = (formed[Party(name)] for name in sorted(bases))
    assert first.isdisjoint(second)
    assert len(first | second) == 4


def silo_fails(
    client: int, reason: str = LABEL, error: f.ErrorRecord | None = ERROR
) -> f.PartyFailed:
    return f.PartyFailed(party=Party(f"client{client}"), reason=reason, error=error)


def fail_silos(
    simulation: Simulation,
    *clients: int,
    error: f.ErrorRecord | None = ERROR,
    kind: type[RunSegment | Build] = RunSegment,
) -> None:
    """Once these silos train, or are built, their parties fail; goes on until the end."""
    while simulation.queue:
        for effect in simulation.due(kind):
            for client in clients:
                if effect.party == f"client{client}":
                    simulation.report(silo_fails(client, error=error))
        if simulation.queue:
            simulation.step()


def test_a_silo_whose_code_raises_is_rejected_alone_in_every_round() -> None:
    simulation = start(job_text(silos()), *"abcd")
    fail_silos(simulation, 1)
    run = simulation.record
    assert run.ended is RunPhase.COMPLETED
    assert run.reason == "3 rounds committed; rejected: client 1 in 3 rounds (KeyError: 'label')"
    failures = [(it.round_num, it.client, it.cause) for it in simulation.facts(f.UpdateRejected)]
    assert failures == [(number, 1, Cause.EXCEPTION) for number in (1, 2, 3)]
    closed = simulation.facts(f.RoundClosed)
    assert [[a.client for a in fact.accepted] for fact in closed] == [[0]] * 3
    assert run.is_reproducible
    simulation.crash()
    unknown = start(job_text(silos(rounds=1)), *"abcd")
    fail_silos(unknown, 1, error=None)
    fact = unknown.fact(f.UpdateRejected)
    assert (fact.client, fact.cause, fact.reason) == (1, Cause.EXCEPTION, LABEL)


def test_a_silo_that_cannot_even_be_built_is_rejected_alone_in_every_round() -> None:
    """It never says how many rows it has; its party keeps its memberships from round to round."""
    simulation = start(job_text(silos()), *"abcd")
    fail_silos(simulation, 1, kind=Build)
    assert simulation.record.ended is RunPhase.COMPLETED
    assert len(simulation.facts(f.UpdateRejected)) == 3
    formed = [it.membership for it in simulation.facts(f.MembersFormed) if it.party == "client1"]
    assert len(formed) == len(set(formed)) == 3


@pytest.mark.parametrize(
    ("options", "failing", "reason"),
    [
        ({}, (0, 1), "round 1: 0 of 2 updates; 2 raised KeyError: 'label' (clients 0, 1)"),
        ({"on_client_error": "fail"}, (1,), "round 1: client 1: KeyError: 'label'"),
    ],
)
def test_silos_that_all_fail_or_may_not_end_the_run_with_the_exception(
    options: dict[str, Any], failing: tuple[int, ...], reason: str
) -> None:
    simulation = start(job_text(silos(options={"inner": INNER, **options})), *"abcd")
    fail_silos(simulation, *failing)
    run = simulation.record
    assert (run.ended, run.reason, run.error) == (RunPhase.FAILED, reason, ERROR)


def test_a_silo_that_ends_its_processes_is_rejected_as_crashed() -> None:
    simulation = start(job_text(silos(rounds=1)), *"abcd")
    starts = Counter[str]()
    while not simulation.facts(f.UpdateRejected):
        assert starts.total() < 12  # those that die side by side count as one
        while not (mine := [e for e in simulation.due(RunSegment) if e.party == "client1"]):
            simulation.step()
        name = mine[0].members[0].worker_id
        told = ending(name, starts[name], status=3, run_id=RUN, party="client1", step=2)
        starts[name] += 1
        for each in simulation.queue.copy():
            if getattr(each.fact, "party", "") == "client1":
                simulation.queue.remove(each)
        simulation.tell(register(name, starts[name], told))
    fact = simulation.fact(f.UpdateRejected)
    assert (fact.client, fact.cause) == (1, Cause.CRASHED)
    assert "has ended 3 worker processes" in fact.reason
    assert not simulation.record.is_reproducible


def test_rounds_with_some_of_the_silos_and_without_any() -> None:
    selection = {"method": "Random", "fraction": 0.5}
    simulation = start(job_text(silos(4, 4, client_selection=selection)), *"abcd")
    simulation.complete()
    assert [len(fact.accepted) for fact in simulation.facts(f.RoundClosed)] == [2] * 4
    found = JobSpec.from_json(job_text(silos(inner={"type": "Local"})))
    assert BUILT_IN.of(found) is BUILT_IN.built_in["Federated"]


WARD: dict[str, Any] = {"data": {"worker_local": "ward"}}
CUSTOM = {"type": "Custom", "coordinator": "mine", "config": None}
TAGS: dict[str, Any] = {"method": "ByCapability", "required_tags": []}
COSINE = {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": "cosine"}}


@pytest.mark.parametrize(
    ("changes", "sections", "said"),
    [
        ({"aggregation": {"method": "FedProx", "mu": 0.1}}, {}, "strategy.aggregation.method: "),
        ({"client_selection": TAGS}, {}, "strategy.client_selection.method: "),
        ({}, WARD, "data.worker_local: "),
        ({}, COSINE, "optimizer.schedule: "),
        ({"inner": {**INNER, "num_replicas": 99}}, {}, "strategy.options.inner.num_replicas: "),
        ({"inner": CUSTOM}, {}, "strategy.options.inner.coordinator: "),
        (
            {"options": {"inner": INNER, "on_missing_quorum": "wait"}},
            {},
            "strategy.options.on_missing_quorum: ",
        ),
        ({"inner": population()}, {}, "strategy.options.inner: a population is no client: its mem"),
    ],
)
def test_what_a_silo_cannot_do_is_refused(
    changes: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    (violation,) = objections_to(
        JobSpec.from_json(job_text(silos(**changes), **sections)), BUILT_IN
    )
    assert str(violation).startswith(said)


def test_a_run_that_was_stopped_in_a_round_ends_as_one_that_was_not() -> None:
    undisturbed = start(job_text(silos()), *"abcd")
    undisturbed.run()
    simulation = start(job_text(silos()), *"abcd")
    simulation.until_due(RunSegment)
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    simulation.complete()
    assert commits(simulation) == commits(undisturbed)


def test_silos_without_workers_are_named() -> None:
    simulation = start(job_text(silos()), "a")
    simulation.until_due(RunSegment)
    assert (simulation.phase, simulation.reason) == (
        RunPhase.RUNNING,
        "round 1: 0 of 2 clients have answered",
    )
    simulation.queue.clear()
    simulation.lose("a")
    assert simulation.phase is RunPhase.RECOVERING
    assert simulation.reason == (
        "round 1: 0 of 2 clients have answered; without workers: client 0, client 1: "
        "waiting for 1 of 2 workers: no worker is available: a (killed)"
    )


def test_a_federation_of_silos_is_a_member_of_a_population() -> None:
    """Each member has its rounds; a copy begins them from the state of its donor."""
    members = population(2, 2, silos(rounds=2), {"method": "Truncation", "fraction": 0.5})
    simulation = start(job_text(members, **BY_LOSS), *"abcd")
    simulation.until_due(RunSegment)
    failed = f.PartyFailed(party=Party("member0/client1"), reason=LABEL, error=ERROR)
    simulation.report(failed)
    simulation.complete()
    first, second = simulation.facts(f.GenerationClosed)
    assert None not in (*first.scores, *second.scores), "a silo that fails is not its member"
    assert len(first.copied) == 1


# ---- regions ----


REGIONS = {"north": [4, 0], "east": [5, 1, 2], "west": [3]}
SITES = {"north": ["anna", "bern"], "south": ["cork"], "west": ["dover"]}


def inner(rounds: int = 1, num_clients: int = 3, **changes: Any) -> dict[str, Any]:
    return {**FEDERATED, "num_clients": num_clients, "rounds": rounds, **changes}


def regional(rounds_inside: int = 1, regions: Any = REGIONS, **options: Any) -> dict[str, Any]:
    size = max(map(len, regions.values())) if regions else 2
    own = {"inner": inner(rounds_inside, size), **options}
    return {**FEDERATED, "num_clients": 3, "options": {"regions": regions, **own}}


def test_rounds_of_regions() -> None:
    evaluation = {"split": "test", "every": "1 round", "metrics": ["accuracy"]}
    simulation = start(job_text(regional(2), evaluation=evaluation), "a")
    seen, shown = set[Any](), set[str]()
    while simulation.queue:
        seen |= pending(simulation.state)
        shown |= {status_of(simulation.record, World(simulation.state.workers, {})).reason}
        simulation.step()
    run = simulation.record
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
    late = simulation.facts(f.UpdateReceived)[0]
    assert late.party
    assert "has ended its part" in run.strategy.reject_reason(run.job, run.value, late)
    assert run.strategy.status(run.job, run.value, World(simulation.state.workers, {})).members


def test_regions_without_names_are_alike() -> None:
    simulation = start(job_text(regional(1, None)), *"ab")
    simulation.complete()
    formed = {
        it.party: [b.worker_id for b in it.clients] for it in simulation.facts(f.RosterFormed)
    }
    assert formed[f.ROOT] == ["0", "1", "2"]
    assert formed[Party("client1")] == ["a", "b"]
    job = JobSpec.from_json(job_text(regional()))
    assert roster_of_region(job, Party("client0"), 0, []) is None, "there are no workers"


def test_a_region_that_fails_is_rejected_alone() -> None:
    simulation = start(job_text(regional()), *"ab")
    while simulation.queue:
        fact = simulation.queue.popleft().fact
        if isinstance(fact, f.UpdateReceived) and fact.party == "client1":
            of = {"party": fact.party}
            fact = rejected(fact.client, "no rows", round_num=fact.round_num).model_copy(update=of)
        simulation.tell(Report(RUN, fact))
    assert simulation.phase is RunPhase.COMPLETED, simulation.reason
    failures = [fact for fact in simulation.facts(f.UpdateRejected) if not fact.party]
    assert {fact.client for fact in failures} == {1}
    assert "no rows" in failures[0].reason
    assert {fact.client for fact in simulation.facts(f.UpdateReceived) if not fact.party} == {0, 2}
    simulation = start(job_text(regional()), *"ab")
    while not any(fact.party == "client1" for fact in simulation.facts(f.ClientsSelected)):
        simulation.step()
    simulation.report(silo_fails(1, "its rows are damaged", None))
    simulation.complete()
    (told,) = [fact for fact in simulation.facts(f.UpdateRejected) if not fact.party]
    assert (told.client, told.reason) == (1, "its rows are damaged")


def test_a_run_that_is_resumed_goes_on_with_its_round_or_from_an_earlier_one() -> None:
    undisturbed = start(job_text(regional(2)), *"ab")
    undisturbed.run()
    simulation = start(job_text(regional(2)), *"ab")
    simulation.until(f.UpdateReceived, 3)
    for segment in (None, 1):
        while segment and len(commits(simulation)) < 2:
            simulation.step()
        simulation.tell(CancelRun(RUN))
        simulation.run()
        simulation.tell(ResumeRun(RUN, from_segment=segment))
    simulation.run()
    assert [number for number, _ in commits(simulation)] == [1, 2, 2, 3]
    assert set(commits(simulation)) == set(commits(undisturbed))


def test_status_says_which_region_lacks_workers_and_regions_are_members_of_a_population() -> None:
    simulation = start(job_text(regional(regions=SITES), **WARD))
    simulation.sites(("anna", "cork", "dover"))
    simulation.run()
    told = status_of(simulation.record, World(simulation.state.workers, {}))
    assert "2 of 3 regions have answered; region north: " in told.reason
    assert "client 1 (bern)" in told.reason
    of_members = {"method": "Truncation", "fraction": 0.5}
    members = population(2, 1, {**regional(), "rounds": 2}, of_members)
    simulation = start(job_text(members, **BY_LOSS), *"ab")
    simulation.complete()


X = {"method": "ByCapability", "required_tags": ["x"]}
FEDPROX: dict[str, Any] = {"aggregation": {"method": "FedProx", "mu": 0.1}}
SLOW = inner(2, options={"quorum": 1, "round_deadline_s": 5})
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "regions": (regional(regions={"a": [0, 1], "b": [2]}), "has 2 regions, and num_clients is 3"),
    "size": (regional(inner=inner(num_clients=4)), "4 is not 3, the clients of the largest"),
    "prox": (regional() | FEDPROX, "FedProx changes"),
    "tags": (regional() | {"client_selection": X}, "live on one worker"),
    "epochs": (regional(local_epochs=2), "set it there"),
    "strikes": (regional(strikes={"limit": 2, "bench_rounds": 1}), "of single clients"),
    "wait": (regional(on_missing_quorum="wait"), "not asked again"),
    "inner yogi": (regional(inner=inner(**FEDPROX)), "makes no sum of clients"),
    "inner tags": (regional(inner=inner(client_selection=X)), "in a region use All or Random"),
    "inner rule": (regional(inner=inner(options={"q": 1})), "tells sums of its clients"),
    "inner of inner": (regional(inner=inner(options={"inner": INNER})), "tells sums of its client"),
    "deadline": (
        regional(inner=SLOW, quorum=1, round_deadline_s=10),
        "2 rounds of 5 s in a region must be over",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    strategy, said = REFUSED[case]
    assert said in refusal(job_text(strategy))


def test_refused_of_sites_and_plateaus() -> None:
    plateau = {"name": "sgd", "lr": 0.1, "schedule": {"name": "plateau"}}
    evaluation = {"split": "test", "metrics": ["accuracy"], "best": "loss", "mode": "min"}
    for changes, regions, said in (
        (WARD, None, "which sites are in which region"),
        (WARD | {"evaluation": evaluation}, SITES, "on their own rows"),
        ({"optimizer": plateau, "evaluation": evaluation}, REGIONS, "no region sees"),
    ):
        spec = JobSpec.from_json(job_text(regional(regions=regions), **changes))
        assert said in str(objections_to(spec, BUILT_IN))


# ---- the tree in which a round's updates are added up ----


def trees(simulation: Simulation) -> list[tuple[tuple[int, ...], ...]]:
    """Let everything happen; the trees of all folds, in order of round."""
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    while simulation.queue:
        simulation.step()
        folds = simulation.due(AggregateRound)
        found |= {fold.round_num: fold.regions for fold in folds}
    return [found[number] for number in sorted(found)]


def strategy(regions: Any, **changes: Any) -> dict[str, Any]:
    return {**FEDERATED, "options": {"regions": regions}, **changes}


def test_a_tree_has_regions_by_name_and_clients_by_number() -> None:
    simulation = start(job_text(strategy({"b": [0, 2], "a": [3, 1]})), "x", "y")
    assert trees(simulation) == [((1, 3), (0, 2))] * 3
    assert trees(start(job_text(FEDERATED), "x")) == [()] * 3, "without regions"


def test_places_are_those_of_the_updates_of_the_round() -> None:
    """Of the clients that were drawn; a region without any is left out."""
    drawn = {"method": "Random", "fraction": 0.5}
    simulation = start(job_text(strategy({"b": [0, 3], "a": [1, 2]}, client_selection=drawn)), "x")
    region = {0: "b", 1: "a", 2: "a", 3: "b"}
    found = trees(simulation)
    assert len(found) == 3
    for closed, tree in zip(simulation.facts(f.RoundClosed), found, strict=True):
        clients = [accepted.client for accepted in closed.accepted]
        expected = [tuple(p for p, c in enumerate(clients) if region[c] == name) for name in "ab"]
        assert tree == tuple(places for places in expected if places)


def test_the_roster_is_made_of_the_sites_that_regions_name() -> None:
    """Others with the same data are no clients; without one that is named the run waits."""
    sites = {"south": ["dover", "anna"], "north": ["cork", "bern"]}
    simulation = start(job_text(strategy(sites), **WARD))
    simulation.sites(("aachen", "anna", "bern", "cork"))
    simulation.run()
    assert not simulation.facts(f.RosterFormed)
    needed = "4 workers with data 'ward' that options.regions names are needed, 3 are here"
    assert simulation.reason == needed
    simulation.sites(["dover"])
    assert trees(simulation) == [((1, 2), (0, 3))] * 3
    roster = simulation.fact(f.RosterFormed)
    assert [b.worker_id for b in roster.clients] == ["anna", "bern", "cork", "dover"]
