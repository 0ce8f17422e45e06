"""Training on rows that come as a stream, against the reference loops."""

from typing import Any

import pytest

from tests.cluster.jobs import data_parallel
from tests.jobs import job
from tests.stream_jobs import NAMED, streamed
from tests.userland.streams import Shard
from tests.worker.engine.client_rounds import assert_clients_equal_loop, federated
from tests.worker.engine.support import assert_equals_loop, assert_goes_on, train, trainer_of

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "own": (3, {"data": streamed("shards")}),
    "several streams to a shard": (
        2,
        {"data": streamed("shards", streams=6), "accumulation": {"micro_batch_size": 3}},
    ),
    "shuffled": (3, {"data": streamed("shards", shuffle_rows=4, stateful=True)}),
    "hugging face": (2, {"data": streamed("hugging_face", NAMED, streams=4)}),
    "hugging face in batches": (2, {"data": streamed("hugging_face", NAMED, batched=True)}),
    "hugging face with a buffer": (2, {"data": streamed("hugging_face", NAMED, buffered=True)}),
    "whole": (1, {"data": streamed("plain", shuffle_rows=8)}),
}


def spec_of(case: str) -> tuple[Any, int]:
    num_shards, sections = CASES[case]
    if case.startswith("hugging face"):
        pytest.importorskip("datasets", reason="needs the extra interop")
    return job("FunctionalDropout", strategy=data_parallel(num_shards), **sections), num_shards


@pytest.mark.parametrize("case", CASES)
def test_equals_the_sharded_loop_to_the_bit_also_where_it_is_resumed(case: str) -> None:
    spec, num_shards = spec_of(case)
    assert_goes_on(spec, num_shards, straight=assert_equals_loop(spec, num_shards))


def test_a_run_that_is_resumed_with_marks_reads_only_what_comes_next() -> None:
    spec = job(
        "FunctionalDropout",
        strategy=data_parallel(2),
        data=streamed("shards", streams=4, stateful=True),
        steps=20,
    )
    straight, first = trainer_of(spec), trainer_of(spec)
    train(straight, 2, 15)
    train(first, 2, 12)
    second = trainer_of(spec, fresh=False)
    second.load_state(*first.copy_state())
    second.add_stream_marks(first.stream_marks())
    num_read = Shard.num_read
    train(second, 2, 3)
    assert Shard.num_read - num_read == 3 * 16
    assert second.fingerprint() == straight.fingerprint()
    assert trainer_of(job()).stream_marks() == {}


def test_a_step_that_is_done_again_reads_the_same_rows() -> None:
    spec, num_shards = spec_of("shuffled")
    straight, again = trainer_of(spec), trainer_of(spec)
    losses = train(straight, num_shards, 6)
    train(again, num_shards, 5)
    state = again.copy_state()
    state = {name: tensor.clone() for name, tensor in state[0].items()}, state[1]
    assert train(again, num_shards, 1) == losses[5:]
    again.load_state(*state)
    assert train(again, num_shards, 1) == losses[5:]
    assert again.fingerprint() == straight.fingerprint()


@pytest.mark.parametrize("kind", ["shards", "own_shards"])
def test_federated_clients_read_their_own_streams(kind: str) -> None:
    data = streamed(kind, shuffle_rows=3)
    spec = federated("FunctionalDropout", local_epochs=2, data=data, batch_size=4)
    assert_clients_equal_loop(spec)
    assert Shard.num_read
