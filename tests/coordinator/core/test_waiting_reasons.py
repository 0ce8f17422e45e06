"""Runs that no worker fits: what they wait for, how long, and that nothing else ends them."""

from typing import Any

import pytest

from stratagem.common.base.ids import RunId
from stratagem.common.numerics.rules import CURRENT
from stratagem.coordinator.core.apply import CLUSTER
from stratagem.coordinator.core.commands import SubmitRun
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.facts import MembersFormed, ModelBuilt, RunSubmitted
from stratagem.coordinator.core.strategy_calls import why_waiting
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.observe.feed import Feed, FeedEvent, SegmentProgress, say_what_is_missing
from tests.coordinator.core.ask_every_run import next_deadline
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    FEDERATED,
    LOCAL,
    POPULATION_SECTIONS,
    job_text,
    population,
)
from tests.coordinator.core.simulation import RUN, Simulation

pytestmark = pytest.mark.core


PARTITIONS = [
    {"node_ids": [str(number)], "target": {"Tag": tag}}
    for number, tag in enumerate(("gpu", "large"))
]
DIRECT, STORE = {"protocol": "Direct"}, {"protocol": "DataStore"}
PIPELINE = {"type": "ModelParallel", "partitions": PARTITIONS, "communication": DIRECT}
TWO = {**FEDERATED, "num_clients": 2, "rounds": 1}
REPLICAS = {**DATA_PARALLEL, "num_replicas": 2}
BOTH = {**REPLICAS, "options": {"min_replicas": 2}}
PIPELINES = {**REPLICAS, "options": {"inner": PIPELINE}}
POPULATION = population(2, 1, PIPELINES, {"method": "Binary", "threshold": 0.0})
SEARCH = {**POPULATION_SECTIONS, "evaluation": {"best": "loss"}}
TAGS = ("gpu", "large")
NO_GPU = "partition 0 needs a worker tagged 'gpu'; partition 1 needs a worker tagged 'large'"
WARD = {"data": {"worker_local": "ward"}}


def begun(strategy: dict[str, Any], *workers: str, **changes: Any) -> Simulation:
    """Submitted at 100 s."""
    simulation = Simulation(now_s=100.0)
    simulation.come(workers)
    simulation.tell(SubmitRun(RUN, job_text(strategy, **changes), 0.0))
    return simulation


def why(simulation: Simulation) -> str:
    return why_waiting(simulation.record, world_of(simulation.state))


def placed(simulation: Simulation) -> set[str]:
    """Who takes part when the run has come to its end."""
    simulation.complete()
    return {m.worker_id for fact in simulation.facts(MembersFormed) for m in fact.members}


def test_it_fails_in_time_and_names_the_tags_that_nobody_has() -> None:
    simulation = begun(PIPELINE, "a", placement_timeout_s=60)
    assert next_deadline(simulation.state) == 160.0
    simulation.tick(159.9)
    assert simulation.record.ended is None
    simulation.crash()
    simulation.tick(160.0)
    run = simulation.record
    assert run.ended is RunPhase.FAILED
    assert run.reason.startswith(f"without workers for 60 s: {NO_GPU}")
    assert next_deadline(simulation.state) is None
    simulation = begun(PIPELINE, "a")
    assert NO_GPU in why(simulation)
    assert next_deadline(simulation.state) is None, "it waits for ever unless told"
    simulation.tick(1e9)
    assert simulation.record.ended is None


BY_TAG = {"method": "ByCapability", "required_tags": ["site"]}


@pytest.mark.parametrize(
    ("strategy", "sections", "expected"),
    [
        (PIPELINES, {}, NO_GPU),
        ({**TWO, "options": {"inner": PIPELINE}}, {}, NO_GPU),
        ({**TWO, "options": {"inner": PIPELINES}}, {}, NO_GPU),
        (POPULATION, SEARCH, NO_GPU),
        ({**TWO, "client_selection": BY_TAG}, {}, "no client has a worker with the tags site"),
        (TWO, WARD, "2 workers with data 'ward' are needed, 0 are here"),
        (
            {**DATA_PARALLEL, "options": {"min_replicas": 3}},
            {},
            "waiting for 3 of 3 workers: only 2 fit: a, b",
        ),
    ],
)
def test_nothing_is_begun_for_what_has_no_place(
    strategy: dict[str, Any], sections: dict[str, Any], expected: str
) -> None:
    simulation = begun(strategy, "a", "b", placement_timeout_s=60, **sections)
    assert why(simulation).startswith(expected)
    simulation.run()
    assert not simulation.facts(MembersFormed)
    assert not simulation.facts(ModelBuilt)
    simulation.tick(160.0)
    assert simulation.record.reason.startswith(f"without workers for 60 s: {expected}")


def test_time_with_workers_does_not_count() -> None:
    simulation = begun(LOCAL, "a", placement_timeout_s=60)
    assert (why(simulation), next_deadline(simulation.state)) == ("", None)
    simulation.queue.clear()
    simulation.tick(500.0)
    assert simulation.record.ended is None
    simulation.lose("a", reason="gone")
    assert next_deadline(simulation.state) == 560.0
    simulation.now_s = 550.0
    simulation.come("b")
    assert next_deadline(simulation.state) is None
    simulation.complete()


# ---- workers that do not take code, do not know the rules, or do not reach each other ----


CODE = {"code": {"digest": "0" * 64}}
NO_CODE: dict[str, Any] = {"code_policy": "none"}
OLDER: dict[str, Any] = {"numerics_rules": 0}
TAKE_NONE = (
    "no worker takes code from jobs: a, b; their operator allows it with --allow-code, or "
    "installs the package and `code` is left out"
)
OUTDATED = (
    f"of an older version, which does not know the rules of this run (numerics {CURRENT}) and "
    "has to be upgraded"
)


@pytest.mark.parametrize(
    ("sections", "unfit", "told"),
    [(CODE, NO_CODE, TAKE_NONE), ({}, OLDER, f"a, b are {OUTDATED}")],
    ids=["code", "rules"],
)
@pytest.mark.parametrize(
    ("strategy", "before"),
    [(LOCAL, "waiting for 1 of 1 workers: "), (PIPELINE, f"{NO_GPU}; "), (TWO, "")],
    ids=["Local", "pipeline", "Federated"],
)
def test_a_run_waits_for_workers_that_take_its_code_and_know_its_rules(
    strategy: dict[str, Any], before: str, sections: dict[str, Any], unfit: Any, told: str
) -> None:
    simulation = begun(strategy, **sections)
    simulation.come("ab", tags=TAGS, **unfit)
    assert why(simulation) == before + told
    simulation.run()
    assert not simulation.facts(MembersFormed)
    simulation.come("c", tags=TAGS, code_policy="digests")
    assert placed(simulation) == {"c"}


def test_workers_that_do_not_fit_are_named_beside_those_that_do() -> None:
    simulation = begun(BOTH, **CODE)
    simulation.come(["old"])  # of an earlier version, which says nothing
    simulation.come("b", **NO_CODE)
    one = "waiting for 2 of 2 workers: only 1 fits: "
    assert why(simulation) == f"{one}old; 1 more take no code from jobs: b"
    simulation = begun(BOTH)
    simulation.come("ab", **NO_CODE)
    simulation.complete()
    simulation = begun(BOTH)
    simulation.come("a")
    simulation.come("b", **OLDER)
    assert why(simulation) == f"{one}a; b is {OUTDATED}"
    simulation = begun(BOTH)
    simulation.come("a")
    simulation.come("b", tunnelled=True)
    assert why(simulation).startswith(f"{one}a; b is reached through a tunnel, ")
    simulation.come("c")
    assert placed(simulation) == {"a", "c"}


def test_a_site_that_does_not_know_the_rules_is_no_client() -> None:
    simulation = begun(TWO, **WARD)
    simulation.sites("a")
    simulation.sites("b", numerics_rules=2)
    assert why(simulation).endswith(f"are needed, 1 are here; b is {OUTDATED}")


APART = "Federated, ParameterServer and DataStore do not"
THROUGH = "waiting for 1 of 2 workers: a, b are reached through tunnels, and DataParallel"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (REPLICAS, THROUGH),
        (PIPELINE, f"{NO_GPU}; a, b are reached through tunnels, and ModelParallel/Direct has"),
        ({**TWO, "options": {"inner": REPLICAS}}, THROUGH),
        (LOCAL, ""),
        (TWO, ""),
        ({**REPLICAS, "num_replicas": 1}, ""),
        ({**REPLICAS, "aggregation": {"method": "ParameterServer"}}, ""),
        ({**PIPELINE, "communication": STORE}, ""),
    ],
)
def test_workers_behind_tunnels_exchange_with_the_coordinator_alone(
    strategy: dict[str, Any], expected: str
) -> None:
    simulation = begun(strategy)
    simulation.come("ab", tunnelled=True, tags=TAGS)
    assert why(simulation).startswith(expected)
    if expected:
        assert why(simulation).endswith(APART)
        simulation.run()
        assert not simulation.facts(MembersFormed)
    else:
        simulation.complete()


def test_a_partition_waits_for_a_worker_that_others_reach() -> None:
    simulation = begun(PIPELINE)
    simulation.come("a", tags=("gpu",))
    simulation.come("b", tunnelled=True, tags=("large",))
    assert why(simulation) == (
        "partition 1 needs a worker tagged 'large'; registered are: a (gpu); b is reached through "
        f"a tunnel, and ModelParallel/Direct has workers exchange with each other; {APART}"
    )


def test_watchers_are_told_when_it_changes() -> None:
    simulation = begun(PIPELINE)
    feed = Feed(history=None)  # type: ignore[arg-type]  # nothing is read back here
    submitted = RunSubmitted(job_json="{}", wall_s=0.0)
    feed.add_event(RUN, FeedEvent(0, 0.0, submitted, RunPhase.PLACING), is_last=False)

    def say(run_id: RunId = RUN) -> SegmentProgress | None:
        say_what_is_missing(feed, simulation.state, world_of(simulation.state), {run_id})
        return feed.progress(RUN)

    first = say()
    assert first is not None
    assert first.reason == why(simulation)
    assert say() is first
    simulation.come("a", tags=TAGS)
    assert say() is None
    feed.set_stall(RUN, "a stays at one thing")
    for told in ("a stays at one thing", "Build keeps failing"):
        if told.startswith("Build"):
            feed.set_trouble(RUN, told, is_news=True)
        shown = say(CLUSTER)
        assert shown is not None
        assert shown.reason == told, "another worker that comes ends neither"
    feed.set_progress(RUN, SegmentProgress(reason="long over"))
    assert say(CLUSTER) is None


def test_a_run_that_began_on_other_numerics_waits_for_such_workers() -> None:
    """Bits of another processor would not be those that its commits were made of."""
    simulation = begun(LOCAL, "a")
    simulation.alone()
    simulation.lose("a")
    simulation.come("b", numerics_fingerprint="other")
    assert why(simulation) == (
        "waiting for 1 of 1 workers: the run began on other numerics than the workers left have: b"
    )
    simulation.come("c")
    simulation.complete()
