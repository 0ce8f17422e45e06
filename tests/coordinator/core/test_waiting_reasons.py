"""Runs that no worker fits: what they wait for, how long, and that nothing else ends them."""

from dataclasses import replace
from typing import Any

import pytest

from stratagem.common.numerics.numerics_rules import CURRENT
from stratagem.coordinator.core.commands import LoseWorker, RegisterWorker, SubmitRun, Tick
from stratagem.coordinator.core.facts import MembersFormed, ModelBuilt, RunSubmitted
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.apply import CLUSTER
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.strategy_boundary import why_waiting
from stratagem.coordinator.observe.event_feed import Feed, FeedEvent, SegmentProgress
from stratagem.coordinator.observe.waiting_reasons import say_what_is_missing
from tests.coordinator.core.ask_every_run import next_deadline
from tests.coordinator.core.jobs import job_text
from tests.coordinator.core.simulation import RUN, Simulation, member, register

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


FEDERATED = {
    "type": "Federated",
    "num_clients": 2,
    "rounds": 1,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
REPLICAS = {"type": "DataParallel", "num_replicas": 2, "aggregation": {"method": "AllReduce"}}
PIPELINES = {**REPLICAS, "options": {"inner": PIPELINE}}
POPULATION = {
    "type": "PopulationBased",
    "population_size": 2,
    "generations": 1,
    "exploit": {"method": "Binary", "threshold": 0.0},
    "explore": {"method": "Resample"},
    "options": {"inner": PIPELINES},
}
SEARCH = {
    "search_space": {"optimizer.lr": {"low": 0.1, "high": 1.0}},
    "steps_per_generation": 1,
    "evaluation": {"best": "loss"},
}
NO_GPU = "partition 0 needs a worker tagged 'gpu'; partition 1 needs a worker tagged 'large'"


def begun(strategy: dict[str, Any], *workers: str, **changes: Any) -> Simulation:
    """Submitted at 100 s."""
    simulation = Simulation(now_s=100.0)
    for name in workers:
        simulation.tell(register(name))
    simulation.tell(SubmitRun(RUN, job_text(strategy, **changes), 0.0))
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


@pytest.mark.parametrize(
    ("strategy", "sections", "expected"),
    [
        (PIPELINES, {}, NO_GPU),
        ({**FEDERATED, "options": {"inner": PIPELINE}}, {}, NO_GPU),
        ({**FEDERATED, "options": {"inner": PIPELINES}}, {}, NO_GPU),
        (POPULATION, SEARCH, NO_GPU),
        (
            {
                **FEDERATED,
                "client_selection": {"method": "ByCapability", "required_tags": ["site"]},
            },
            {},
            "no client has a worker with the tags site",
        ),
        (
            FEDERATED,
            {"data": {"worker_local": "ward"}},
            "2 workers with data 'ward' are needed, 0 are here",
        ),
        (
            {**REPLICAS, "num_replicas": 3, "options": {"min_replicas": 3}},
            {},
            "waiting for 3 of 3 workers: only 2 fit: a, b",
        ),
    ],
)
def test_nothing_is_begun_for_what_has_no_place(
    strategy: dict[str, Any], sections: dict[str, Any], expected: str
) -> None:
    simulation = begun(strategy, "a", "b", placement_timeout_s=60, **sections)
    assert reason(simulation).startswith(expected)
    simulation.run()
    assert not simulation.facts(MembersFormed)
    assert not simulation.facts(ModelBuilt)
    tick(simulation, 160.0)
    assert simulation.state.runs[RUN].reason.startswith(f"without workers for 60 s: {expected}")


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


CODE = {"digest": "0" * 64}
TAKE_NONE = (
    "no worker takes code from jobs: a, b; their operator allows it with --allow-code, or "
    "installs the package and `code` is left out"
)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (LOCAL, f"waiting for 1 of 1 workers: {TAKE_NONE}"),
        (PIPELINE, f"{NO_GPU}; {TAKE_NONE}"),
        (FEDERATED, TAKE_NONE),
    ],
)
def test_a_job_with_code_waits_for_workers_that_take_it(
    strategy: dict[str, Any], expected: str
) -> None:
    simulation = begun(strategy, code=CODE)
    for name in "ab":
        simulation.tell(register(name, code_policy="none", tags=("gpu", "large")))
    assert reason(simulation) == expected
    simulation.run()
    assert not simulation.facts(MembersFormed)
    simulation.tell(register("c", code_policy="digests", tags=("gpu", "large")))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    assert {m.worker_id for fact in simulation.facts(MembersFormed) for m in fact.members} == {"c"}


def test_workers_that_take_no_code_are_named_beside_those_that_fit() -> None:
    alone = {**REPLICAS, "options": {"min_replicas": 2}}
    simulation = begun(alone, code=CODE)
    simulation.tell(register("old"))  # of an earlier version, which says nothing
    simulation.tell(register("b", code_policy="none"))
    assert reason(simulation) == (
        "waiting for 2 of 2 workers: only 1 fits: old; 1 more take no code from jobs: b"
    )
    installed = begun(alone)
    for name in "ab":
        installed.tell(register(name, code_policy="none"))
    installed.run()
    assert installed.state.runs[RUN].ended is RunPhase.COMPLETED


def older(name: str) -> RegisterWorker:
    """A worker of a version that does not say which rules it knows."""
    return register(name, numerics_rules=0, tags=("gpu", "large"))


OUTDATED = (
    f"of an older version, which does not know the rules of this run (numerics {CURRENT}) and "
    "has to be upgraded"
)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (LOCAL, f"waiting for 1 of 1 workers: a, b are {OUTDATED}"),
        (PIPELINE, f"{NO_GPU}; a, b are {OUTDATED}"),
        (FEDERATED, f"a, b are {OUTDATED}"),
    ],
)
def test_a_run_waits_for_workers_that_know_its_rules(
    strategy: dict[str, Any], expected: str
) -> None:
    simulation = begun(strategy)
    for name in "ab":
        simulation.tell(older(name))
    assert reason(simulation) == expected
    simulation.run()
    assert not simulation.facts(MembersFormed)
    simulation.tell(register("c", tags=("gpu", "large")))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    assert {m.worker_id for fact in simulation.facts(MembersFormed) for m in fact.members} == {"c"}


def test_workers_that_do_not_know_the_rules_are_named_beside_those_that_fit() -> None:
    simulation = begun({**REPLICAS, "options": {"min_replicas": 2}})
    simulation.tell(register("a"))
    simulation.tell(older("b"))
    assert reason(simulation) == (f"waiting for 2 of 2 workers: only 1 fits: a; b is {OUTDATED}")


def test_a_site_that_does_not_know_the_rules_is_no_client() -> None:
    simulation = begun(FEDERATED, data={"worker_local": "ward"})
    simulation.tell(register("a", local_data=("ward",)))
    simulation.tell(register("b", local_data=("ward",), numerics_rules=2))
    assert reason(simulation).endswith(f"are needed, 1 are here; b is {OUTDATED}")


SILOS = {**FEDERATED, "options": {"inner": REPLICAS}}
APART = "Federated, ParameterServer and DataStore do not"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            REPLICAS,
            "waiting for 1 of 2 workers: a, b are reached through tunnels, and DataParallel",
        ),
        (PIPELINE, f"{NO_GPU}; a, b are reached through tunnels, and ModelParallel/Direct has"),
        (SILOS, "waiting for 1 of 2 workers: a, b are reached through tunnels, and DataParallel"),
    ],
)
def test_workers_behind_tunnels_do_not_exchange_with_each_other(
    strategy: dict[str, Any], expected: str
) -> None:
    simulation = begun(strategy)
    for name in "ab":
        simulation.tell(register(name, tunnelled=True, tags=("gpu", "large")))
    assert reason(simulation).startswith(expected)
    assert reason(simulation).endswith(APART)
    simulation.run()
    assert not simulation.facts(MembersFormed)


@pytest.mark.parametrize(
    "strategy",
    [
        LOCAL,
        FEDERATED,
        {**REPLICAS, "num_replicas": 1},
        {**REPLICAS, "aggregation": {"method": "ParameterServer"}},
        {**PIPELINE, "communication": {"protocol": "DataStore"}},
    ],
)
def test_workers_behind_tunnels_exchange_with_the_coordinator(strategy: dict[str, Any]) -> None:
    simulation = begun(strategy)
    for name in "ab":
        simulation.tell(register(name, tunnelled=True, tags=("gpu", "large")))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_a_worker_behind_a_tunnel_is_named_beside_those_that_fit() -> None:
    simulation = begun({**REPLICAS, "options": {"min_replicas": 2}})
    simulation.tell(register("a"))
    simulation.tell(register("b", tunnelled=True))
    assert reason(simulation).startswith(
        "waiting for 2 of 2 workers: only 1 fits: a; b is reached through a tunnel, "
    )
    simulation.tell(register("c"))
    simulation.run()
    members = {m.worker_id for fact in simulation.facts(MembersFormed) for m in fact.members}
    assert members == {"a", "c"}


def test_a_partition_waits_for_a_worker_that_others_reach() -> None:
    simulation = begun(PIPELINE)
    simulation.tell(register("a", tags=("gpu",)))
    simulation.tell(register("b", tunnelled=True, tags=("large",)))
    assert reason(simulation) == (
        "partition 1 needs a worker tagged 'large'; registered are: a (gpu); b is reached through "
        f"a tunnel, and ModelParallel/Direct has workers exchange with each other; {APART}"
    )


def test_watchers_are_told_when_it_changes() -> None:
    simulation = begun(PIPELINE)
    feed = Feed(history=None)  # type: ignore[arg-type]  # nothing is read back here
    submitted = RunSubmitted(job_json="{}", wall_s=0.0)
    feed.add_event(RUN, FeedEvent(0, 0.0, submitted, RunPhase.PLACING), is_last=False)
    say_what_is_missing(feed, simulation.state, world_of(simulation.state), {RUN})
    first = feed.progress(RUN)
    assert first is not None
    assert first.reason == reason(simulation)
    say_what_is_missing(feed, simulation.state, world_of(simulation.state), {RUN})
    assert feed.progress(RUN) is first
    simulation.tell(register("a", tags=("gpu", "large")))
    say_what_is_missing(feed, simulation.state, world_of(simulation.state), {RUN})
    assert feed.progress(RUN) is None
    for is_stall in (True, False):
        told = "a stays at one thing" if is_stall else "Build keeps failing"
        if is_stall:
            feed.set_stall(RUN, told)
        else:
            feed.set_trouble(RUN, told, is_news=True)
        say_what_is_missing(feed, simulation.state, world_of(simulation.state), {CLUSTER})
        shown = feed.progress(RUN)
        assert shown is not None
        assert shown.reason == told, "another worker that comes ends neither"
    feed.set_progress(RUN, SegmentProgress(reason="long over"))
    say_what_is_missing(feed, simulation.state, world_of(simulation.state), {CLUSTER})
    assert feed.progress(RUN) is None


def test_a_run_that_began_on_other_numerics_waits_for_such_workers() -> None:
    """Bits of another processor would not be those that its commits were made of."""
    simulation = begun(LOCAL, "a")
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    simulation.tell(LoseWorker(member("a"), "killed"))
    other = register("b")
    numerics = other.capability.model_copy(update={"numerics_fingerprint": "other"})
    simulation.tell(replace(other, capability=numerics))
    assert reason(simulation) == (
        "waiting for 1 of 1 workers: the run began on other numerics than the workers left have: b"
    )
    simulation.tell(register("c"))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
