"""Strategies of subgraphs become strategies inside the job's own, or are refused."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
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


def test_a_strategy_without_room_refuses() -> None:
    with pytest.raises(InvalidInputError, match="cannot run inside ModelParallel/Direct, which"):
        nested(STAGES, PARALLEL)
