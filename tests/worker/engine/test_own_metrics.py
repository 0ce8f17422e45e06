"""Metrics of the user's own: of a whole split, whoever has evaluated its batches, and from states
that may be added up over clients."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import EvaluationSpec
from stratagem.worker.objectives import own_metrics
from stratagem.worker.objectives.evaluator import make_metrics
from stratagem.worker.objectives.own_metrics import (
    LAYOUT,
    MAX_NUMBERS,
    KeptBatch,
    OwnMetrics,
    SummedState,
    fill,
    from_named,
    kept_batch,
    make_own_metrics,
    named_tensors,
    num_summed,
    read,
)
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.userland.metrics import ClassCounts, Confidence, Decaying, KeptRows, macro_f1

HERE = EntryPoints(["tests.worker.engine.*:*", "tests.userland.metrics:*"])
OUTPUTS, TARGETS = (
    torch.randn(23, 5, generator=torch.Generator().manual_seed(1)),
    torch.arange(23) % 5,
)


def named(name: str) -> str:
    return f"tests.worker.engine.test_own_metrics:{name}"


def own(*names: str, numerics: int = 3, **settings: Any) -> OwnMetrics:
    spec = EvaluationSpec.model_validate({"metrics": [*names], **settings})
    found = make_own_metrics(spec, HERE, numerics)
    assert found is not None
    return found


def batches(size: int, metrics: OwnMetrics | None = None) -> list[KeptBatch]:
    metrics = metrics or own(named("several"))
    pairs = zip(OUTPUTS.split(size), TARGETS.split(size), strict=True)
    return [metrics.keep(output, target, len(target), 23) for output, target in pairs]


def several(outputs: Tensor, targets: Tensor) -> Mapping[str, Any]:
    return {
        "deep": {"number": 3, "one": torch.ones(1)},
        "vector": torch.tensor([1.0, 2.5]),
        "list": [np.float32(0.5), np.array([True, False])],
    }


def pair(outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    return 0.5, len(targets)


def text(outputs: Tensor, targets: Tensor) -> str:
    return "good"


def many(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros(12, 12)


def spoiling(outputs: Tensor, targets: Tensor) -> float:
    first = float(outputs[0, 0])
    outputs.zero_()
    return first


def drawing(outputs: Tensor, targets: Tensor) -> Tensor:
    """A bootstrap."""
    return outputs[torch.randint(len(outputs), (50,))].mean() + float(np.random.rand())


def broken(outputs: Tensor, targets: Tensor) -> float:
    raise ValueError("no positive rows")


def best_class(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.argmax(1), target


def not_a_pair(output: Tensor, target: Tensor) -> Tensor:
    return output


def num_kept(outputs: Tensor, targets: Tensor) -> int:
    return outputs.dim()


def nested(outputs: Any, targets: Any) -> float:
    assert targets is None
    return float(outputs["pair"][1].sum() + outputs["list"][0].sum())


def nothing() -> int:
    return 3


class Ready:
    def __call__(self) -> None: ...

    value = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.value += len(target)

    def compute(self) -> tuple[int, Tensor]:
        return self.value, torch.tensor([1.0, 2.0])


Ready.__module__ = __name__
ready = Ready()


@pytest.mark.parametrize("size", [1, 7, 23])
def test_a_function_gets_all_rows_once_in_order(size: int) -> None:
    metrics = own("tests.userland.metrics:macro_f1")
    found = metrics.measured("test", batches(size, metrics))
    assert found == {"test.tests.userland.metrics:macro_f1": macro_f1(OUTPUTS, TARGETS)}


@pytest.mark.parametrize("name", ["Decaying", "decaying"])
def test_an_object_is_updated_batch_by_batch_as_in_a_loop(name: str) -> None:
    loop = Decaying()
    for output, target in zip(OUTPUTS.split(7), TARGETS.split(7), strict=True):
        loop.update(output, target)
    metrics = own(f"tests.userland.metrics:{name}")
    for _ in range(2):  # the second one begins anew
        (value,) = metrics.measured("test", batches(7, metrics)).values()
        assert value == loop.compute().item()


def test_an_instance_is_copied_for_every_split() -> None:
    metrics = own(named("ready"))
    for _ in range(2):
        assert metrics.measured("a", batches(7)) == {
            f"a.{named('ready')}.0": 23.0,
            f"a.{named('ready')}.1.0": 1.0,
            f"a.{named('ready')}.1.1": 2.0,
        }
    assert ready.value == 0


def test_mappings_and_vectors_become_names() -> None:
    found = own(named("several")).measured("test", batches(7))
    start = f"test.{named('several')}"
    assert {name.removeprefix(start): value for name, value in found.items()} == {
        ".deep.number": 3.0,
        ".deep.one": 1.0,
        ".vector.0": 1.0,
        ".vector.1": 2.5,
        ".list.0": 0.5,
        ".list.1.0": 1.0,
        ".list.1.1": 0.0,
    }


def test_none_may_change_what_another_gets() -> None:
    metrics = own(named("spoiling"), "tests.userland.metrics:macro_f1")
    kept = batches(7)
    first = metrics.measured("test", kept)
    assert metrics.measured("test", kept) == first
    assert macro_f1(OUTPUTS, TARGETS) in first.values()


def test_what_is_drawn_is_drawn_for_the_metric() -> None:
    metrics, kept = own(named("drawing")), batches(7)
    first = metrics.measured("test", kept)
    torch.manual_seed(77)
    assert metrics.measured("test", kept) == first


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "pair",
            "returned a tuple. It is called once with the outputs and targets of all rows, so",
        ),
        ("text", "gave a str; allowed are numbers, tensors"),
        ("many", "has 144 values; at most 128 are allowed"),
    ],
)
def test_a_value_that_is_no_number_is_explained(name: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        own(named(name)).measured("test", batches(7))


def test_what_a_metric_raises_is_the_users() -> None:
    with pytest.raises(UserCodeError, match="no positive rows") as caught:
        own(named("broken")).measured("test", batches(7))
    assert caught.value.activity == "measuring test"


def test_a_function_without_arguments_must_make_a_metric() -> None:
    with pytest.raises(InvalidInputError, match="takes no arguments and returns a int"):
        own(named("nothing"))


def test_keep_makes_less_of_a_batch() -> None:
    metrics = own(named("num_kept"), keep=named("best_class"))
    assert list(metrics.measured("test", batches(7, metrics)).values()) == [1.0]
    with pytest.raises(InvalidInputError, match=r"evaluation\.keep: returned a Tensor instead of"):
        batches(7, own(named("num_kept"), keep=named("not_a_pair")))


@pytest.mark.parametrize("size", [1, 7, 23])
def test_a_split_that_is_too_large_is_refused_at_its_first_batch(size: int) -> None:
    num_bytes = 23 * (5 * 4 + 8)
    batches(size, own(named("several"), max_bytes=num_bytes))
    with pytest.raises(InvalidInputError, match=r"evaluation\.max_bytes: .*evaluation\.keep names"):
        batches(size, own(named("several"), max_bytes=num_bytes - 1))


def test_the_best_value_must_be_measured() -> None:
    own(named("several"), best=f"{named('several')}.deep.number").measured("test", batches(7))
    for best in (named("several"), f"{named('several')}.shallow"):
        with pytest.raises(InvalidInputError, match="is no number that is measured; measured are"):
            own(named("several"), best=best).measured("test", batches(7))


def test_a_split_without_rows_has_no_metrics() -> None:
    assert own(named("pair"), best=named("pair")).measured("test", []) == {}


def test_nestings_travel_as_tensors() -> None:
    output = {
        "pair": (torch.ones(2, 3), torch.arange(2)),
        "list": [torch.ones(2, dtype=torch.bool)],
    }
    with torch.inference_mode():
        kept = [kept_batch(map_all(output, number), None) for number in range(12)]
    sent: dict[str, Tensor] = {}
    for number in reversed(range(12)):
        sent |= named_tensors("a/b", number, kept[number])
    back = from_named(sent, {LAYOUT: kept[0].layout}, "a/b")
    assert [each.layout for each in back] == [each.layout for each in kept]
    for one, other in zip(back, kept, strict=True):
        assert all(map(torch.equal, one.tensors, other.tensors))
    assert own(named("nested")).measured("test", back) == {f"test.{named('nested')}": 12 * 1 + 24.0}
    back[0].tensors[0].add_(1)  # not of inference mode any more


def map_all(value: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    pair, flags = value["pair"], value["list"]
    return {"pair": (pair[0] + number, pair[1]), "list": flags}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "differ in more than rows"),
        ([torch.zeros(2, 3), torch.zeros(2, 3).double()], "differ in more than rows"),
        ([torch.zeros(2), (torch.zeros(2),)], "are nested in different ways"),
        ([torch.tensor(1.0)] * 2, "are single numbers, without rows"),
    ],
)
def test_batches_that_cannot_be_joined_are_explained(outputs: Sequence[Any], message: str) -> None:
    kept = [kept_batch(output, None) for output in outputs]
    with pytest.raises(InvalidInputError, match=message):
        own(named("text")).measured("test", kept)
    with pytest.raises(InvalidInputError, match=r"output\.a of a batch is a str, and no tensor"):
        kept_batch({"a": "text"}, None)


def test_runs_of_the_old_rule_have_means_over_batches() -> None:
    name = named("num_kept")
    assert make_own_metrics(EvaluationSpec(metrics=(name,)), HERE, numerics=2) is None
    assert make_own_metrics(EvaluationSpec(metrics=("accuracy",)), HERE, numerics=3) is None
    assert make_own_metrics(None, HERE, numerics=3) is None
    assert list(make_metrics([name], HERE, numerics=2)) == [name]
    assert list(make_metrics([name], HERE, numerics=3)) == []
    assert own_metrics.own_names(["accuracy", name]) == (name,)


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
