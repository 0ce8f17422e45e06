"""What goes together with training rows that come as a stream."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import data_parallel, gossip, model_parallel
from tests.jobs import job

STREAMED = {"entrypoint": "tests.userland.streams:shards", "streams": 6}
PIPELINE = model_parallel({"0 1": "a", "2 3": "b"}, protocol="Pipeline", micro_batch_size=4)
FEDERATED = {
    "type": "Federated",
    "num_clients": 3,
    "rounds": 2,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
POPULATION = {
    "type": "PopulationBased",
    "population_size": 2,
    "generations": 2,
    "exploit": {"method": "Truncation", "fraction": 0.5},
    "explore": {"method": "Resample"},
    "options": {"inner": data_parallel(4)},
}
SEARCHED: dict[str, Any] = {
    "search_space": {"optimizer.lr": {"low": 0.1, "high": 0.2}},
    "steps_per_generation": 2,
    "evaluation": {"split": "test", "metrics": ["accuracy"], "best": "accuracy"},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": (
        {"epochs": 2, "steps": None},
        r"epochs: is not allowed with a stream of rows \(data\.streams\), .* set steps instead",
    ),
    "evaluation": (
        {"evaluation": {"split": "test", "metrics": ["accuracy"]}},
        r"evaluation\.every: '1 epoch' is not allowed with .*data\.streams.*; count in steps",
    ),
    "evaluated on": (
        {"evaluation": {"split": "train", "every": "2 steps"}},
        r"evaluation\.split: 'train' is a stream of rows \(data\.streams\)",
    ),
    "checkpoint": ({"checkpoint": {"every": "1 epoch"}}, r"checkpoint\.every: .*data\.streams"),
    "order": ({"data": {**STREAMED, "order": "sequential"}}, r"data\.order: .*data\.shuffle_rows"),
    "cached": ({"execution": {"memory": "Cached"}}, r"execution\.memory: Cached .*data\.streams"),
    "readers": ({"data": {**STREAMED, "readers": 2}}, r"data\.readers: .*\(data\.streams\)"),
    "replicas": (
        {"strategy": data_parallel(4)},
        r"data\.streams: 6 is not a multiple of strategy\.num_replicas, which is 4",
    ),
    "pipeline": ({"strategy": PIPELINE}, r"strategy: is ModelParallel, .*data\.streams"),
    "pipelines in replicas": (
        {"strategy": {**data_parallel(2), "options": {"inner": PIPELINE}}},
        r"strategy\.options\.inner: is ModelParallel, .*data\.streams",
    ),
    "gossip": (
        {"strategy": gossip(3)},
        r"strategy\.aggregation\.method: Decentralized cannot go .*data\.streams",
    ),
    "client": (
        {"partition": {"method": "contiguous", "client": 0, "num_clients": 2}},
        r"partition: divides rows by their numbers, .*data\.streams",
    ),
    "federated": (
        {"strategy": FEDERATED, "steps": None, "checkpoint": None},
        r"data\.streams: has no meaning under Federated",
    ),
    "silos": (
        {
            "strategy": {**FEDERATED, "options": {"inner": data_parallel(2)}},
            "data": {"entrypoint": STREAMED["entrypoint"], "shuffle_rows": 4},
            "steps": None,
            "checkpoint": None,
        },
        r"strategy\.options\.inner: cannot go with a stream of rows \(data\.streams\)",
    ),
    "population": (
        {"strategy": POPULATION, "steps": None, "checkpoint": None, **SEARCHED},
        r"data\.streams: 6 is not a multiple of strategy\.options\.inner\.num_replicas, .* 4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_with_a_stream_is_refused_at_submit(case: str) -> None:
    changes, words = REFUSED[case]
    with pytest.raises(InvalidInputError, match=words):
        job(**{"data": STREAMED, **changes})


def test_what_goes_with_a_stream() -> None:
    every: dict[str, Any] = {
        "evaluation": {"split": "test", "every": "2 steps", "metrics": ["accuracy"]}
    }
    for strategy in (data_parallel(3), data_parallel(2, "ParameterServer"), None):
        spec = job(data=STREAMED, strategy=strategy or {"type": "Local"}, **every)
        assert JobSpec.from_json(spec.canonical_json()) == spec
    inner: dict[str, Any] = {**POPULATION, "options": {"inner": data_parallel(2)}}
    assert job(data=STREAMED, strategy=inner, steps=None, checkpoint=None, **SEARCHED)


def test_streams_belong_to_an_entry_point() -> None:
    with pytest.raises(InvalidInputError, match=r"data\.streams: has a meaning only together with"):
        job(data={"path": "rows.safetensors", "streams": 2})
