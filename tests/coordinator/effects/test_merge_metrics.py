"""What is taken of the states of metrics that a client says: numbers that fit their shape."""

import io
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.coordinator.effects import party_updates
from stratagem.coordinator.effects.party_updates import MAX_NUMBERS, store_states, summed
from stratagem.v1 import worker_pb2 as pb


def state(**given: Any) -> pb.MetricState:
    return pb.MetricState(**{"metric": "test.a:f", "name": "hits", **given})


@pytest.mark.parametrize(
    ("sums", "why"),
    [
        ([state()], "has 0 numbers for its shape"),
        ([state(shape=[2], counts=[1])], r"has 1 numbers for its shape \(2,\)"),
        ([state(shape=[2**31, 2**31, 4], counts=[1])], "has 1 numbers"),
        ([state(counts=[1], numbers=[1.0])], "has 1 numbers"),
        ([state(counts=[1]), state(counts=[1])], "has 1 numbers"),
        ([state(shape=[1] * 65, counts=[1])], "has 65 dimensions"),
        ([state(shape=[MAX_NUMBERS + 1], counts=[0] * (MAX_NUMBERS + 1))], "more than 65536"),
    ],
)
async def test_what_is_no_state_is_refused_before_it_is_stored(
    sums: list[pb.MetricState], why: str
) -> None:
    nothing: Any = None
    with pytest.raises(InvalidInputError, match=why):
        await store_states(nothing, sums)


async def test_a_client_without_states_has_no_blob() -> None:
    nothing: Any = None
    assert await store_states(nothing, []) == ""
    assert summed([state(), state(metric="test.b:g"), state(name="misses")]) == (
        "test.a:f",
        "test.b:g",
    )


class Blobs:
    """The states of clients, and how often each was read."""

    def __init__(self, *clients: list[pb.MetricState]) -> None:
        self._data = {
            str(client): pb.OwnMetrics(sums=sums).SerializeToString()
            for client, sums in enumerate(clients)
        }
        self.read: Counter[str] = Counter()

    def open(self, digest: str) -> io.BytesIO:
        self.read[digest] += 1
        return io.BytesIO(self._data[digest])


def test_each_client_is_read_once_and_a_metric_that_differs_leaves_the_others() -> None:
    other = state(metric="test.b:g", numbers=[0.5])
    blobs = Blobs(
        [state(counts=[2]), other],
        [state(counts=[3]), other],
        [state(shape=[2], counts=[1, 1]), other],
        [state(counts=[7]), other],
    )
    effect: Any = SimpleNamespace(
        metrics=("test.b:g", "test.a:f", "test.c:h"),
        states=tuple((client, str(client)) for client in range(4)),
    )
    sums, unlike = party_updates._sums(cast(Any, blobs), effect)
    assert sums == [state(metric="test.b:g", numbers=[2.0])]
    assert unlike == {
        "test.a:f": "state hits of test.a:f is int64 (2,) at client 2, and int64 () at client 0"
    }
    assert blobs.read == {str(client): 1 for client in range(4)}
