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
from tests.common.strategy.documents import DATA_PARALLEL as PARALLEL
from tests.common.strategy.documents import POPULATION

OTHER = {**PARALLEL, "num_replicas": 3}
STAGES = {
    "type": "ModelParallel",
    "partitions": [{"node_ids": ["part/a"], "target": {"Tag": "gpu"}}],
    "communication": {"protocol": "Direct"},
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


def test_a_subgraph_inherits_or_repeats_or_runs_inside() -> None:
    once = nested(PARALLEL, STAGES)
    assert JobSpec.from_json(once.canonical_json()) == once
    strategy = once.strategy
    assert isinstance(strategy, DataParallel)
    assert strategy == flattened(groups(PARALLEL, STAGES))
    population = nested(POPULATION, PARALLEL, **SEARCH).strategy
    assert isinstance(population, PopulationBased)
    assert population.options.inner == nested(PARALLEL, None).strategy
    assert nested({"type": "Local"}, PARALLEL).strategy == nested(PARALLEL, None).strategy
    assert nested(None, None).strategy == Local()
    outer = {**POPULATION, "options": {"inner": PARALLEL}}
    strategy = nested(outer, STAGES, **SEARCH).strategy
    assert isinstance(strategy, PopulationBased)
    assert isinstance(strategy.options.inner, DataParallel)
    assert strategy.options.inner == nested(PARALLEL, STAGES).strategy
    assert nested(PARALLEL, None).strategy == nested(PARALLEL, PARALLEL).strategy
    assert nested(PARALLEL, PARALLEL, outside="PReLU").strategy == nested(PARALLEL, None).strategy


def test_training_outside_is_refused_with_the_node() -> None:
    with pytest.raises(InvalidInputError) as caught:
        nested(PARALLEL, STAGES, outside="PReLU")
    (violation,) = caught.value.violations
    assert violation.field == "model.graph.subgraphs.part.training_strategy"
    assert violation.message.startswith("ModelParallel/Direct differs from DataParallel/AllReduce")
    assert violation.message.endswith("'out' is outside")
    with pytest.raises(InvalidInputError, match="Local cannot be a stage, which is a part of the"):
        nested(STAGES, {"type": "Local"})
    # What the flat job says of it could not be told from what the subgraph says.
    with pytest.raises(InvalidInputError, match="is one flat strategy; give it as"):
        nested(PARALLEL, OTHER)


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


def test_the_canonical_text_of_groups_is_that_of_the_flat_job_in_populations_too() -> None:
    population = {key: value for key, value in (MINIMAL | SEARCH).items() if value is not None}
    for sections, around in ((MINIMAL, lambda inner: inner), (population, populated)):
        job, flat = (
            JobSpec.parse({**sections, "strategy": around(inner)})
            for inner in (groups(PARALLEL, OTHER), {**PARALLEL, "num_replicas": 6})
        )
        assert job.canonical_json() == flat.canonical_json()
        assert JobSpec.from_json(job.canonical_json()) == job


def populated(inner: dict[str, Any]) -> dict[str, Any]:
    return {**POPULATION, "options": {"inner": inner}}


GOSSIP = {**PARALLEL, "aggregation": {"method": "Decentralized", "topology": "ring"}}
SERVER = {**PARALLEL, "aggregation": {"method": "ParameterServer"}}
APART = {**PARALLEL, "options": {"local_steps": 2}}
SLICED = {**PARALLEL, "options": {"partition_state": "optimizer"}}
MANY = groups({**PARALLEL, "num_replicas": 200}, {**PARALLEL, "num_replicas": 100})


@pytest.mark.parametrize(
    ("strategy", "field", "said"),
    [
        (groups(SERVER, PARALLEL), "aggregation.method", "AllReduce inside ParameterServer: all "),
        (groups(GOSSIP, PARALLEL), "", "a node of Decentralized is one worker, and cannot be a g"),
        (groups(PARALLEL, GOSSIP), "aggregation.method", "nodes of Decentralized have a model ea"),
        (groups(PARALLEL, APART), "options.local_steps", "replicas with local_steps have no grad"),
        (groups(PARALLEL, SLICED), "options.partition_state", "'optimizer' inside 'none': all gr"),
        (MANY, "num_replicas", "100 in each of 200 are 20000; at most 16384"),
    ],
)
def test_groups_that_are_no_flat_strategy_are_refused(strategy: Any, field: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.parse({**MINIMAL, "batch_size": 256, "strategy": strategy})
    (violation,) = caught.value.violations
    assert violation.field == f"strategy.options.inner.{field}".rstrip(".")
    assert violation.message.startswith(said)


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


def test_stages_replicated_alike_are_replicas_of_a_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicated = staged(OTHER, OTHER)
    assert replicated.strategy == staged(None, None, around=OTHER).strategy
    assert JobSpec.from_json(replicated.canonical_json()) == replicated
    assert staged(OTHER, OTHER, around=OTHER).strategy == replicated.strategy
    local = {**OTHER, "options": {"inner": {"type": "Local"}}}
    assert staged(local, local).strategy == replicated.strategy
    # They are read again as the replicas that they are, whose keys are others.
    logs = LogCapture()
    monkeypatch.setattr(document, "_log", structlog.wrap_logger(None, processors=[logs]))
    assert isinstance(staged(OTHER, OTHER).strategy, DataParallel)
    assert logs.entries == []


@pytest.mark.parametrize(
    ("stages", "around", "field", "said"),
    [
        ((PARALLEL, OTHER), None, "part1.training_strategy.num_replicas", "3 where .*part0 has 2"),
        ((PARALLEL, None), None, "part0.training_strategy", "all need 2 replicas, and 'a' is in n"),
        ((PARALLEL, SERVER), None, "part1.training_strategy", "differs from that of .*part0"),
        (*((PARALLEL, PARALLEL), OTHER, "part0.training_strategy"), "of 2 differs from the replic"),
        (
            *((groups(PARALLEL, STAGES),) * 2, None, "part0.training_strategy.options.inner"),
            "ModelParallel/Direct inside a stage, which is a part of a model",
        ),
    ],
)
def test_stages_of_other_replicas_are_refused(
    stages: tuple[Any, ...], around: Any, field: str, said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said) as caught:
        staged(*stages, around=around)
    (violation,) = caught.value.violations
    assert violation.field == f"model.graph.subgraphs.{field}"
