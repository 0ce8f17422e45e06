"""The JSON forms beside strategies: search spaces, values, distributions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.json_text import dump_json
from stratagem.common.strategy import Tag
from stratagem.common.strategy.search_space import (
    Categorical,
    Conditional,
    Float,
    Int,
    Scale,
    SearchSpace,
    dump_search_space,
    parse_search_space,
)
from stratagem.common.strategy.wire_values import (
    Bytes,
    Empty,
    Json,
    Object,
    Place,
    Remote,
    Tensor,
    Text,
    Value,
    dump_distribution,
    dump_value,
    parse_distribution,
    parse_value,
)
from tests.common.strategy.strategies import json_values

pytestmark = pytest.mark.core

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


def test_a_search_space_round_trips() -> None:
    space = parse_search_space(SPACE)
    assert dump_json(dump_search_space(space)) == SPACE
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


def test_the_default_of_a_float_may_be_missing() -> None:
    space = parse_search_space({"dimensions": [FLOAT], "frozen": {}})
    assert space.dimensions == (Float("lr", 1e-4, 0.1, Scale.LOG),)


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [
        (FLOAT | {"low": 0.2}, "low: 0.2 is not below high, 0.1"),
        (FLOAT | {"low": 0}, "low: 0.0 is not allowed on a Log scale; must be > 0"),
        (FLOAT | {"default": 1}, "default: 1.0 is not between 0.0001 and 0.1"),
        (FLOAT | {"scale": "log"}, "scale: 'log' is not one of Linear, Log, ReverseLog; did you"),
        (FLOAT | {"name": ""}, "name: '' is not allowed; must not be empty"),
        (FLOAT | {"dim_type": "Int"}, "low: 0.0001 is not a whole number"),
        ({"dim_type": "Categorical", "name": "a", "choices": []}, "choices: () is not allowed"),
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


def test_names_are_unique() -> None:
    for document in (
        {"dimensions": [FLOAT, FLOAT], "frozen": {}},
        {"dimensions": [FLOAT], "frozen": {"lr": 1}},
    ):
        with pytest.raises(InvalidInputError, match="'lr' is taken already"):
            parse_search_space(document)


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"Tensor","data":{"values":[1.0,2.0],"shape":[2]}}',
        '{"type":"Tensor","data":{"values":[1.0],"shape":[]}}',
        '{"type":"Tensor","data":{"values":[],"shape":[0,3]}}',
        '{"type":"Text","data":"hello"}',
        '{"type":"Json","data":{"a":null}}',
        '{"type":"Bytes","data":[0,255]}',
        '{"type":"Object","data":[1,"a"]}',
        '{"type":"Empty"}',
    ],
)
def test_values_round_trip(text: str) -> None:
    value = parse_value(json.loads(text))
    assert json.dumps(dump_value(value), separators=(",", ":")) == text


@given(
    st.builds(Text, st.text("abc"))
    | st.builds(Json, json_values)
    | st.builds(Bytes, st.binary())
    | st.builds(Object, st.lists(json_values, max_size=3).map(tuple))
    | st.just(Empty())
    | st.lists(st.floats(-9, 9), max_size=5).map(lambda v: Tensor(tuple(v), (len(v), 1)))
)
def test_any_value_is_read_back(value: Value) -> None:
    assert parse_value(json.loads(json.dumps(dump_value(value)))) == value


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"type": "Tensor", "data": {"values": [1], "shape": [2]}}, "value.data.shape: [2] does"),
        ({"type": "Tensor", "data": {"values": [1], "shape": [-1, -1]}}, "value.data.shape: [-1,"),
        ({"type": "Bytes", "data": [256]}, "value.data: holds a number that is no byte"),
        ({"type": "Text"}, "value.data: missing"),
        ({"type": "text"}, "value.type: 'text' is not one of Tensor, Text, Json, Bytes, Object"),
        ([1], "value: [1] is not an object"),
    ],
)
def test_unsound_values_are_refused(document: object, expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_value(document)
    assert str(caught.value).startswith(expected)


def test_distributions() -> None:
    for source, value in (
        ("Local", Place.LOCAL),
        ("Any", Place.ANY),
        ({"Remote": {"Tag": "gpu"}}, Remote(Tag("gpu"))),
    ):
        assert parse_distribution(source) == value
        assert dump_distribution(value) == source
    for wrong in ("local", {"Remote": "gpu"}, {"remote": {"Tag": "gpu"}}, {}, 3, None):
        with pytest.raises(InvalidInputError, match="distribution"):
            parse_distribution(wrong)
