"""Strategies of subgraphs become strategies inside the job's own, or are refused."""

from itertools import pairwise
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.schema import document
from stratagem.common.strategy import DataParallel, Local, PopulationBased
from tests.common.job.documents import MINIMAL
from tests.common.model.graph_documents import nodes

PARALLEL = {"type": "DataParallel", "num_replicas": 2, "aggregation": {"method": "AllReduce"}}
OTHER = {**PARALLEL, "num_replicas": 3}
STAGES = {
    "type": "ModelParallel",
    "partitions": [{"node_ids": ["part/a"], "target": {"Tag": "gpu"}}],
    "communication": {"protocol": "Direct"},
}
POPULATION = {
    "type": "PopulationBased",
    "population_size": 2,
    "generations": 2,
    "exploit": {"method": "Binary", "threshold": 0.1},
    "explore": {"method": "Resample"},
}
SEARCH: dict[str, Any] = {
    "epochs": None,
    "search_space": {"optimizer.lr": {"low": 0.1, "high": 1.0}},
    "steps_per_generation": 1,
    "evaluation": {"best": "loss"},
}


def nested(strategy: Any, inner: Any, outside: str = "ReLU", **changes: Any) -> JobSpec:
    """A subgraph with one linear layer and a strategy, and one node outside of it."""
    part = {"nodes": nodes("a"), "training_strategy": inner}
    graph = {
        "nodes": [{"id": "out", "module": outside, "kwargs": {}}],
        "subgraphs": [{"id": "part", "graph": part}],
        "edges": [{"source": "part", "target": "out"}],
    }
    document = {**MINIMAL, "model": {"graph": graph}, "strategy": strategy, **changes}
    return JobSpec.parse({key: value for key, value in document.items() if value is not None})


def test_a_subgraph_inherits_or_repeats() -> None:
    assert nested(PARALLEL, None).strategy == nested(PARALLEL, PARALLEL).strategy
    assert nested(PARALLEL, PARALLEL, outside="PReLU").strategy == nested(PARALLEL, None).strategy


def test_a_subgraph_with_all_that_is_trained_runs_inside() -> None:
    strategy = nested(PARALLEL, STAGES).strategy
    assert isinstance(strategy, DataParallel)
    assert (
        strategy
        == JobSpec.parse(
            {**MINIMAL, "strategy": {**PARALLEL, "options": {"inner": STAGES}}}
        ).strategy
    )
    population = nested(POPULATION, PARALLEL, **SEARCH).strategy
    assert isinstance(population, PopulationBased)
    assert population.options.inner == nested(PARALLEL, None).strategy


def test_inside_local_it_is_the_whole() -> None:
    assert nested({"type": "Local"}, PARALLEL).strategy == nested(PARALLEL, None).strategy
    assert nested(None, None).strategy == Local()


def test_it_goes_as_deep_as_there_is_room() -> None:
    outer = {**POPULATION, "options": {"inner": PARALLEL}}
    strategy = nested(outer, STAGES, **SEARCH).strategy
    assert isinstance(strategy, PopulationBased)
    assert isinstance(strategy.options.inner, DataParallel)
    assert strategy.options.inner == nested(PARALLEL, STAGES).strategy


def test_the_canonical_text_says_it_twice_and_means_the_same() -> None:
    once = nested(PARALLEL, STAGES)
    assert JobSpec.from_json(once.canonical_json()) == once


def test_training_outside_is_refused_with_the_node() -> None:
    with pytest.raises(InvalidInputError) as caught:
        nested(PARALLEL, STAGES, outside="PReLU")
    assert str(caught.value) == (
        "model.graph.subgraphs.part.training_strategy: ModelParallel/Direct differs from "
        "DataParallel/AllReduce around it, and the subgraph does not hold all that is trained: "
        "'out' is outside"
    )


def test_a_part_of_a_model_trains_as_the_model_does() -> None:
    with pytest.raises(InvalidInputError, match="Local cannot be a stage, which is a part of the"):
        nested(STAGES, {"type": "Local"})


# ---- groups of replicas ----


def groups(outer: dict[str, Any], inner: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**outer, "options": {**options, "inner": inner}}


def flattened(strategy: dict[str, Any]) -> Any:
    return JobSpec.parse({**MINIMAL, "strategy": strategy}).strategy


def test_groups_of_replicas_are_replicas_of_one_flat_strategy() -> None:
    flat = {**PARALLEL, "num_replicas": 6}
    assert flattened(groups(PARALLEL, OTHER)) == flattened(flat)
    assert flattened(groups(PARALLEL, groups(OTHER, STAGES))) == flattened(groups(flat, STAGES))
    thrice = flattened(groups(PARALLEL, groups(OTHER, PARALLEL)))
    assert thrice == flattened({**PARALLEL, "num_replicas": 12})
    least = groups(OTHER, {**PARALLEL, "options": {"min_replicas": 2}}, min_replicas=2)
    assert flattened(least) == flattened({**flat, "options": {"min_replicas": 4}})
    sliced = {"partition_state": "optimizer"}
    of_slices = groups(PARALLEL, {**OTHER, "options": sliced}, **sliced)
    assert flattened(of_slices) == flattened({**flat, "options": sliced})


def test_the_canonical_text_of_groups_is_that_of_the_flat_job() -> None:
    job = JobSpec.parse({**MINIMAL, "strategy": groups(PARALLEL, OTHER)})
    flat = JobSpec.parse({**MINIMAL, "strategy": {**PARALLEL, "num_replicas": 6}})
    assert job.canonical_json() == flat.canonical_json()
    assert JobSpec.from_json(job.canonical_json()) == job


def test_groups_inside_other_strategies_are_flat_too() -> None:
    population = {**MINIMAL, **SEARCH}
    del population["epochs"]
    strategies = [
        JobSpec.parse(
            {**population, "strategy": {**POPULATION, "options": {"inner": inner}}}
        ).strategy
        for inner in (groups(PARALLEL, OTHER), {**PARALLEL, "num_replicas": 6})
    ]
    assert strategies[0] == strategies[1]


GOSSIP = {**PARALLEL, "aggregation": {"method": "Decentralized", "topology": "ring"}}
SERVER = {**PARALLEL, "aggregation": {"method": "ParameterServer"}}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            groups(SERVER, PARALLEL),
            "strategy.options.inner.aggregation.method: AllReduce inside ParameterServer: all "
            "groups make one sum, in one way; give both the same",
        ),
        (
            groups(GOSSIP, PARALLEL),
            "strategy.options.inner: a node of Decentralized is one worker, and cannot be a group "
            "of replicas",
        ),
        (
            groups(PARALLEL, GOSSIP),
            "strategy.options.inner.aggregation.method: nodes of Decentralized have a model each, "
            "and no gradient to be summed around them",
        ),
        (
            groups(PARALLEL, {**PARALLEL, "options": {"local_steps": 2}}),
            "strategy.options.inner.options.local_steps: replicas with local_steps have no "
            "gradient in each step to be summed around them",
        ),
        (
            groups(PARALLEL, {**PARALLEL, "options": {"partition_state": "optimizer"}}),
            "strategy.options.inner.options.partition_state: 'optimizer' inside 'none': all groups "
            "make one sum; give both the same",
        ),
        (
            groups({**PARALLEL, "num_replicas": 200}, {**PARALLEL, "num_replicas": 100}),
            "strategy.options.inner.num_replicas: 100 in each of 200 are 20000; at most 16384",
        ),
    ],
)
def test_groups_that_are_no_flat_strategy_are_refused(
    strategy: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.parse({**MINIMAL, "batch_size": 256, "strategy": strategy})
    assert str(caught.value) == expected


def test_a_subgraph_with_replicas_inside_replicas_is_refused() -> None:
    """What the flat job says of it could not be told from what the subgraph says."""
    with pytest.raises(InvalidInputError, match="is one flat strategy; give it as"):
        nested(PARALLEL, OTHER)


# ---- stages that are groups of replicas ----


def staged(*groups_of: Any, around: Any = None) -> JobSpec:
    """A pipeline of subgraphs with one linear layer and a strategy each."""
    names = [f"part{number}" for number in range(len(groups_of))]
    graph = {
        "subgraphs": [
            {"id": name, "graph": {"nodes": nodes("a"), "training_strategy": own}}
            for name, own in zip(names, groups_of, strict=True)
        ],
        "edges": [{"source": a, "target": b} for a, b in pairwise(names)],
    }
    partitions = [{"node_ids": [name], "target": {"Tag": "gpu"}} for name in names]
    stages = {**STAGES, "partitions": partitions}
    strategy = stages if around is None else {**around, "options": {"inner": stages}}
    return JobSpec.parse({**MINIMAL, "model": {"graph": graph}, "strategy": strategy})


def test_no_key_of_stages_that_are_replicated_is_taken_for_an_ignored_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are read again as the replicas that they are, whose keys are others."""
    logs = LogCapture()
    monkeypatch.setattr(document, "_log", structlog.wrap_logger(None, processors=[logs]))
    assert isinstance(staged(OTHER, OTHER).strategy, DataParallel)
    assert logs.entries == []


def test_stages_that_are_replicated_alike_are_replicas_of_the_pipeline() -> None:
    replicated = staged(OTHER, OTHER)
    assert replicated.strategy == staged(None, None, around=OTHER).strategy
    assert JobSpec.from_json(replicated.canonical_json()) == replicated
    assert staged(OTHER, OTHER, around=OTHER).strategy == replicated.strategy
    local = {**OTHER, "options": {"inner": {"type": "Local"}}}
    assert staged(local, local).strategy == replicated.strategy


@pytest.mark.parametrize(
    ("stages", "around", "expected"),
    [
        (
            (PARALLEL, OTHER),
            None,
            "model.graph.subgraphs.part1.training_strategy.num_replicas: 3 where "
            "model.graph.subgraphs.part0 has 2: stages hand their rows on, so all need the same",
        ),
        (
            (PARALLEL, None),
            None,
            "model.graph.subgraphs.part0.training_strategy: stages hand their rows on, so all need "
            "2 replicas, and 'a' is in none",
        ),
        (
            (PARALLEL, SERVER),
            None,
            "model.graph.subgraphs.part1.training_strategy: differs from that of "
            "model.graph.subgraphs.part0: stages that are replicated are replicated alike",
        ),
        (
            (PARALLEL, PARALLEL),
            OTHER,
            "model.graph.subgraphs.part0.training_strategy: DataParallel/AllReduce of 2 differs "
            "from the replicas around the stages, DataParallel/AllReduce of 3; say it once",
        ),
        (
            (groups(PARALLEL, STAGES), groups(PARALLEL, STAGES)),
            None,
            "model.graph.subgraphs.part0.training_strategy.options.inner: ModelParallel/Direct "
            "inside a stage, which is a part of a model",
        ),
    ],
)
def test_stages_that_are_not_replicated_alike_are_refused(
    stages: tuple[Any, ...], around: Any, expected: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        staged(*stages, around=around)
    assert str(caught.value) == expected
