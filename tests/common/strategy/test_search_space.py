"""The JSON form of a search space."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job.search_space import (
    Categorical,
    Conditional,
    Float,
    Int,
    Scale,
    SearchSpace,
)
from stratagem.common.schema.document import Section
from stratagem.common.schema.json import dump_json, load_json

pytestmark = pytest.mark.core


class Document(Section):
    """What holds a search space, so that errors name it."""

    search_space: SearchSpace


def parse_search_space(value: object) -> SearchSpace:
    return Document.parse({"search_space": value}).search_space


SPACE = (
    '{"dimensions":[{"dim_type":"Float","name":"lr","low":0.0001,"high":0.1,"scale":"Log",'
    '"default":null},{"dim_type":"Int","name":"depth","low":2,"high":6,"scale":"Linear"},'
    '{"dim_type":"Categorical","name":"opt","choices":["sgd","adam"]},'
    '{"dim_type":"Conditional","name":"mom","parent":"opt","parent_values":["sgd"],'
    '"dimension":{"dim_type":"Float","name":"momentum","low":0.0,"high":1.0,"scale":"ReverseLog",'
    '"default":0.9}}],"frozen":{"a":null,"b":[1]}}'
)
FLOAT: dict[str, Any] = {
    "dim_type": "Float",
    "name": "lr",
    "low": 1e-4,
    "high": 0.1,
    "scale": "Log",
}


def test_a_search_space_round_trips_and_its_names_are_unique() -> None:
    space = parse_search_space(load_json(SPACE))
    assert dump_json(Document(search_space=space).document()["search_space"]) == SPACE
    assert space == SearchSpace(
        (
            Float("lr", 1e-4, 0.1, Scale.LOG),
            Int("depth", 2, 6, Scale.LINEAR),
            Categorical("opt", ("sgd", "adam")),
            Conditional(
                "mom", "opt", ("sgd",), Float("momentum", 0.0, 1.0, Scale.REVERSE_LOG, 0.9)
            ),
        ),
        {"a": None, "b": [1]},
    )
    # The default of a float may be missing.
    space = parse_search_space({"dimensions": [FLOAT], "frozen": {}})
    assert space.dimensions == (Float("lr", 1e-4, 0.1, Scale.LOG),)
    for document in (
        {"dimensions": [FLOAT, FLOAT], "frozen": {}},
        {"dimensions": [FLOAT], "frozen": {"lr": 1}},
    ):
        with pytest.raises(InvalidInputError, match="'lr' is taken already"):
            parse_search_space(document)


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [
        (FLOAT | {"low": 0.2}, "low: 0.2 is not below high, 0.1"),
        (FLOAT | {"low": 0}, "low: 0.0 is not allowed on a Log scale; must be > 0"),
        (FLOAT | {"default": 1}, "default: 1.0 is not between 0.0001 and 0.1"),
        (FLOAT | {"scale": "log"}, "scale: 'log' is not one of Linear, Log, ReverseLog; did you"),
        (FLOAT | {"name": ""}, "name: '' is not allowed; must not be empty"),
        (FLOAT | {"dim_type": "Int"}, "low: 0.0001 is not a whole number"),
        ({"dim_type": "Categorical", "name": "a", "choices": []}, "choices: [] is not allowed"),
        ({"dim_type": "Bool"}, "dim_type: 'Bool' is not one of Float, Int, Categorical, Ordinal"),
        (
            {"dim_type": "Conditional", "name": "a", "parent": "b", "parent_values": [1]}
            | {"dimension": FLOAT},
            "parent: 'b' is not one of ",
        ),
    ],
)
def test_invalid_dimensions_are_refused(dimension: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_search_space({"dimensions": [dimension], "frozen": {}})
    assert str(caught.value).startswith(f"search_space.dimensions[0].{expected}")
