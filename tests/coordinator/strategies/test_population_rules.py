"""Which populations are refused at submission, which values may be varied, and by how much: exploit
and explore, who copies whom, and what becomes of hyperparameters."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.search_space import (
    Categorical,
    Conditional,
    Float,
    Int,
    Ordinal,
    Scale,
    SearchSpace,
)
from stratagem.common.schema.json import JSON
from stratagem.common.strategy import Binary, Perturbation, Resample, Truncation
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.strategy_calls import objections_to
from stratagem.coordinator.strategies.population.evolution import (
    donors,
    draw,
    explored,
    spread,
    stream,
)
from tests.coordinator.core.jobs import (
    FEDERATED,
    POPULATION_SECTIONS,
    check_at_submit,
    job_text,
    population,
)
from tests.coordinator.core.simulation import start
from tests.gan_jobs import gan

pytestmark = pytest.mark.core


def spec(**changes: Any) -> str:
    return job_text(population(**changes), **POPULATION_SECTIONS)


STEP = {"optimizer.schedule.name": ["step"]}
LENGTH = {"low": 1, "high": 9}
CURVES = {"choices": ["cosine", "step"]}
SLOPE = {"optimizer.schedule.name": {"choices": ["cosine", "step", "slope"]}}
OF_STEP = {"optimizer.schedule.step_size_steps": {**LENGTH, "when": STEP}}
CLIP = {"optimizer.clip_norm": {"low": 0.0, "high": 1.0}}
LR = {"optimizer.lr": {"low": 0.1, "high": 1.0}}
PLATEAU = {"optimizer.schedule.name": {"choices": ["cosine", "plateau"]}}


def space(dimensions: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {**POPULATION_SECTIONS, "search_space": dimensions, **sections}


def refusal(sections: dict[str, Any]) -> str:
    kept = {key: value for key, value in sections.items() if value is not None}
    with pytest.raises(InvalidInputError) as caught:
        check_at_submit(job_text(population(), **kept))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"search_space": None}, "search_space: missing"),
        ({"steps_per_generation": None}, "steps_per_generation: missing"),
        ({"evaluation": None}, "evaluation.best: missing"),
        ({"epochs": 3}, "epochs: has no meaning under PopulationBased; steps_per_generation"),
        ({"checkpoint": {"every": "1 generation"}}, "checkpoint.every: is not allowed"),
        (space({"lr": LENGTH}), "search_space.lr: is not a hyperparameter"),
        (space({"optimizer.lr": {"low": -0.5, "high": 1.0}}), "search_space.optimizer.lr: -0.5 is"),
        (space(SLOPE | OF_STEP), "search_space.optimizer.schedule.name: 'slope' is not one of con"),
        (space(LR | CLIP), "search_space.optimizer.clip_norm: 0.0 is not allowed; must be > 0"),
        (space(PLATEAU), "search_space.optimizer.schedule.name: plateau is not allowed in a popul"),
        (space({"optimizer.lr": {"low": 1.0}}), "search_space.optimizer.lr.high: missing"),
    ],
)
def test_jobs_that_are_refused(changes: dict[str, Any], expected: str) -> None:
    assert refusal({**POPULATION_SECTIONS, **changes}).startswith(expected)


def test_the_rate_of_a_turn_is_varied_and_looked_at() -> None:
    sections = {**gan(), **POPULATION_SECTIONS, "optimizer": None, "evaluation": {"best": "loss"}}
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
    said = refusal(space({f"phases.{name}": dimension}, phases={}))
    assert said.startswith(f"search_space.phases.{name}: {expected}")


def test_values_that_need_each_other_are_allowed() -> None:
    """The curve `step` has no meaning without the number that another dimension draws."""
    sections = space({"optimizer.schedule.name": CURVES} | OF_STEP)
    text = job_text(population(size=8, generations=2), **sections)
    check_at_submit(text)
    start(text, "a", "b").complete()


ALL_REDUCE = {"type": "DataParallel", "num_replicas": 99, "aggregation": {"method": "AllReduce"}}
FOUR_ROUNDS = {**FEDERATED, "num_clients": 3, "rounds": 4}


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (ALL_REDUCE, ".num_replicas: 99 replicas cannot"),
        (population(), ": a population is no member: "),
        (FOUR_ROUNDS, ".rounds: 4 is not steps_per_generation, 5; a federated member counts"),
    ],
)
def test_an_inner_strategy_is_checked_with_its_place(inner: dict[str, Any], said: str) -> None:
    (violation,) = objections_to(JobSpec.from_json(spec(inner=inner)), BUILT_IN)
    assert str(violation).startswith(f"strategy.options.inner{said}")


def test_a_value_that_is_tried_by_nothing_but_the_first_draw_is_refused_as_well() -> None:
    """Of 192 choices 64 are tried one by one; those between them are wrong here."""
    tried = set(spread(192, 64))
    choices = [0.001 * (number + 1) if number in tried else -1.0 for number in range(192)]
    found = JobSpec.from_json(
        job_text(population(), **space({"optimizer.lr": {"choices": choices}}))
    )
    assert [str(violation) for violation in objections_to(found, BUILT_IN)] == [
        "strategy.options.inner: its job would be invalid: optimizer.lr: -1.0 is not allowed; "
        "must be > 0"
    ]


def test_a_keyword_is_not_blamed_for_what_else_is_wrong_with_an_optimizer() -> None:
    """With sgd the curve `step` lacks its length here, which momentum has no part in."""
    dimensions = {
        "optimizer.name": {"choices": ["sgd", "adam"]},
        "optimizer.momentum": {"low": 0.0, "high": 0.9, "when": {"optimizer.name": "sgd"}},
        "optimizer.schedule.name": CURVES,
        "optimizer.schedule.step_size_steps": {**LENGTH, "when": {"optimizer.name": "adam"}},
    }
    texts = (job_text(population(), **space(dimensions), seed=seed) for seed in range(9))
    by_seed = [{o.field for o in objections_to(JobSpec.from_json(t), BUILT_IN)} for t in texts]
    assert set() in by_seed, "the first draw may be one in which all is well"
    assert {"search_space.optimizer.schedule.name"} in by_seed
    assert not any("search_space.optimizer.momentum" in fields for fields in by_seed)


# ---- exploit and explore ----


SCORES = st.lists(st.none() | st.floats(-100, 100), min_size=1, max_size=9)
SPACE = SearchSpace(
    (
        Float("lr", 1e-4, 1.0, Scale.LOG),
        Float("momentum", 0.0, 0.9, Scale.LINEAR),
        Float("decay", 0.5, 1.0, Scale.REVERSE_LOG),
        Int("depth", 1, 6, Scale.LINEAR),
        Int("width", 8, 512, Scale.LOG),
        Ordinal("size", (16, 32, 64)),
        Categorical("name", ("sgd", "adam")),
        Conditional("only-sgd", "name", ("sgd",), Float("nesterov", 0.0, 1.0, Scale.LINEAR)),
    ),
    {"fixed": True},
)


def streams(num: int, seed: int = 0) -> list[Random]:
    return [stream(seed, member, 1) for member in range(num)]


@settings(max_examples=50)
@given(SCORES, st.floats(0.01, 1.0), st.integers(0, 1000))
def test_truncation(scores: list[float | None], fraction: float, seed: int) -> None:
    copies = donors(Truncation(fraction), scores, streams(len(scores), seed))
    k = min(math.ceil(len(scores) * fraction - 1e-9), len(scores) // 2)
    for member, donor in copies.items():
        theirs, own = scores[donor], scores[member]
        assert theirs is not None
        assert own is None or theirs >= own
        assert donor not in copies
    if any(score is not None for score in scores) and k:
        invalid = {member for member, score in enumerate(scores) if score is None}
        assert invalid <= copies.keys()
        assert len(copies) == max(k, len(invalid))


def test_truncation_counts_binary_is_strict_and_nobody_copies_where_nobody_is_valid() -> None:
    scores: list[float | None] = [0.1, 0.2, 0.3, 0.4, 0.5]
    for fraction, worst in ((0.2, {0}), (0.21, {0, 1}), (0.4, {0, 1}), (1.0, {0, 1})):
        assert donors(Truncation(fraction), scores, streams(5)).keys() == worst
    drawn = {donors(Truncation(0.4), scores, streams(5, seed))[0] for seed in range(40)}
    assert drawn == {3, 4}
    assert donors(Binary(0.5), [0.0, 0.5], streams(2)) == {}
    assert donors(Binary(0.25), [0.0, 0.5], streams(2)) == {0: 1}
    for exploit in (Truncation(0.5), Binary(0.0)):
        assert donors(exploit, [None, None, None], streams(3)) == {}


@settings(max_examples=50)
@given(SCORES, st.floats(0.0, 50.0), st.integers(0, 1000))
def test_binary(scores: list[float | None], threshold: float, seed: int) -> None:
    copies = donors(Binary(threshold), scores, streams(len(scores), seed))
    for member, donor in copies.items():
        theirs, own = scores[donor], scores[member]
        assert member != donor
        assert theirs is not None
        assert own is None or theirs > own + threshold
    if len(scores) == 2 and scores[0] is None and scores[1] is not None:
        assert copies == {0: 1}


def is_inside(params: dict[str, JSON]) -> bool:
    numbers: dict[str, Callable[[JSON], bool]] = {
        "lr": lambda v: isinstance(v, float) and 1e-4 <= v <= 1.0,
        "momentum": lambda v: isinstance(v, float) and 0.0 <= v <= 0.9,
        "decay": lambda v: isinstance(v, float) and 0.5 <= v <= 1.0,
        "depth": lambda v: type(v) is int and 1 <= v <= 6,
        "width": lambda v: type(v) is int and 8 <= v <= 512,
        "size": lambda v: v in (16, 32, 64),
        "name": lambda v: v in ("sgd", "adam"),
        "fixed": lambda v: v is True,
    }
    if params["name"] == "sgd":
        numbers["nesterov"] = lambda v: isinstance(v, float) and 0.0 <= v <= 1.0
    return params.keys() == numbers.keys() and all(f(params[name]) for name, f in numbers.items())


@settings(max_examples=50)
@given(st.integers(0, 10_000))
def test_draws_lie_inside(seed: int) -> None:
    drawn = draw(SPACE, stream(seed, 3, 0))
    assert is_inside(drawn)
    assert drawn == draw(SPACE, stream(seed, 3, 0))
    assert is_inside(explored(Resample(), SPACE, drawn, stream(seed, 3, 1)))


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_perturbation(seed: int, factor: float) -> None:
    before = draw(SPACE, stream(seed, 0, 0))
    after = explored(Perturbation(factor), SPACE, before, stream(seed, 0, 1))
    assert is_inside(after)
    assert after["name"] == before["name"]
    for name in ("lr", "momentum", "decay"):
        old, new = before[name], after[name]
        assert isinstance(old, float)
        assert isinstance(new, float)
        assert old * (1 - factor) - 1e-12 <= new <= old * (1 + factor) + 1e-12 or new in (0.5, 1e-4)
    sizes = (16, 32, 64)
    moved = sizes.index(after["size"]) - sizes.index(before["size"])
    assert abs(moved) == 1
    if factor > 0.01 and 1 < before["depth"] < 6:  # type: ignore[operator]
        assert after["depth"] != before["depth"]


def test_a_condition_that_becomes_true_draws_its_dimension() -> None:
    space = SearchSpace(
        (
            Ordinal("mode", ("off", "on")),
            Conditional("c", "mode", ("on",), Float("x", 1.0, 2.0, Scale.LINEAR)),
        ),
        {},
    )
    after = explored(Perturbation(0.2), space, {"mode": "off"}, stream(0, 0, 0))
    assert after["mode"] == "on"
    assert 1.0 <= after["x"] <= 2.0  # type: ignore[operator]
    assert explored(Perturbation(0.2), space, after, stream(0, 0, 0)) == {"mode": "off"}


def test_log_scales_are_even_in_the_logarithm() -> None:
    space = SearchSpace((Float("lr", 1e-4, 1.0, Scale.LOG),), {})
    drawn = [draw(space, stream(0, member, 0))["lr"] for member in range(2000)]
    below = sum(value < 1e-2 for value in drawn) / 2000  # type: ignore[operator]
    assert abs(below - 0.5) < 0.05


def toy(evolve: bool, seed: int) -> float:
    """The toy of the paper: ascend Q = 1.2 - x0^2 - x1^2 on a surrogate of it that h scales.

    Two members that each see one coordinate only; the best Q that a member reaches.
    """
    space = SearchSpace(
        (Float("h0", 0.0, 1.0, Scale.LINEAR), Float("h1", 0.0, 1.0, Scale.LINEAR)), {}
    )
    params: list[dict[str, JSON]] = [{"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0}]
    thetas = [[0.9, 0.9], [0.9, 0.9]]
    scores: list[float | None] = [None, None]
    for generation in range(1, 51):
        for theta, own in zip(thetas, params, strict=True):
            for _ in range(4):
                theta[0] -= 0.01 * 2 * own["h0"] * theta[0]  # type: ignore[operator]
                theta[1] -= 0.01 * 2 * own["h1"] * theta[1]  # type: ignore[operator]
        scores = [1.2 - theta[0] ** 2 - theta[1] ** 2 for theta in thetas]
        rngs = [stream(seed, member, generation) for member in range(2)]
        copies = donors(Truncation(0.5), scores, rngs) if evolve else {}
        for member, donor in copies.items():
            thetas[member] = list(thetas[donor])
            params[member] = explored(Resample(), space, params[donor], rngs[member])
    return max(score for score in scores if score is not None)


def test_the_toy_of_the_paper() -> None:
    """A grid of the two members stays below 0.4; exploit and resample reach the top."""
    assert toy(evolve=False, seed=0) < 0.4
    assert min(toy(evolve=True, seed=seed) for seed in range(30)) > 1.17
