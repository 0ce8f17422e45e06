"""Execution settings over real processes: the bits of the reference, and what the log says."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import ALLOWED, assert_same_bits, data_parallel, train
from tests.jobs import job, user_data
from tests.reference.loops import sharded_loop

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("model", "num_replicas", "execution"),
    [
        ("everything", 3, {"precision": "Half", "gradient": {"Checkpointed": 2}}),
        ("dropout_mlp", 2, {"precision": "Mixed", "amp_dtype": "float16", "memory": "Cached"}),
        ("mlp", 2, {"fusion": True, "memory": "Pooled"}),
        pytest.param("dropout_mlp", 2, {"mode": "Lazy"}, marks=pytest.mark.sweep),
        pytest.param(
            "dropout_mlp",
            2,
            {"preset": "memory_efficient", "gradient": {"Checkpointed": 2}},
            marks=pytest.mark.sweep,
        ),
    ],
    ids=str,
)
def test_equals_the_sharded_loop(
    client: Client, model: str, num_replicas: int, execution: dict[str, Any]
) -> None:
    data = user_data("classes", num_rows=42)
    spec = job(model, data=data, strategy=data_parallel(num_replicas), execution=execution)
    done = train(client, spec)
    assert_same_bits(done.state, dict(sharded_loop(spec, ALLOWED, num_replicas).state))


def test_what_is_done_in_another_way_stands_in_the_log(client: Client) -> None:
    execution = {"gradient": {"Checkpointed": 2}, "memory": "MinimalPeak"}
    run = client.submit(job("everything", strategy=data_parallel(2), execution=execution))
    run.result()
    texts = [line.text for line in run.logs() if line.level == "WARNING"]
    assert any("the blocks of Everything cannot be grouped" in text for text in texts)
    assert any("gradients of several workers keep their storage" in text for text in texts)
