"""States of metrics that may be added up over clients: which they are, and what is made of them."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.engine.objectives.summed_states import (
    MAX_NUMBERS,
    SummedState,
    fill,
    num_summed,
    read,
)
from tests.userland.metrics import ClassCounts, Confidence, Decaying, KeptRows

OUTPUTS = torch.randn(23, 5, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(23) % 5


class Declared:
    summed_states = ("number", "array", "half", "plain")

    def __init__(self) -> None:
        self.number, self.plain = 0, 0.0
        self.array, self.half = np.zeros(2, np.int32), torch.zeros(2, dtype=torch.float16)


def starts_at(value: Any) -> Declared:
    metric = Declared()
    metric.number = value
    return metric


def wide(metric: Any, seen: slice) -> dict[str, SummedState]:
    metric.update(OUTPUTS[seen], TARGETS[seen])
    return {state.name: state for state in read("test.a:f", metric)}


@pytest.mark.parametrize(
    ("metric", "number"),
    [
        (ClassCounts(), 11),
        (Confidence(), 2),
        (Declared(), 6),
        (Decaying(), 0),
        (KeptRows(), 0),
        (starts_at(1), 0),
        (starts_at(value=True), 0),
        (starts_at("0"), 0),
        (starts_at(np.zeros(0)), 0),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, int) else str(each),
)
def test_only_metrics_whose_whole_state_is_added_up_are_merged(metric: Any, number: int) -> None:
    assert num_summed(metric) == number


def merged(make: Any, cuts: list[int]) -> Any:
    """The value of states that were read piece by piece and added."""
    totals: dict[str, Any] = {}
    for start, end in pairwise(cuts):
        if start == end:
            continue  # a client without rows says nothing
        for name, state in wide(make(), slice(start, end)).items():
            totals[name] = state.values if name not in totals else totals[name] + state.values
    result = make()
    fill("a:f", result, [SummedState("test.a:f", name, values) for name, values in totals.items()])
    return result.compute()


@pytest.mark.parametrize("make", [ClassCounts, Confidence])
@pytest.mark.parametrize("cuts", [[0, 23], [0, 1, 8, 23], [0, 7, 7, 23]])
def test_the_sums_of_clients_have_the_value_of_one_loop(make: Any, cuts: list[int]) -> None:
    """Counts to the bit; sums of fractions are added in float64, and so to the last place."""
    one = make()
    for start, end in pairwise(cuts):
        if start < end:
            one.update(OUTPUTS[start:end], TARGETS[start:end])
    expected, found = one.compute(), merged(make, cuts)
    if make is ClassCounts:
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_states_come_back_in_types_of_their_own() -> None:
    metric = Declared()
    metric.number, metric.plain = 7, 0.5
    metric.array, metric.half = np.array([1, 2], np.int32), torch.tensor([0.5, 2.0]).half()
    states = list(read("test.a:f", metric))
    assert {state.values.dtype for state in states} == {np.dtype("int64"), np.dtype("float64")}
    other = Declared()
    fill("a:f", other, states)
    assert (other.number, other.plain, type(other.number)) == (7, 0.5, int)
    assert other.array.dtype == np.int32
    assert other.half.dtype == torch.float16
    assert other.half.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("array", np.array([1]), "another shape"),
        ("array", np.array([1.0, 2.0]), "counts other numbers"),
        ("array", np.array([1, 2**40]), "does not fit int32"),
        ("more", np.array(1), "it has no state more"),
        ("number", None, "another shape than what is given: none"),
    ],
)
def test_states_of_another_metric_are_refused(name: str, values: Any, why: str) -> None:
    states = {state.name: state for state in read("test.a:f", Declared())}
    states.pop(name, None)
    given = list(states.values())
    if values is not None:
        given.append(SummedState("test.a:f", name, values))
    with pytest.raises(InvalidInputError, match=why):
        fill("a:f", Declared(), given)


def test_a_state_that_becomes_something_else_is_an_error() -> None:
    metric = Declared()
    metric.number = [Tensor()]  # type: ignore[assignment]
    with pytest.raises(InvalidInputError, match="number is no number"):
        list(read("test.a:f", metric))


def test_the_limit_is_that_of_a_message() -> None:
    assert MAX_NUMBERS * 10 < 4 * 2**20
