"""The curves of the learning rate against torch's schedulers, chains of them, and the rates in the
report of a step: those that the optimizer made the update with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from stratagem.common.job import JobSpec, OptimizerSpec, ScheduleSpec
from stratagem.worker.engine import Trainer
from stratagem.worker.engine.apply_step import learning_rate_factor, schedule_factor
from stratagem.worker.engine.optimizers import GROUP, OptimizersInOrder, make_optimizer
from stratagem.worker.phases import TrainingPhase
from tests.gan_jobs import gan
from tests.jobs import job
from tests.worker.engine.support import solo, trainer_of

NUM_STEPS = 23
THEIRS: dict[str, tuple[dict[str, Any], Callable[[torch.optim.Optimizer], LRScheduler]]] = {
    "step": (
        {"step_size_steps": 3, "gamma": 0.5},
        lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    ),
    "multistep": (
        {"milestones": [1, 7, 22], "gamma": 0.3},
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 7, 22], gamma=0.3),
    ),
    "exponential": (
        {"gamma": 0.9},
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
    ),
    "polynomial": (
        {"power": 2.5},
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, NUM_STEPS, power=2.5),
    ),
    "restarts": (
        {"period_steps": 3, "period_factor": 2, "final_lr_fraction": 0.1},
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2, eta_min=0.02),
    ),
    "onecycle": (
        {"up_fraction": 0.4, "initial_lr_fraction": 0.1, "final_lr_fraction": 0.001},
        lambda optimizer: lr_scheduler.OneCycleLR(
            *(optimizer, 0.2, NUM_STEPS),
            pct_start=0.4,
            div_factor=10,
            final_div_factor=100,
            cycle_momentum=False,
        ),
    ),
}


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_a_curve_is_that_of_torch(name: str) -> None:
    options, make = THEIRS[name]
    spec = OptimizerSpec.model_validate(
        {"name": "sgd", "lr": 0.2, "schedule": {"name": name, **options}}
    )
    optimizer = make_optimizer(spec, [("weight", torch.nn.Parameter(torch.zeros(1)))])
    scheduler = make(optimizer)
    for step in range(NUM_STEPS):
        rate = 0.2 * learning_rate_factor(spec, step, NUM_STEPS)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15)
        optimizer.step()
        scheduler.step()


def test_restarts_of_one_length() -> None:
    spec = ScheduleSpec(name="restarts", period_steps=4)
    assert [schedule_factor(spec, step, 1) for step in (0, 2, 4, 6)] == pytest.approx([1, 0.5] * 2)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_one_cycle_of_a_few_steps_stays_between_its_ends(num_steps: int) -> None:
    spec = ScheduleSpec(name="onecycle")
    factors = [schedule_factor(spec, step, num_steps) for step in range(num_steps + 2)]
    assert all(0.0 <= factor <= 1.0 for factor in factors)
    assert factors[num_steps:] == pytest.approx([0.0, 0.0])


def factor(step: int, **spec: Any) -> float:
    return schedule_factor(ScheduleSpec.model_validate(spec), step, 10)


def test_curves_to_the_end() -> None:
    assert [factor(step, name="constant", warmup_steps=4) for step in range(5)] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
    ]
    assert factor(5, name="linear") == 0.5
    assert factor(10, name="linear", final_lr_fraction=0.1) == pytest.approx(0.1)
    assert factor(5, name="cosine") == pytest.approx(0.5)
    assert factor(12, name="cosine", final_lr_fraction=0.2) == pytest.approx(0.2)


def test_a_curve_may_be_shorter_than_the_training() -> None:
    assert [factor(step, name="linear", steps=4) for step in range(6)] == [1, 0.75, 0.5, 0.25, 0, 0]
    assert factor(3, name="linear", steps=5, warmup_steps=1) == 0.5


def test_a_chain_is_its_parts_one_after_the_other() -> None:
    parts = [
        {"name": "linear", "steps": 2},
        {"name": "constant", "steps": 1},
        {"name": "linear", "warmup_steps": 1},
    ]
    chain = ScheduleSpec.model_validate(parts)
    assert chain.name == "chain"
    factors = [schedule_factor(chain, step, 8) for step in range(9)]
    assert factors == [1, 0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0]


def test_a_chain_longer_than_the_training_is_cut_by_its_end() -> None:
    chain = ScheduleSpec.model_validate([{"name": "linear", "steps": 20}, "linear"])
    assert [schedule_factor(chain, step, 10) for step in (0, 9, 20, 25)] == [1, 0.55, 1, 0]


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
        {**turn, "optimizer": optimizer(lr=lr, schedule="cosine", groups=groups)}
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
