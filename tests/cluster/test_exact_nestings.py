"""Groups of replicas over real processes are the flat job; replicated stages are replicas."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    assert_same_bits,
    data_parallel,
    model_parallel,
    replicated,
    train,
)
from tests.jobs import job, user_data
from tests.reference.loops import sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("groups of replicas are the flat job, and replicated stages are replicas"),
]

UNEVEN = user_data("classes", num_rows=55)
"""Batches of 16 rows, the last of 7: neither divides by 12; of 12 shards five have none."""


def test_groups_of_replicas_have_the_bits_of_the_flat_job(client: Client) -> None:
    sections: dict[str, Any] = {"model": "dropout_mlp", "optimizer": ADAMW, "data": UNEVEN}
    flat = job(**sections, strategy=data_parallel(12))
    spec = job(**sections, strategy=replicated(4, data_parallel(3)))
    found, expected = train(client, spec), train(client, flat)
    assert found.digests == expected.digests
    assert_same_bits(found.state, sharded_loop(flat, ALLOWED, 12).state)


def test_replicated_stages_have_the_bits_of_replicas(client: Client) -> None:
    sizes = {"body": (12, 8), "head": (8, 5)}
    model = {
        "graph": {
            "subgraphs": [
                {"id": name, "graph": layer(*size, data_parallel(2))}
                for name, size in sizes.items()
            ],
            "edges": [{"source": "body", "target": "head"}],
        }
    }
    stages = model_parallel([("body", "tag:any"), ("head", "tag:any")])
    spec = job(model, optimizer=ADAMW, data=UNEVEN, strategy=stages)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)
    assert len(outcome.of("MembersFormed")[0].payload["members"]) == 4


def layer(num_in: int, num_out: int, strategy: dict[str, Any]) -> dict[str, Any]:
    kwargs = {"in_features": num_in, "out_features": num_out}
    nodes = [{"id": "linear", "module": "Linear", "kwargs": kwargs}, {"id": "x", "module": "Tanh"}]
    edges = [{"source": "linear", "target": "x"}]
    return {"nodes": nodes, "edges": edges, "training_strategy": strategy}
