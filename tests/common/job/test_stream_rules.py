"""What goes together with training rows that come as a stream."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import data_parallel, gossip, model_parallel
from tests.common.strategy.documents import FEDERATED, POPULATION
from tests.jobs import job

STREAMED = {"entrypoint": "tests.userland.streams:shards", "streams": 6}
PIPELINE = model_parallel({"0 1": "a", "2 3": "b"}, protocol="Pipeline", micro_batch_size=4)
SEARCHED: dict[str, Any] = {
    "search_space": {"optimizer.lr": {"low": 0.1, "high": 0.2}},
    "steps_per_generation": 2,
    "evaluation": {"split": "test", "metrics": ["accuracy"], "best": "accuracy"},
}


def inside(num_replicas: int) -> dict[str, Any]:
    return POPULATION | {"options": {"inner": data_parallel(num_replicas)}}


ROUNDS: dict[str, Any] = {"steps": None, "checkpoint": None}
MEASURED = {"split": "test", "metrics": ["accuracy"]}
PIPELINES = {**data_parallel(2), "options": {"inner": PIPELINE}}
OF_SILOS = FEDERATED | {"options": {"inner": data_parallel(2)}}
SHUFFLED = {"entrypoint": STREAMED["entrypoint"], "shuffle_rows": 4}
CLIENT = {"method": "contiguous", "client": 0, "num_clients": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"epochs": 2, "steps": None},
            r"epochs: is not allowed with a stream of rows \(data\.streams\), .* set steps instead",
        ),
        (
            {"evaluation": MEASURED},
            r"evaluation\.every: '1 epoch' is not allowed with .*data\.streams.*; count in steps",
        ),
        (
            {"evaluation": {"split": "train", "every": "2 steps"}},
            r"evaluation\.split: 'train' is a stream of rows \(data\.streams\)",
        ),
        ({"checkpoint": {"every": "1 epoch"}}, r"checkpoint\.every: .*data\.streams"),
        ({"data": {**STREAMED, "order": "sequential"}}, r"data\.order: .*data\.shuffle_rows"),
        ({"execution": {"memory": "Cached"}}, r"execution\.memory: Cached .*data\.streams"),
        ({"data": {**STREAMED, "readers": 2}}, r"data\.readers: .*\(data\.streams\)"),
        (
            {"strategy": data_parallel(4)},
            r"data\.streams: 6 is not a multiple of strategy\.num_replicas, which is 4",
        ),
        ({"strategy": PIPELINE}, r"strategy: is ModelParallel, .*data\.streams"),
        ({"strategy": PIPELINES}, r"strategy\.options\.inner: is ModelParallel, .*data\.streams"),
        ({"strategy": gossip(3)}, r"aggregation\.method: Decentralized cannot go .*data\.streams"),
        ({"partition": CLIENT}, r"partition: divides rows by their numbers, .*data\.streams"),
        ({"strategy": FEDERATED, **ROUNDS}, r"data\.streams: has no meaning under Federated"),
        (
            {"strategy": OF_SILOS, "data": SHUFFLED, **ROUNDS},
            r"strategy\.options\.inner: cannot go with a stream of rows \(data\.streams\)",
        ),
        (
            {"strategy": inside(4), **ROUNDS, **SEARCHED},
            r"data\.streams: 6 is not a multiple of strategy\.options\.inner\.num_replicas, .* 4",
        ),
        (
            {"data": {"path": "rows.safetensors", "streams": 2}},
            r"data\.streams: has a meaning only together with",
        ),
    ],
)
def test_what_cannot_go_with_a_stream_is_refused_at_submit(changes: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        job(**{"data": STREAMED, **changes})


def test_what_goes_with_a_stream() -> None:
    every: dict[str, Any] = {
        "evaluation": {"split": "test", "every": "2 steps", "metrics": ["accuracy"]}
    }
    for strategy in (data_parallel(3), data_parallel(2, "ParameterServer"), None):
        spec = job(data=STREAMED, strategy=strategy or {"type": "Local"}, **every)
        assert JobSpec.from_json(spec.canonical_json()) == spec
    assert job(data=STREAMED, strategy=inside(2), steps=None, checkpoint=None, **SEARCHED)
