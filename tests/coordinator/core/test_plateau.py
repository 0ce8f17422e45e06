"""The rates of a plateau: those of torch's scheduler, for any course of a metric."""

import math
import random
from typing import Any

import pytest

from stratagem.common.job import JobSpec
from stratagem.coordinator.core.courses import num_lr_reductions, with_course
from stratagem.coordinator.strategies.federated.silos import client_job
from tests.coordinator.core.jobs import (
    FEDERATED,
    LOCAL,
    POPULATION_SECTIONS,
    job_text,
    population,
    refusal,
    silos,
)

pytestmark = pytest.mark.core

EVALUATION = {"split": "test", "metrics": ["accuracy"], "best": "accuracy", "mode": "max"}


def optimizer(**plateau: object) -> dict[str, Any]:
    return {"name": "sgd", "lr": 0.1, "schedule": {"name": "plateau", **plateau}}


@pytest.mark.parametrize("seed", range(12))
def test_any_course_gives_the_rates_of_torch(seed: int) -> None:
    import torch

    drawn = random.Random(seed)
    plateau: dict[str, Any] = {
        "mode": drawn.choice(["min", "max"]),
        "metric": "loss",
        "factor": drawn.choice([0.1, 0.3, 0.7]),
        "patience": drawn.randrange(4),
        "cooldown": drawn.randrange(3),
        "min_delta": drawn.choice([0.0, 0.05]),
        "min_lr": drawn.choice([0.0, 1e-4, 0.03]),
    }
    text = job_text(LOCAL, evaluation=EVALUATION, optimizer=optimizer(**plateau))
    job = JobSpec.from_json(text)
    shadow = torch.optim.SGD.__new__(torch.optim.SGD)  # its constructor imports for seconds
    shadow.param_groups = [{"lr": 0.1}]
    named = {name: plateau[name] for name in ("mode", "factor", "patience", "cooldown", "min_lr")}
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        shadow, threshold=plateau["min_delta"], threshold_mode="abs", **named
    )
    metrics: dict[str, float] = {}
    schedule = job.optimizer.plateau
    assert schedule is not None
    for _ in range(60):
        value = drawn.choice([drawn.random(), drawn.random(), math.nan, math.inf])
        scheduler.step(value)
        metrics = with_course(job, metrics, {"test.loss": value})
        rate = schedule.reduced(0.1, num_lr_reductions(metrics))
        assert rate == shadow.param_groups[0]["lr"]
        metrics = with_course(job, metrics, {})  # a segment that is not evaluated


OF_POPULATION = {**POPULATION_SECTIONS, "optimizer": optimizer()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (job_text(LOCAL, optimizer=optimizer()), "evaluation: missing; optimizer.schedule follows"),
        (
            job_text(LOCAL, optimizer=optimizer(), evaluation={"split": "test"}),
            "optimizer.schedule.metric: missing; evaluation.best",
        ),
        (
            job_text(LOCAL, optimizer=optimizer(metric="f1"), evaluation=EVALUATION),
            "optimizer.schedule.metric: 'f1' is not measured",
        ),
        (
            job_text(LOCAL, optimizer=optimizer(metric="loss"), evaluation=EVALUATION),
            "optimizer.schedule.mode: missing; max or min",
        ),
        (job_text(population(), **OF_POPULATION), "optimizer.schedule: is not allowed with strate"),
        (
            job_text(silos(2), optimizer=optimizer(warmup_steps=2), evaluation={"best": "loss"}),
            "optimizer.schedule.warmup_steps: counts rounds under Federated",
        ),
        (
            job_text(LOCAL, optimizer=optimizer(steps=9), evaluation=EVALUATION),
            "optimizer.schedule.steps: has no meaning in plateau",
        ),
        (
            job_text(FEDERATED, optimizer={**optimizer(), "schedule": [{"name": "plateau"}]}),
            "optimizer.schedule.parts[0]: is a plateau, whose course evaluations decide",
        ),
        (
            job_text(
                LOCAL, optimizer={**optimizer(), "schedule": {"name": "cosine", "factor": 0.5}}
            ),
            "optimizer.schedule.factor: belongs to the plateau schedule ",
        ),
    ],
)
def test_a_plateau_that_cannot_be_is_refused(text: str, said: str) -> None:
    assert said in refusal(text)


def test_a_silo_trains_a_round_with_the_rates_that_the_plateau_has_left() -> None:
    groups = [
        {"name": "a", "match": ["a.*"], "lr": 0.4},
        {"name": "b", "match": ["b.*"], "optimizer": {"name": "adam", "lr": 0.2}},
        {"name": "c", "match": ["c.*"]},
    ]
    sections = {"optimizer": {**optimizer(factor=0.5), "groups": groups}}
    text = job_text(silos(2), evaluation={"split": "test", "best": "loss"}, **sections)
    found = client_job(JobSpec.from_json(text), 0, 3, num_lr_reductions=2).optimizer
    assert (found.lr, found.schedule) == (0.1 * 0.5 * 0.5, None)
    rates = [[lr for lr, _ in rule.groups.values()] for rule in found.rules()]
    assert rates == [[0.025, 0.1, 0.025], [0.05]]
    plain = job_text(silos(2), optimizer=optimizer(), evaluation={"split": "test", "best": "loss"})
    assert client_job(JobSpec.from_json(plain), 0, 1).optimizer.lr == 0.1
