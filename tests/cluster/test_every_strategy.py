"""Each strategy over real processes has the bits of its reference in one process, on one, two and
three workers: one job of each kind of exchange. Its options are in the engine's own tests."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    APART,
    METHODS,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    local_steps,
    model_parallel,
    replicated,
    train,
)
from tests.cluster.references import bits_of
from tests.jobs import LOSSES, job, user_data, user_model
from tests.reference.loops import sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("each strategy has the bits of its reference on one, two, three workers"),
]

# 50 rows in batches of 16: the last batch of an epoch has 2 rows, fewer than 3 or 4 replicas.
# 55 rows: the last one has 7. Batch norm refuses shards of one row: 42 rows, the last has 10.
UNEVEN = user_data("classes", num_rows=55)
FURTHER: dict[str, dict[str, Any]] = {
    **APART,
    "micro-batches": {
        "model": "dropout_mlp",
        "optimizer": ADAMW,
        "accumulation": {"micro_batch_size": 3, "non_finite": "skip_step"},
    },
}


@pytest.mark.parametrize(
    ("case", "num_replicas"),
    [
        ("adamw clip cosine", 1),
        ("micro-batches", 2),
        ("batch norm", 3),
        pytest.param("momentum", 3, marks=pytest.mark.sweep),
        pytest.param("tied and frozen", 4, marks=pytest.mark.sweep),
    ],
)
def test_both_ways_to_add_up_gradients_have_the_bits_of_the_sharded_loop(
    client: Client, case: str, num_replicas: int
) -> None:
    runs = {}
    for method in METHODS:
        spec = job(**FURTHER[case], strategy=data_parallel(num_replicas, method))
        runs[method] = train(client, spec)
        assert_same_bits(runs[method].state, sharded_loop(spec, ALLOWED, num_replicas).state)
        assert len(runs[method].digests) == 5
        assert len(runs[method].of("MembersFormed")[0].payload["members"]) == num_replicas
        assert runs[method].status.reproducible
    assert runs["AllReduce"].status.engine == ("shm" if num_replicas > 1 else "solo")
    assert runs["AllReduce"].digests == runs["ParameterServer"].digests
    losses = [[e.payload["loss"] for e in run.of("SegmentFinished")] for run in runs.values()]
    assert losses[0] == losses[1]
    metrics = [run.status.metrics for run in runs.values()]
    assert 0 < metrics[0]["train.grad_norm"] <= metrics[0]["train.max_grad_norm"]
    assert metrics[0] == metrics[1]
    assert metrics[0].get("train.skipped_steps") == (0 if case == "micro-batches" else None)
    committed = [event.payload["metrics"] for event in runs["AllReduce"].of("SegmentCommitted")]
    assert [each["train.loss"] for each in committed] == losses[0]
    assert runs["AllReduce"].status.commits[-1].metrics == committed[-1]


def slices(num_replicas: int, state: str) -> dict[str, Any]:
    return {**data_parallel(num_replicas), "options": {"partition_state": state}}


def stages(*partitions: str, protocol: str, rows: int | None = None) -> dict[str, Any]:
    """Each on a worker of its own."""
    cut = {ids: f"worker-{number}" for number, ids in enumerate(partitions)}
    pieces: dict[str, Any] = {} if rows is None else {"micro_batch_size": rows}
    return model_parallel(cut, protocol=protocol, **pieces)


ANYWHERE = [("0 1", "tag:any"), ("2 3", "tag:any")]
PIECES: dict[str, Any] = {"protocol": "Pipeline", "micro_batch_size": 3}
PHASES = {
    "full_steps": 2,
    "predict_steps": 4,
    "correct_every": 3,
    # Small batches: the predictions are bad, and taken all the same.
    "max_relative_error": 100,
    "min_correlation": -1,
}
YOGI = {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01}
TWO_HEADS = {
    "graph": {
        "nodes": [
            {"id": "in", "module": "Linear", "kwargs": {"in_features": 12, "out_features": 8}},
            {"id": "bend", "module": "Tanh"},
            {"id": "norm", "module": "BatchNorm1d", "kwargs": {"num_features": 8}},
            {"id": "drop", "module": "Dropout", "kwargs": {"p": 0.25}},
            {"id": "sum", "module": "Add"},
            {"id": "left", "module": "Linear", "kwargs": {"in_features": 8, "out_features": 5}},
            {"id": "right", "module": "Linear", "kwargs": {"in_features": 8, "out_features": 3}},
        ],
        "edges": [
            {"source": "in", "target": "bend"},
            {"source": "bend", "target": "norm"},
            {"source": "norm", "target": "drop"},
            {"source": "drop", "target": "sum", "port": 0},
            {"source": "bend", "target": "sum", "port": 1},
            {"source": "sum", "target": "left"},
            {"source": "sum", "target": "right"},
        ],
        "outputs": ["left", "right"],
    }
}
WIDE = user_model("mlp", hidden=20_011)
"""Its parameters are cut: they have 4, 1, 2 and 1 blocks of the norm."""


def apart(case: str, strategy: dict[str, Any]) -> JobSpec:
    """A join of all replicas ends each segment."""
    every = strategy["options"]["local_steps"]
    return job(**{**APART[case], "checkpoint": {"every": f"{every} steps"}}, strategy=strategy)


CASES: dict[str, tuple[int, JobSpec]] = {
    "Local": (1, job("dropout_mlp", strategy={"type": "Local"})),
    "gossip of one": (1, job(**APART["momentum"], strategy=gossip(1))),
    "gossip of two": (2, job(**APART["tied and frozen"], strategy=gossip(2))),
    "gossip of three": (3, job(**APART["dropout"], strategy=gossip(3, "star"))),
    "local steps of one": (1, apart("momentum", local_steps(1, 3))),
    "local steps of two": (2, apart("dropout", local_steps(2, 2, "ParameterServer", outer_bits=4))),
    "local steps of three": (
        3,
        apart("batch norm", local_steps(3, 4, fragments=4, overlap_steps=1, outer_bits=8)),
    ),
    "slices of the optimizer": (
        2,
        job(WIDE, optimizer=ADAMW, data=UNEVEN, strategy=slices(2, "optimizer"), steps=6),
    ),
    "slices of all": (
        3,
        job(WIDE, optimizer=ADAMW, data=UNEVEN, strategy=slices(3, "full"), steps=6),
    ),
    "Direct": (2, job("dropout_mlp", strategy=stages("0 1", "2 3", protocol="Direct"))),
    "DataStore": (
        2,
        job(
            "dropout_mlp",
            accumulation={"micro_batch_size": 5},
            strategy=stages("0 1", "2 3", protocol="DataStore"),
        ),
    ),
    "Pipeline": (
        3,
        job(
            TWO_HEADS,
            loss=f"{LOSSES}:two_heads",
            optimizer=ADAMW,
            data=UNEVEN,
            strategy=stages("in bend", "norm drop", "sum left right", protocol="Pipeline", rows=4),
        ),
    ),
    "replicas of pipelines": (
        4,
        job(
            "dropout_mlp",
            strategy=replicated(2, model_parallel(ANYWHERE, **PIECES), "ParameterServer"),
        ),
    ),
    "groups of pipelines": (
        4,
        job(
            "dropout_mlp",
            data=UNEVEN,
            strategy=replicated(2, replicated(3, model_parallel(ANYWHERE))),
        ),
    ),
    "phases": (3, job(optimizer=ADAMW, phases=PHASES, strategy=data_parallel(3))),
    "compression": (3, job("dropout_mlp", compression="ternary", strategy=data_parallel(3))),
    "FedAvg": (
        0,
        federated(
            "dropout_mlp",
            num_clients=7,
            selection={"method": "Random", "fraction": 0.5},
            partition={"method": "dirichlet", "alpha": 0.5},
            options={"local_epochs": 2},
        ),
    ),
    "FedProx": (0, federated(aggregation={"method": "FedProx", "mu": 0.3}, num_clients=3)),
    "FedYogi": (0, federated("everything", aggregation=YOGI, num_clients=3)),
}
"""How many workers train together, if they do."""


@pytest.mark.parametrize("name", CASES)
def test_a_strategy_has_the_bits_of_its_reference(client: Client, name: str) -> None:
    num_workers, spec = CASES[name]
    outcome = train(client, spec)
    assert_same_bits(outcome.state, bits_of(spec))
    assert outcome.status.reproducible
    if num_workers:
        assert len(outcome.of("MembersFormed")[0].payload["members"]) == num_workers
    if name == "compression":
        assert outcome.status.engine == "shm, ternary"
    if name == "slices of all":  # what is committed is the same as that of whole replicas
        whole = {**spec.document(), "strategy": data_parallel(3)}
        assert train(client, JobSpec.parse(whole)).digests == outcome.digests
    if name == "phases":
        # The second of the five segments has predicted steps only: nobody has sent anything.
        finished = [event.payload["num_rows"] for event in outcome.of("SegmentFinished")]
        assert finished == [32, 0, 16, 2, 16]
        assert outcome.status.metrics["train.predicted_steps"] == 5
