"""Which populations are refused at submission, and which values may be varied."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.strategy_boundary import objections_to
from stratagem.coordinator.runtime.plugins import BUILT_IN
from stratagem.coordinator.strategies.population.structural_hyperparameters import spread
from tests.coordinator.core.jobs import POPULATION_SECTIONS, check_at_submit, job_text, population
from tests.coordinator.core.simulation import RUN, start
from tests.gan_jobs import gan

pytestmark = pytest.mark.core


def spec(**changes: Any) -> str:
    return job_text(population(**changes), **POPULATION_SECTIONS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"search_space": None}, "search_space: missing"),
        ({"steps_per_generation": None}, "steps_per_generation: missing"),
        ({"evaluation": None}, "evaluation.best: missing"),
        ({"epochs": 3}, "epochs: has no meaning under PopulationBased; steps_per_generation"),
        ({"checkpoint": {"every": "1 generation"}}, "checkpoint.every: is not allowed"),
        (
            {"search_space": {"lr": {"low": 0.1, "high": 1.0}}},
            "search_space.lr: is not a hyperparameter",
        ),
        (
            {"search_space": {"optimizer.lr": {"low": -0.5, "high": 1.0}}},
            "search_space.optimizer.lr: -0.5 is not allowed; must be > 0",
        ),
        (
            {
                "search_space": {
                    "optimizer.schedule.name": {"choices": ["cosine", "step", "slope"]},
                    "optimizer.schedule.step_size_steps": {
                        "low": 1,
                        "high": 9,
                        "when": {"optimizer.schedule.name": "step"},
                    },
                }
            },
            "search_space.optimizer.schedule.name: 'slope' is not one of constant, linear, cosine",
        ),
        (
            {
                "search_space": {
                    "optimizer.lr": {"low": 0.1, "high": 1.0},
                    "optimizer.clip_norm": {"low": 0.0, "high": 1.0},
                }
            },
            "search_space.optimizer.clip_norm: 0.0 is not allowed; must be > 0",
        ),
        (
            {"search_space": {"optimizer.schedule.name": {"choices": ["cosine", "plateau"]}}},
            "search_space.optimizer.schedule.name: plateau is not allowed in a population",
        ),
        (
            {"search_space": {"optimizer.lr": {"low": 1.0}}},
            "search_space.optimizer.lr.high: missing",
        ),
    ],
)
def test_jobs_that_are_refused(changes: dict[str, Any], expected: str) -> None:
    document = {**POPULATION_SECTIONS, **changes}
    kept = {key: value for key, value in document.items() if value is not None}
    with pytest.raises(InvalidInputError) as caught:
        check_at_submit(job_text(population(), **kept))
    assert str(caught.value).startswith(expected)


def test_the_rate_of_a_turn_is_varied_and_looked_at() -> None:
    evaluation = {"best": "loss"}
    sections = {**gan(), **POPULATION_SECTIONS, "optimizer": None, "evaluation": evaluation}
    fits = {"turns.d.optimizer.lr": {"low": 0.1, "high": 1.0}}
    check_at_submit(job_text(population(), **{**sections, "search_space": fits}))
    wrong = {"turns.d.optimizer.lr": {"low": -0.1, "high": 1.0}}
    with pytest.raises(InvalidInputError, match=r"turns\.d\.optimizer\.lr: -0\.1 is not allowed"):
        check_at_submit(job_text(population(), **{**sections, "search_space": wrong}))


@pytest.mark.parametrize(
    ("name", "dimension", "expected"),
    [
        ("full_steps", {"low": 2, "high": 9}, "cannot be varied: the lengths of the phases belong"),
        ("predictor.kind", {"choices": ["wls", "momentum"]}, "cannot be varied: the gradients"),
        ("warmup_steps", {"low": 1, "high": 9}, "cannot be varied: only the first cycle"),
        ("tust", {"low": 0.5, "high": 2.0}, "cannot be varied: it has no meaning by itself"),
        ("trust", {"low": -1.0, "high": 2.0}, "-1.0 is not allowed; must be > 0"),
        ("min_correlation", {"choices": [0.5, 7.0]}, "7.0 is not allowed; must be in [-1, 1]"),
        ("predictor.momentum", {"low": 0.1, "high": 0.9}, "belongs to kind momentum only"),
    ],
)
def test_phases_are_varied_where_a_copied_state_allows_it(
    name: str, dimension: dict[str, Any], expected: str
) -> None:
    space = {"search_space": {f"phases.{name}": dimension}}
    with pytest.raises(InvalidInputError) as caught:
        check_at_submit(job_text(population(), **{**POPULATION_SECTIONS, **space, "phases": {}}))
    assert str(caught.value).startswith(f"search_space.phases.{name}: {expected}")


def test_values_that_need_each_other_are_allowed() -> None:
    """The curve `step` has no meaning without the number that another dimension draws."""
    space = {
        "optimizer.schedule.name": {"choices": ["cosine", "step"]},
        "optimizer.schedule.step_size_steps": {
            "low": 1,
            "high": 9,
            "when": {"optimizer.schedule.name": "step"},
        },
    }
    text = job_text(population(size=8), **{**POPULATION_SECTIONS, "search_space": space})
    check_at_submit(text)
    simulation = start(text, "a", "b")
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_an_inner_strategy_is_checked_with_its_place() -> None:
    aggregation = {"method": "AllReduce"}
    inner = {"type": "DataParallel", "num_replicas": 99, "aggregation": aggregation}
    found = JobSpec.from_json(spec(inner=inner))
    (violation,) = objections_to(found, BUILT_IN)
    assert str(violation).startswith("strategy.options.inner.num_replicas: 99 replicas cannot")


def test_a_population_is_no_member() -> None:
    (violation,) = objections_to(JobSpec.from_json(spec(inner=population())), BUILT_IN)
    assert str(violation).startswith("strategy.options.inner: a population is no member: ")


def test_a_value_that_is_tried_by_nothing_but_the_first_draw_is_refused_as_well() -> None:
    """Of 192 choices 64 are tried one by one; those between them are wrong here."""
    tried = set(spread(192, 64))
    choices = [0.001 * (number + 1) if number in tried else -1.0 for number in range(192)]
    space = {"search_space": {"optimizer.lr": {"choices": choices}}}
    found = JobSpec.from_json(job_text(population(), **{**POPULATION_SECTIONS, **space}))
    assert [str(violation) for violation in objections_to(found, BUILT_IN)] == [
        "strategy.options.inner: its job would be invalid: optimizer.lr: -1.0 is not allowed; "
        "must be > 0"
    ]


def test_a_keyword_is_not_blamed_for_what_else_is_wrong_with_an_optimizer() -> None:
    """With sgd the curve `step` lacks its length here, which momentum has no part in."""
    space = {
        "optimizer.name": {"choices": ["sgd", "adam"]},
        "optimizer.momentum": {"low": 0.0, "high": 0.9, "when": {"optimizer.name": "sgd"}},
        "optimizer.schedule.name": {"choices": ["step", "cosine"]},
        "optimizer.schedule.step_size_steps": {
            "low": 1,
            "high": 9,
            "when": {"optimizer.name": "adam"},
        },
    }
    sections = {**POPULATION_SECTIONS, "search_space": space}
    by_seed = [
        {each.field for each in objections_to(JobSpec.from_json(text), BUILT_IN)}
        for text in (job_text(population(), **sections, seed=seed) for seed in range(9))
    ]
    assert set() in by_seed, "the first draw may be one in which all is well"
    assert {"search_space.optimizer.schedule.name"} in by_seed
    assert not any("search_space.optimizer.momentum" in fields for fields in by_seed)
