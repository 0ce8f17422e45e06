"""An average of the parameters of a global model, and how it is fetched; the engine has others."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    assert_same_bits,
    federated,
    train,
)
from tests.jobs import user_data
from tests.reference.evaluation_loop import evaluation_loop
from tests.reference.loops import federated_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("an average of the parameters is kept, measured and fetched"),
]

SECTIONS: dict[str, Any] = {
    "data": user_data("classes", num_rows=60),
    "optimizer": ADAMW,
    "weight_average": {"decay": 0.75, "start_step": 2, "every": 2},
    "evaluation": {"split": "test", "every": "5 rounds", "of": "average", "metrics": ["accuracy"]},
}
YOGI = {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01}


def test_of_a_global_model(client: Client, tmp_path: Path) -> None:
    """The last round is none that is averaged: the buffers are those of the present model."""
    spec = federated("batch_norm_mlp", rounds=5, aggregation=YOGI, **SECTIONS)
    outcome, expected = train(client, spec), federated_loop(spec, ALLOWED)
    assert_same_bits(outcome.state, expected.state)
    assert_same_bits(outcome.run.state_dict("average"), expected.average)
    measured = evaluation_loop(spec, ALLOWED, expected.average)
    assert {name: outcome.status.metrics[name] for name in measured} == measured
    assert measured != evaluation_loop(spec, ALLOWED, expected.state)
    path = outcome.run.download(tmp_path / "average.safetensors", "average")
    assert_same_bits(load_file(path), expected.average)
    averages = [event.payload["average"] for event in outcome.of("SegmentCommitted")]
    assert [bool(average) for average in averages] == [False, True, True, True, True]
    assert outcome.status.commits[-1].average == averages[-1]
