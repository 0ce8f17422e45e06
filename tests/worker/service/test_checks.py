"""What the worker that builds the model refuses, before anything is trained."""

from typing import Any

import pytest
from torch import nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.plans.build import check_built
from tests.jobs import job

MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
ROWS = {"train": 7, "test": 3, "nobody": 0}


def pipeline(*partitions: str) -> dict[str, Any]:
    return {
        "type": "ModelParallel",
        "partitions": [{"node_ids": [*each], "target": {"Tag": "any"}} for each in partitions],
        "communication": {"protocol": "Direct"},
    }


def replicas(inner: Any) -> dict[str, Any]:
    return {
        "type": "DataParallel",
        "num_replicas": 2,
        "aggregation": {"method": "AllReduce"},
        "options": {"inner": inner},
    }


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"evaluation": {"split": "tset"}},
            'evaluation.split: no split "tset"; there is train, test, nobody',
        ),
        ({"evaluation": {"split": "nobody"}}, 'evaluation.split: "nobody" has no rows'),
        (
            {"strategy": pipeline("01")},
            "strategy.partitions: '2': claimed by no partition; every node must be",
        ),
        (
            {"strategy": replicas(pipeline("01", "x2"))},
            "strategy.options.inner.partitions[1].node_ids[0]: 'x' is no node of the model; "
            "known are: 0, 1, 2",
        ),
    ],
)
def test_a_job_that_cannot_go_on_is_refused_there(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_built(job(**sections), MODEL, ROWS)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "sections",
    [{}, {"evaluation": None}, {"strategy": pipeline("01", "2")}, {"strategy": replicas(None)}],
)
def test_others_may(sections: dict[str, Any]) -> None:
    check_built(job(**sections), MODEL, ROWS)
