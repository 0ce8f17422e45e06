"""Structural hyperparameters: which they are, and that a copy has them from its donor."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, member_job, with_fields
from stratagem.common.job.search_space import read_short_form
from stratagem.common.schema.json import JSON
from stratagem.common.strategy import ExploreStrategy, Perturbation, Resample
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.effects import Build
from stratagem.coordinator.strategies.population.evolution import (
    draw,
    explored,
    known_structure,
    stream,
    variants,
    with_parents,
)
from stratagem.coordinator.strategies.population.run import PopulationRun, form
from tests.coordinator.core.jobs import (
    POPULATION_SECTIONS,
    check_at_submit,
    job_text,
    population,
    refusal,
)
from tests.coordinator.core.simulation import Simulation, start

pytestmark = pytest.mark.core


SPACE: dict[str, Any] = {
    "optimizer.name": {"choices": ["sgd", "adam"]},
    "optimizer.lr": {"low": 0.001, "high": 1.0, "scale": "log"},
    "optimizer.momentum": {"low": 0.0, "high": 0.9, "when": {"optimizer.name": ["sgd"]}},
    "model.kwargs.width": {"choices": [8, 16, 32], "ordered": True},
    "model.kwargs.depth": {"low": 1, "high": 40},
    "model.kwargs.kind": {"choices": ["plain", "gated"]},
    "model.kwargs.gate": {"low": 1, "high": 3, "when": {"model.kwargs.kind": ["gated"]}},
    "loss.kwargs.label_smoothing": {"low": 0.0, "high": 0.2},
}
EXPLORE: list[ExploreStrategy] = [Perturbation(0.2), Resample()]
WIDTH, KIND = "model.kwargs.width", "model.kwargs.kind"


def document(search_space: dict[str, Any], **options: Any) -> str:
    sections = {**POPULATION_SECTIONS, "search_space": search_space}
    return job_text(population(size=6, **options), **sections)


def test_the_optimizer_is_structural_by_definition_and_others_by_declaration() -> None:
    assert known_structure(read_short_form(SPACE)) == {"optimizer.name"}
    declared = {**SPACE[WIDTH], "structural": True}
    found = known_structure(read_short_form({**SPACE, WIDTH: declared}))
    assert found == {"optimizer.name", WIDTH}
    told = {**SPACE["optimizer.name"], "structural": False}
    with pytest.raises(InvalidInputError, match=r"optimizer\.name\.structural: must not be false"):
        check_at_submit(document({**SPACE, "optimizer.name": told}))
    for value in ("yes", 1, None):
        width = {"choices": [8], "structural": value}
        with pytest.raises(InvalidInputError, match=rf"search_space\.{WIDTH}\.structural: "):
            check_at_submit(document({WIDTH: width}))
    stands = JobSpec.from_json(document({WIDTH: {"choices": [8], "structural": True}}))
    again = JobSpec.from_json(stands.canonical_json())
    assert again == stands
    assert known_structure(again.search_space) == {WIDTH}  # type: ignore[arg-type]
    assert "structural" not in JobSpec.from_json(document(SPACE)).canonical_json()
    parents = with_parents(read_short_form(SPACE), frozenset({"model.kwargs.gate"}))
    assert parents == {"model.kwargs.gate", KIND}, "what decides whether it is there"


@settings(max_examples=30)
@given(st.integers(0, 1000), st.sampled_from(EXPLORE), st.sets(st.sampled_from(sorted(SPACE))))
def test_exploring_leaves_the_kept_alone_and_draws_the_others_as_ever(
    seed: int, explore: ExploreStrategy, names: set[str]
) -> None:
    dimensions = read_short_form(SPACE)
    kept = with_parents(dimensions, frozenset(names))
    before = draw(dimensions, stream(seed, 0, 0))
    after = explored(explore, dimensions, before, stream(seed, 0, 1), kept)
    free = explored(explore, dimensions, before, stream(seed, 0, 1))
    assert {n: after[n] for n in kept & after.keys()} == {
        n: before[n] for n in kept & before.keys()
    }
    for name in after.keys() & free.keys() - kept:
        assert after[name] == free[name]


def test_variants_try_what_may_be_structural_and_only_that() -> None:
    spec = JobSpec.from_json(document(SPACE))
    params: dict[str, JSON] = {
        "optimizer.name": "sgd",
        "optimizer.lr": 0.1,
        "optimizer.momentum": 0.5,
        WIDTH: 16,
        "model.kwargs.depth": 40,
        KIND: "plain",
        "loss.kwargs.label_smoothing": 0.1,
    }
    tried: dict[str, list[Any]] = {}
    for each in variants(spec, params):
        tried.setdefault(each.name, []).append(dict(each.fields))
    assert tried.keys() == {"optimizer.momentum", WIDTH, "model.kwargs.depth", KIND}
    assert [each[WIDTH] for each in tried[WIDTH]] == [8, 32]
    depths = [each["model.kwargs.depth"] for each in tried["model.kwargs.depth"]]
    assert (depths[0], len(depths)) == (1, 7)
    assert all(0 < each["optimizer.momentum"] < 0.9 for each in tried["optimizer.momentum"])
    # What depends on the value is there with it, and goes with it.
    assert tried[KIND] == [{KIND: "gated", "model.kwargs.gate": 1}]
    gated = {**params, KIND: "gated", "model.kwargs.gate": 2}
    (plain,) = [each for each in variants(spec, gated) if each.name == KIND]
    assert plain.fields == {KIND: "plain", "model.kwargs.gate": None}
    for each in variants(spec, gated):
        assert with_fields(member_job(spec, 0, gated), each.fields).model.kwargs["width"]


def test_what_was_there_without_the_hyperparameter_is_there_again() -> None:
    """Or what a condition leaves out is not there: here the length of a curve."""
    model = {"entrypoint": "m:f", "kwargs": {"gate": 7}}
    changes = {**POPULATION_SECTIONS, "search_space": SPACE, "model": model}
    spec = JobSpec.from_json(job_text(population(), **changes))
    params: dict[str, JSON] = {KIND: "gated", "model.kwargs.gate": 2}
    plain = next(each for each in variants(spec, params) if each.name == KIND)
    assert plain.fields["model.kwargs.gate"] == 7
    warmup = "optimizer.schedule.warmup_steps"
    length = {"low": 1, "high": 3, "when": {KIND: ["gated"]}}
    found = JobSpec.from_json(document({KIND: SPACE[KIND], warmup: length}))
    (variant,) = variants(found, {KIND: "gated", warmup: 2})
    assert variant.fields == {KIND: "plain", warmup: None}


def test_only_a_population_that_copies_looks_for_structure() -> None:
    for generations, expected in ((1, False), (2, True)):
        simulation = start(document(SPACE, generations=generations), "a")
        builds = simulation.due(Build)
        assert len(builds) == 6
        assert all((each.params is not None) is expected for each in builds)


def search_space_of(text: str) -> dict[str, Any]:
    """As the job is written down again: a list of dimensions."""
    shared = JobSpec.from_json(text).document()["search_space"]
    assert isinstance(shared, dict)
    return dict(shared)


def evolve(simulation: Simulation) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(the donor's hyperparameters, the copy's) of every copy."""
    simulation.complete()
    params = dict(enumerate(simulation.fact(f.PopulationFormed).params))
    pairs = []
    closed = [fact.copied for fact in simulation.facts(f.GenerationClosed)]
    for copies in [
        *closed,
        *((it.copied,) for it in simulation.facts(f.MemberEvolved) if it.copied),
    ]:
        before = dict(params)
        for copied in copies:
            params[copied.member] = copied.params
            pairs.append((dict(before[copied.donor]), dict(copied.params)))
    return pairs


@pytest.mark.parametrize(
    ("explore", "asynchronous"), [("Perturbation", False), ("Resample", False), ("Resample", True)]
)
def test_copies_have_the_donors_structure(explore: str, asynchronous: bool) -> None:
    strategy = population(size=6, generations=3, asynchronous=asynchronous)
    strategy["exploit"] = {"method": "Truncation", "fraction": 0.5}
    strategy["explore"] = {"method": explore, **({"factor": 0.5} if explore[0] == "P" else {})}
    text = job_text(strategy, **{**POPULATION_SECTIONS, "search_space": SPACE})
    structural = (WIDTH, "model.kwargs.gate")
    simulation = start(text, "a", "b", structural=structural)
    pairs = evolve(simulation)
    assert pairs
    kept = {*structural, KIND, "optimizer.name"}
    for donor, copy in pairs:
        assert {n: donor.get(n) for n in kept} == {n: copy.get(n) for n in kept}
        assert donor["optimizer.lr"] != copy["optimizer.lr"]
    assert any(donor["model.kwargs.depth"] != copy["model.kwargs.depth"] for donor, copy in pairs)
    if explore == "Perturbation":
        crashed = start(text, "a", "b", structural=structural)
        crashed.until(f.ModelBuilt)
        crashed.crash()
        assert evolve(crashed) == pairs


def test_a_population_of_an_earlier_version_ends_as_it_would_have() -> None:
    """It knew no structure, and drew in the order of its text."""
    dimensions = {name: SPACE[name] for name in ("optimizer.name", "optimizer.lr")}
    listed = search_space_of(document(dimensions))
    rest: dict[str, Any] = {"dimensions": listed["dimensions"][::-1], "frozen": {}}
    assert [each["name"] for each in rest["dimensions"]] == ["optimizer.name", "optimizer.lr"]
    strategy = population(size=6, generations=3)
    strategy["explore"] = {"method": "Resample"}
    text = job_text(strategy, **{**POPULATION_SECTIONS, "search_space": rest})
    simulation = start(text, "a")
    for at, (run_id, kind, payload, time_s) in enumerate(simulation.journal):
        if kind == "PopulationFormed":
            old = payload.replace(',"structural":["optimizer.name"]', "")
            assert old != payload
            simulation.journal[at] = (run_id, kind, old, time_s)
    simulation.crash(is_twin=False)
    evolve(simulation)
    spec = JobSpec.from_json(text)
    assert spec.search_space is not None
    for fact in simulation.facts(f.GenerationClosed):
        for copied in fact.copied:
            rng = stream(spec.seed, copied.member, fact.generation)
            rng.choice([0])
            expected = draw(spec.search_space, rng)
            assert copied.params == expected


@given(st.permutations(sorted(SPACE)), st.integers(0, 100), st.booleans())
@settings(max_examples=30)
def test_the_order_of_a_search_space_has_no_meaning(
    names: list[str], seed: int, is_listed: bool
) -> None:
    """Equal jobs have equal text, and draw equal values, in both forms."""
    written: dict[str, Any] = {name: SPACE[name] for name in names}
    if is_listed:
        by_name = {each["name"]: each for each in search_space_of(document(SPACE))["dimensions"]}
        written = {"dimensions": [by_name[name] for name in names], "frozen": {}}
    first, other = JobSpec.from_json(document(SPACE)), JobSpec.from_json(document(written))
    assert (other, hash(other)) == (first, hash(first))
    assert other.canonical_json() == first.canonical_json()
    formed = [form(spec, PopulationRun(f.ROOT, BUILT_IN)) for spec in (first, other)]
    assert formed[0] == formed[1]


# ---- keywords of optimizers ----


MOMENTUM = {"low": 0.1, "high": 0.9}
SGD_OR_ADAM = {"choices": ["sgd", "adam"]}
TAKEN = "amsgrad, betas, decoupled_weight_decay, differentiable, eps, maximize, weight_decay"
OF_SGD = {"optimizer.name": ["sgd"]}
NAMES = {"optimizer.name": SGD_OR_ADAM}
OF_ADAM = {**MOMENTUM, "when": {"optimizer.name": ["adam"]}}


@pytest.mark.parametrize(
    ("search_space", "optimizer", "said"),
    [
        ({**NAMES, "optimizer.momentum": MOMENTUM}, {}, "momentum: 0.1"),
        ({**NAMES, "optimizer.kwargs.momentum": OF_ADAM}, {}, "kwargs.momentum: 0."),
        ({"optimizer.momentum": MOMENTUM}, {"name": "adam"}, "momentum: 0.1"),
        (NAMES, {"momentum": 0.5}, "name: 0.5"),
    ],
)
def test_a_keyword_that_an_optimizer_of_the_space_does_not_take_is_refused_at_submit(
    search_space: dict[str, Any], optimizer: dict[str, Any], said: str
) -> None:
    sections = {**POPULATION_SECTIONS, "search_space": search_space}
    given = {"name": "sgd", "lr": 0.1, **optimizer}
    told = refusal(job_text(population(), **sections, optimizer=given))
    assert told.startswith(f"search_space.optimizer.{said}")
    assert f"adam takes no 'momentum'; it takes {TAKEN}" in told


def test_a_keyword_that_each_optimizer_takes_where_it_is_drawn_is_allowed() -> None:
    by_kind = {
        KIND: SPACE[KIND],
        "optimizer.name": {**SGD_OR_ADAM, "when": {KIND: ["gated"]}},
        "optimizer.momentum": {**MOMENTUM, "when": {KIND: ["plain"]}},
    }
    check_at_submit(document({**NAMES, "optimizer.momentum": {**MOMENTUM, "when": OF_SGD}}))
    check_at_submit(document({**NAMES, "optimizer.weight_decay": MOMENTUM}))
    check_at_submit(document(by_kind))
