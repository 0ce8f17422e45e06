"""A parsed job cannot be changed, at any depth, and nothing that derives a job from it does so."""

import contextlib
import copy
import dataclasses
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, entry_points, member_job, with_fields
from stratagem.common.schema.document import Kwargs
from stratagem.common.schema.json import FrozenDict, FrozenList, frozen, thawed
from stratagem.common.strategy import Custom, Strategy, describe, dump_strategy
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.strategy_calls import objections_to
from stratagem.coordinator.strategies.population.evolution import draw, explored, stream
from stratagem.coordinator.strategies.population.run import space_of, spec_of
from tests.common.job.documents import MINIMAL
from tests.common.strategy.documents import FEDERATED
from tests.common.strategy.strategies import json_values

pytestmark = pytest.mark.core

KWARGS = {"width": 8, "layers": [1, [2, {"deep": [3]}]], "more": {"name": "x", "list": []}}
DOCUMENT: dict[str, Any] = {
    "name": "whole",
    "model": {"entrypoint": "m:f", "kwargs": KWARGS},
    "data": {"entrypoint": "m:d", "kwargs": KWARGS},
    "loss": {"entrypoint": "m:l", "kwargs": KWARGS},
    "optimizer": {"name": "adam", "lr": 0.1, "betas": [0.9, 0.99], "schedule": "cosine"},
    "evaluation": {"metrics": ["accuracy", "m:own"], "best": "accuracy"},
    "batch_size": 8,
    "phases": {},
    "steps_per_generation": 3,
    "search_space": {
        "dimensions": [
            {"dim_type": "Categorical", "name": "model.kwargs.layers", "choices": [[1], [2, 3]]},
            {
                "dim_type": "Conditional",
                "name": "model.kwargs.width",
                "parent": "model.kwargs.layers",
                "parent_values": [[1]],
                "dimension": {"dim_type": "Ordinal", "name": "w", "choices": [4, 8, 16]},
            },
            {"dim_type": "Float", "name": "optimizer.lr", "low": 0.1, "high": 1.0, "scale": "Log"},
        ],
        "frozen": {"model.kwargs.more": {"a": [1, 2]}},
    },
    "strategy": {
        "type": "PopulationBased",
        "population_size": 4,
        "generations": 2,
        "exploit": {"method": "Truncation", "fraction": 0.5},
        "explore": {"method": "Resample"},
    },
}
GRAPH: dict[str, Any] = {
    **{key: DOCUMENT[key] for key in ("name", "data", "loss", "optimizer", "batch_size")},
    "steps": 3,
    "model": {
        "graph": {
            "nodes": [{"id": "a", "module": "Linear", "kwargs": KWARGS}],
            "subgraphs": [{"id": "s", "graph": {"nodes": [{"id": "b", "module": "ReLU"}]}}],
            "edges": [{"source": "a", "target": "s"}],
            "inputs": ["a"],
            "outputs": ["s"],
        }
    },
    "strategy": {"type": "Custom", "coordinator": "mine", "config": KWARGS},
}
PLAIN: dict[str, Any] = {
    **GRAPH,
    "strategy": {"type": "Local"},
    "hyperparameter_schedule": {
        "settings": [{"from_step": 0, "seed": 1, "params": {"optimizer.lr": 0.1}}]
    },
}


def parsed(document: dict[str, Any] = DOCUMENT) -> JobSpec:
    return JobSpec.from_json(json.dumps(document))


def parts(value: object) -> Iterator[object]:
    """The value and all that can be reached from it."""
    yield value
    inside: list[Any] = []
    if isinstance(value, BaseModel):
        inside = [getattr(value, name) for name in type(value).model_fields]
    elif dataclasses.is_dataclass(value):
        inside = [getattr(value, each.name) for each in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        inside = [*value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = [*value]
    for each in inside:
        yield from parts(each)


def is_immutable(value: object) -> bool:
    if isinstance(value, BaseModel):
        return bool(value.model_config.get("frozen"))
    if dataclasses.is_dataclass(value):
        params: Any = vars(type(value))["__dataclass_params__"]
        return bool(params.frozen)
    return isinstance(
        value, FrozenDict | FrozenList | tuple | str | int | float | bool | type(None)
    )


@pytest.mark.parametrize("document", [DOCUMENT, GRAPH, PLAIN], ids=["population", "graph", "plain"])
def test_nothing_that_can_be_reached_from_a_job_can_be_changed(document: dict[str, Any]) -> None:
    found = [*parts(parsed(document))]
    assert len(found) > 30
    assert [each for each in found if not is_immutable(each)] == []
    assert hash(parsed(document)) == hash(JobSpec.parse(document))
    assert parsed(document) == JobSpec.parse(copy.deepcopy(document))
    assert copy.deepcopy(parsed(document)) == parsed(document)


WITH_KWARGS = "Model Data Loss Group Optimizer UpdateRule Schedule Node"
FREE_FORM = {
    *(f"{name}Spec.kwargs" for name in WITH_KWARGS.split()),
    *("InitialSpec.trained_with", "InitialSpec.metrics", "SettingSpec.params", "Custom.config"),
    *("FederatedOptions.regions", "SearchSpace.frozen", "Categorical.choices", "Ordinal.choices"),
    "Conditional.parent_values",
}
"""Fields of any JSON. What they hold is looked at above."""


def test_no_field_of_the_schema_has_a_type_that_can_be_changed() -> None:
    seen: set[type] = set()
    free_form: set[str] = set()
    wrong: list[str] = []

    def look(annotation: Any, field: str) -> None:
        if {annotation, get_origin(annotation)} & {list, dict, set, bytearray}:
            wrong.append(f"{field}: {annotation}")
        if get_origin(annotation) is Mapping:
            free_form.add(field)
        elif isinstance(annotation, type) and is_record(annotation):
            visit(annotation)
        else:
            for each in get_args(annotation):
                look(each, field)

    def is_record(kind: type) -> bool:
        return issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)

    def visit(kind: type) -> None:
        if kind in seen:
            return
        seen.add(kind)
        own: Mapping[str, Any] = (
            {name: each.annotation for name, each in kind.model_fields.items()}
            if issubclass(kind, BaseModel)
            else {each.name: each.type for each in dataclasses.fields(cast(Any, kind))}
        )
        hints = get_type_hints(kind, localns={"StrategyField": Strategy})
        for name in own:
            if "typing.Any" in str(hints[name]):  # of any JSON
                free_form.add(f"{kind.__name__}.{name}")
            else:
                look(hints[name], f"{kind.__name__}.{name}")

    visit(JobSpec)
    assert wrong == []
    assert free_form == FREE_FORM
    assert {"GraphSpec", "Truncation", "SearchSpace", "Pipeline"} <= {k.__name__ for k in seen}
    assert get_origin(get_args(Kwargs)[0]) is Mapping


CHANGES: tuple[Callable[[Any], object], ...] = (
    *(lambda x: x["more"].__setitem__("name", "y"), lambda x: x.update(a=1), lambda x: x.popitem()),
    *(lambda x: x.pop("width"), lambda x: x.clear(), lambda x: x.setdefault("a", 1)),
    *(lambda x: x.__delitem__("width"), lambda x: x.__ior__({"a": 1})),
    *(lambda x: x["layers"].append(1), lambda x: x["layers"].__setitem__(0, 1)),
    *(lambda x: x["layers"].__delitem__(0), lambda x: x["layers"].__iadd__([1])),
    *(lambda x: x["layers"].__imul__(2), lambda x: x["layers"][1].extend([1])),
    *(lambda x: x["layers"][1].insert(0, 1), lambda x: x["layers"][1].pop()),
    *(lambda x: x["layers"][1].remove(2), lambda x: x["layers"].reverse()),
    *(lambda x: x["layers"].sort(), lambda x: x["layers"].clear()),
)


def test_what_would_change_it_raises() -> None:
    value = frozen(KWARGS)
    for change in CHANGES:
        with pytest.raises(TypeError, match="cannot be changed"):
            change(value)
        assert value == KWARGS


def test_a_fresh_copy_of_many_numbers_takes_few_calls() -> None:
    weights = frozen({"weights": [0.5] * 1000, "names": {"a": 1, "b": None}})
    thawed(weights)  # what a mapping is takes more calls to answer for the first time
    calls = []
    sys.setprofile(lambda _frame, event, _what: calls.append(event))
    try:
        fresh = thawed(weights)
    finally:
        sys.setprofile(None)
    assert fresh == weights
    assert type(fresh["weights"]) is list
    assert len(calls) < 100


def test_a_job_goes_to_another_process_of_its_owners() -> None:
    job = JobSpec.parse(DOCUMENT)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(job, protocol))  # noqa: S301  (our own bytes)
        assert twin == job
        assert twin.canonical_json() == job.canonical_json()
        assert isinstance(twin.model.kwargs["more"], FrozenDict)


@settings(max_examples=25)
@given(st.dictionaries(st.text(), json_values))
def test_frozen_is_the_same_json(value: dict[str, Any]) -> None:
    made = frozen(value)
    assert made == value
    assert thawed(made) == value
    assert type(thawed(made)) is dict
    assert json.dumps(made) == json.dumps(value)
    assert hash(made) == hash(frozen(copy.deepcopy(value)))
    assert frozen(made) is made


@pytest.mark.parametrize(
    ("params", "number"),
    [
        ({}, 0),
        ({"model.kwargs.width": 5, "optimizer.lr": 0.3, "optimizer.momentum": 0.9}, 1),
        ({"optimizer.lr": [], "model.kwargs.layers": [1, {"a": [None]}]}, 7),
    ],
)
def test_no_derivation_changes_the_job_that_it_begins_from(params: Any, number: int) -> None:
    spec = parsed()
    before, text = copy.deepcopy(spec.document()), spec.canonical_json()
    for derive in (
        lambda: with_fields(spec, params),
        lambda: member_job(spec, number, params),
        lambda: objections_to(spec, BUILT_IN),
        lambda: draw(space_of(spec), stream(number, 0, 0)),
        lambda: explored(
            spec_of(spec).explore,
            space_of(spec),
            draw(space_of(spec), stream(1, 1, 1)),
            stream(1, 2, 3),
        ),
        lambda: spec.document()["model"].clear(),  # type: ignore[union-attr]
        lambda: entry_points(spec),
        lambda: spec.window,
    ):
        # Values that do not fit must not have been taken by half.
        with contextlib.suppress(InvalidInputError):
            derive()
        assert spec.document() == before
        assert spec.canonical_json() == text
    assert JobSpec.from_json(text) == spec


def test_a_member_has_only_its_own_hyperparameters() -> None:
    """What is drawn for one member is not seen by another one, nor in the job."""
    spec = parsed()
    first = member_job(spec, 0, {"model.kwargs.width": 64, "optimizer.momentum": 0.5})
    second = member_job(spec, 1, {})
    assert first.model.kwargs["width"] == 64
    assert second.model.kwargs["width"] == KWARGS["width"]
    assert second.optimizer.kwargs == {"betas": [0.9, 0.99]}
    assert parsed() == JobSpec.parse(DOCUMENT)
    config: dict[str, Any] = {"list": [1]}
    strategy = Custom("mine", config)
    config["list"].append(2)
    assert strategy.config == {"list": [1]}
    assert describe(spec.strategy) == "PopulationBased/Truncation"
    assert isinstance(spec.strategy, Strategy)


@pytest.mark.parametrize("number", [float("nan"), -float("inf")])
def test_no_way_to_change_a_copy_lets_a_number_in_that_is_not_finite(number: float) -> None:
    job = JobSpec.parse({**MINIMAL, "weight_average": {"decay": 0.5}})
    assert job.weight_average is not None
    for change in (job.with_changes, job.altered, lambda **each: job.model_copy(update=each)):
        with pytest.raises(InvalidInputError, match=f"^placement_timeout_s: {number} is not"):
            change(placement_timeout_s=number)
        assert change(placement_timeout_s=2.5).canonical_json() != job.canonical_json()
    with pytest.raises(InvalidInputError, match=f"^decay: {number} is not"):
        job.weight_average.model_copy(update={"decay": number})


def test_a_copy_is_checked_as_a_whole_unless_it_is_no_document() -> None:
    job = JobSpec.parse(MINIMAL)
    with pytest.raises(InvalidInputError, match=r"^steps: epochs is set already"):
        job.model_copy(update={"steps": 3})
    assert job.with_changes(steps=3, epochs=None) == with_fields(job, {"steps": 3, "epochs": None})
    assert job.altered(steps=3).steps == 3
    with pytest.raises(InvalidInputError, match=r"^batch_size: 0 is not allowed"):
        job.altered(steps=3, batch_size=0)


def test_what_is_not_finite_is_refused_with_its_path_where_it_is_written() -> None:
    strategy = FEDERATED | {"aggregation": {"method": "FedProx", "mu": 0.5}}
    job = JobSpec.parse({**MINIMAL, "epochs": None, "strategy": strategy})
    vars(cast(Any, job.strategy).aggregation)["mu"] = float("inf")  # past all that checks
    for write in (job.canonical_json, lambda: dump_strategy(job.strategy)):
        with pytest.raises(
            InvalidInputError, match=r"^strategy\.aggregation\.mu: inf is not a fin"
        ):
            write()
    vars(job.optimizer)["lr"] = float("nan")
    with pytest.raises(InvalidInputError, match=r"^optimizer\.lr: nan is not a finite"):
        job.document()
