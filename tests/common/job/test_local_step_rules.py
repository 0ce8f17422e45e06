"""The settings of a job that go together with local steps, and the sentence against each other."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import DataParallel, MeanOfReplicas, Nesterov, local_steps_of
from tests.common.strategy.documents import DATA_PARALLEL, FEDERATED
from tests.gan_jobs import TURNS
from tests.jobs import document, user_data

pytestmark = pytest.mark.core
SETTINGS = [
    {"from_step": 0, "seed": 5, "params": {"optimizer.lr": 0.1}},
    {"from_step": 4, "seed": 6, "params": {"optimizer.lr": 0.3}},
]


def strategy(local_steps: int = 4, **options: Any) -> dict[str, Any]:
    return DATA_PARALLEL | {"options": {"local_steps": local_steps, **options}}


def parsed(**sections: Any) -> JobSpec:
    return JobSpec.parse(document(**{"strategy": strategy(), "checkpoint": None, **sections}))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"checkpoint": {"every": "6 steps"}},
            "checkpoint.every: '6 steps' is not allowed: the replicas are joined only after each "
            "strategy.options.local_steps, 4; the nearest is '4 steps' or '8 steps'",
        ),
        ({"checkpoint": {"every": "3 steps"}}, "4; the nearest is '4 steps'"),
        (
            {"evaluation": {"split": "test", "every": "1 epoch"}},
            "evaluation.every: '1 epoch' is not allowed: the replicas are joined only after each "
            "strategy.options.local_steps, 4; count in steps, a multiple of it",
        ),
        ({"compression": "int8"}, "compression: is not allowed with strategy.options.local_steps"),
        (
            {"strategy": strategy(outer_bits=8), "execution": {"precision": "Full"}},
            "strategy.options.outer_bits: codes float32; precision is Full",
        ),
        ({"phases": {}}, "phases: is not allowed with strategy.options.local_steps: each replica"),
        ({"weight_average": {}}, "weight_average: is not allowed with strategy.options.local"),
        ({"turns": TURNS, "optimizer": None, "loss": None}, "turns: is not allowed with strategy"),
        ({"hyperparameter_schedule": {"settings": SETTINGS}}, "hyperparameter_schedule: is not a"),
        (
            {"data": {**user_data("classes"), "streams": 2}},
            "cannot go with a stream of rows (data.s",
        ),
    ],
)
def test_contradiction_is_refused(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parsed(**sections)
    assert expected in str(caught.value)


def test_local_steps_inside_of_another_strategy_are_refused() -> None:
    federated = FEDERATED | {"options": {"inner": strategy()}}
    expected = r"options\.inner\.options\.local_steps: is possible in a strategy of its own"
    with pytest.raises(InvalidInputError, match=expected):
        JobSpec.parse(document(strategy=federated))


def test_what_is_left_out_has_defaults_and_a_job_reads_its_own_text() -> None:
    job = parsed(evaluation={"split": "test"})
    assert str(job.evaluation.every if job.evaluation else "") == "4 steps"
    assert isinstance(job.strategy, DataParallel)
    assert local_steps_of(job.strategy) == 4
    assert job.strategy.options.outer_optimizer == Nesterov(0.7, 0.9)
    assert job.strategy.options.outer is None
    mean = parsed(strategy=strategy(outer={"name": "mean"})).strategy
    assert isinstance(mean, DataParallel)
    assert mean.options.outer_optimizer == MeanOfReplicas()
    job = parsed(strategy=strategy(50, outer={"name": "nesterov", "lr": 0.5}))
    assert JobSpec.from_json(job.canonical_json()) == job
    assert '"local_steps":50,"outer":{"name":"nesterov","lr":0.5}' in job.canonical_json()
