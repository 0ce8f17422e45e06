"""The values beside strategies in the shared JSON are read and written as the other programs do."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.json_text import JSON
from stratagem.common.strategy import Tag
from tests.common.strategy.shared_values import (
    Bytes,
    Distribution,
    DistributionDocument,
    Empty,
    Json,
    Numbers,
    Object,
    Remote,
    Tensor,
    Text,
    Value,
    ValueDocument,
)
from tests.common.strategy.strategies import json_values

pytestmark = pytest.mark.core


def parse_value(source: object) -> Value:
    return ValueDocument.parse({"value": source}).value


def dump_value(value: Value) -> JSON:
    return ValueDocument(value=value).document()["value"]


def parse_distribution(source: object) -> Distribution:
    return DistributionDocument.parse({"distribution": source}).distribution


def dump_distribution(value: Distribution) -> JSON:
    return DistributionDocument(distribution=value).document()["distribution"]


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
    st.text("abc").map(Text)
    | json_values.map(Json)
    | st.binary().map(Bytes)
    | st.lists(json_values, max_size=3).map(tuple).map(Object)
    | st.just(Empty())
    | st.lists(st.floats(-9, 9), max_size=5).map(lambda v: Tensor(Numbers(tuple(v), (len(v), 1))))
)
def test_any_value_is_read_back(value: Value) -> None:
    assert parse_value(json.loads(json.dumps(dump_value(value)))) == value


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"type": "Tensor", "data": {"values": [1], "shape": [2]}}, "value.data.shape: [2] does"),
        (
            {"type": "Tensor", "data": {"values": [1], "shape": [-1, -1]}},
            "value.data.shape[0]: -1 is not allowed",
        ),
        ({"type": "Bytes", "data": [256]}, "value.data: holds a number that is no byte"),
        ({"type": "Text"}, "value.data: missing"),
        ({"type": "text"}, "value.type: 'text' is not one of Tensor, Text, Json, Bytes, Object"),
        (
            [1],
            "value: [1] is not a mapping such as {type: Tensor, data: {values: [0.1], shape: [1]}}",
        ),
    ],
)
def test_unsound_values_are_refused(document: object, expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_value(document)
    assert str(caught.value).startswith(expected)


def test_distributions() -> None:
    for source, value in (
        ("Local", "Local"),
        ("Any", "Any"),
        ({"Remote": {"Tag": "gpu"}}, Remote(Tag("gpu"))),
    ):
        assert parse_distribution(source) == value
        assert dump_distribution(value) == source
    for wrong in ("local", {"Remote": "gpu"}, {"remote": {"Tag": "gpu"}}, {}, 3, None):
        with pytest.raises(InvalidInputError, match="distribution"):
            parse_distribution(wrong)
