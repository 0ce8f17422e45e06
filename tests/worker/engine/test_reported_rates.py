"""The learning rates in the report of a step: those that the optimizer made the update with."""

from typing import Any

import pytest
import torch

from stratagem.common.job import JobSpec
from stratagem.worker.engine import Trainer
from stratagem.worker.engine.optim.optimizers import GROUP, OptimizersInOrder
from stratagem.worker.phases import TrainingPhase
from tests.gan_jobs import gan
from tests.jobs import job
from tests.worker.engine.support import solo, trainer_of

GROUPS = [
    {"name": "biases", "match": ["*.bias"], "lr": 0.02},
    {"name": "last", "match": ["*2.*"], "optimizer": {"name": "adam", "lr": 0.3}},
]
EVALUATED = {"split": "test", "best": "loss", "mode": "min"}


def optimizer(**changes: Any) -> dict[str, Any]:
    return {"name": "sgd", "lr": 0.1, **changes}


def used(trainer: Trainer) -> set[float]:
    return {group["lr"] for group in trainer.optimizer.param_groups}


def steps_of(spec: JobSpec, num_steps: int, reductions: dict[int, int]) -> Any:
    """Yield the rates of the report, by series, and the trainer, after each step."""
    made = trainer_of(spec)
    exchange = solo(made, 2)
    for step in range(num_steps):
        made.lower_rates(reductions.get(step, 0))
        yield made.train_step(exchange, range(2), 2).learning_rates, made


@pytest.mark.parametrize(
    ("schedule", "reductions"),
    [
        (None, {}),
        ({"name": "cosine", "warmup_steps": 3}, {}),
        ({"name": "plateau", "metric": "loss", "mode": "min"}, {3: 1, 4: 2}),
        ("tests.userland.schedules:one_cycle", {}),
    ],
)
def test_rates_are_those_of_the_update_by_group(schedule: Any, reductions: dict[int, int]) -> None:
    spec = job(optimizer=optimizer(groups=GROUPS, schedule=schedule), evaluation=EVALUATED)
    seen = []
    for rates, made in steps_of(spec, 5, reductions):
        named = {f"train.lr.{group[GROUP]}": group["lr"] for group in made.optimizer.param_groups}
        assert rates == named
        seen.append(tuple(rates.values()))
    assert [*rates] == ["train.lr.default", "train.lr.biases", "train.lr.last"]
    assert len(set(seen)) > 1 or schedule is None


def test_rates_without_groups_and_of_a_step_that_was_skipped() -> None:
    spec = job(optimizer=optimizer(schedule="linear"), accumulation={"non_finite": "skip_step"})
    made = trainer_of(spec)
    exchange = solo(made, 1)
    for skipped in (False, True, False):
        if skipped:
            weight, kept = made.params[0][1], made.params[0][1].detach().clone()
            weight.data.fill_(torch.inf)
        report = made.train_step(exchange, range(1), 1)
        assert bool(report.num_skipped) == skipped
        step = report.step - 1
        assert report.learning_rates == {"train.lr": 0.1 * (1.0 - step / made.num_steps)}
        if skipped:
            weight.data.copy_(kept)


def test_rates_name_their_turn() -> None:
    turns = [
        {
            **turn,
            "optimizer": optimizer(lr=lr, schedule="cosine", groups=groups),
        }
        for turn, lr, groups in zip(
            gan()["turns"], (0.2, 0.4), (None, [{"name": "b", "match": ["*.bias"]}]), strict=True
        )
    ]
    for rates, made in steps_of(job(**gan(turns=turns)), 3, {}):
        assert [*rates] == ["train.lr.d", "train.lr.g.default", "train.lr.g.b"]
        assert isinstance(made.optimizer, OptimizersInOrder)
        own = [group["lr"] for part in made.optimizer.parts for group in part.param_groups]
        assert [*rates.values()] == own


def test_a_predicted_step_has_rates_too() -> None:
    phases = {"full_steps": 3, "predict_steps": 5, "correct_every": 2}
    smooth: dict[str, Any] = {
        "batch_size": 50,
        "steps": 40,
        "phases": phases,
    }  # so that predictions are good
    made = trainer_of(job(optimizer=optimizer(lr=0.05, schedule="cosine"), **smooth))
    exchange, phases_seen = solo(made, 2), set()
    for _ in range(12):
        report = made.train_step(exchange, range(2), 2)
        phases_seen.add(report.phase)
        assert {*report.learning_rates.values()} == used(made)
    assert TrainingPhase.PREDICT in phases_seen
