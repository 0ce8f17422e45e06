"""Rows that come as a stream: which sources are taken, where they are read from again."""

from itertools import islice
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import JobSpec
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.data.sources import ClientShare, DataSources, load_data
from stratagem.worker.data.stream_reader import StreamReader, StreamRules, stream_source
from stratagem.worker.data.streams import StreamDataset, StreamLayout
from tests.cluster.jobs import data_parallel, federated, gossip
from tests.jobs import job
from tests.stream_jobs import streamed
from tests.userland.streams import Plain, Shard, shards
from tests.worker.engine.support import ALLOWED


def train_of(spec: JobSpec, client: ClientShare | None = None) -> StreamDataset:
    train = load_data(spec, ALLOWED, DataSources(), client)["train"]
    assert isinstance(train, StreamDataset)
    return train


def test_rows_of_a_step_are_dealt_to_the_streams_of_its_shards_in_turn() -> None:
    layout = StreamLayout(batch_size=7, num_shards=2, num_streams=4)  # shards of 4 and 3 rows
    assert [layout.place(n) for n in range(7)] == [
        *((0, 0), (2, 0), (0, 1), (2, 1)),
        *((1, 0), (3, 0), (1, 1)),
    ]
    assert [layout.place(n) for n in range(7, 14)] == [
        *((0, 2), (2, 2), (0, 3), (2, 3)),
        *((3, 1), (1, 2), (3, 2)),
    ]


@pytest.mark.parametrize(("stateful", "block_rows"), [(False, None), (True, None), (True, 4)])
def test_a_reader_goes_back_and_on_from_a_mark(stateful: bool, block_rows: int | None) -> None:
    source = stream_source(shards(5, stateful=stateful, num_rows=30)["train"], "train")
    assert source is not None
    rules = StreamRules("train", 1, range(1, 5, 2), ("key",), block_rows, has_states=stateful)
    rows = [StreamReader(source, rules).row(n)[0] for n in (0, 40, 41, 900)]
    straight = StreamReader(source, rules)
    whole = [straight.row(n)[0] for n in range(901)]
    mark = straight.mark()
    assert mark.position == 901 or block_rows is not None
    assert torch.equal(torch.stack(rows), torch.stack([whole[n] for n in (0, 40, 41, 900)]))
    assert torch.equal(straight.row(890)[0], whole[890])
    assert torch.equal(straight.row(900)[0], whole[900])
    on = StreamReader(source, rules)
    on.add_mark(mark)
    num_read = Shard.num_read
    assert torch.equal(on.row(901)[0], straight.row(901)[0])
    assert Shard.num_read - num_read <= (10 if stateful else 80)  # of some 13 epochs of 65 rows
    assert torch.equal(on.row(3)[0], whole[3])


def test_marks_of_other_members_are_taken_over() -> None:
    spec = job(data=streamed("shards", stateful=True), strategy=data_parallel(2))
    first, second = train_of(spec), train_of(spec)
    numbers = torch.arange(16 * 40, 16 * 41)
    x, _ = first.batch(numbers, BatchKeys())
    num_read = Shard.num_read
    second.add_marks(first.marks())
    again, _ = second.batch(torch.arange(16 * 41, 16 * 42), BatchKeys())
    assert Shard.num_read - num_read == 16
    assert torch.equal(again, first.batch(torch.arange(16 * 41, 16 * 42), BatchKeys())[0])
    assert torch.equal(second.batch(numbers, BatchKeys())[0], x)


def test_sources_that_cannot_be_used_are_refused() -> None:
    class Fewer:
        def streams(self, epoch: int) -> list[list[int]]:
            return [[1], [2]][epoch:]

    fewer = stream_source(Fewer(), "train")
    assert fewer is not None
    with pytest.raises(InvalidInputError, match=r"gives 1 streams for epoch 1 and 2 for epoch 0"):
        fewer.open(1, 0)
    with pytest.raises(InvalidInputError, match=r"is a islice, which can be read only once"):
        stream_source(islice([1], 1), "train")
    for other in ([1], {"x": 1}, "rows", torch.arange(3)):
        assert stream_source(other, "train") is None
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("plain", {"impure": True}, r"data\.train: row 0 .* the row\[0\] differs"),
        ("streamed_test", {}, r"evaluation\.split: 'test' is a stream of rows, .* list\(islice"),
    ]
    for kind, changes, words in cases:
        with pytest.raises(InvalidInputError, match=words):
            train_of(job(data=streamed(kind, **changes), evaluation=EVALUATION))
    train_of(job(data=streamed("plain", impure=True), execution={"deterministic": False}))


EVALUATION = {"split": "test", "every": "2 steps", "metrics": ["accuracy"]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 2, "steps": None}, r"epochs: .*data\.streams.*set steps"),
        ({"strategy": gossip(3)}, r"strategy\.aggregation\.method: Decentralized"),
        (
            {"strategy": data_parallel(7)},
            r"has 6 shards for 7 streams \(strategy\.num_replicas\)",
        ),
        (
            {"data": streamed("shards", streams=8)},
            r"has 6 shards for 8 streams \(data\.streams\)",
        ),
        (
            {"data": streamed("plain"), "strategy": data_parallel(2)},
            r"has 1 shard for 2 streams .* num_shards, shard\(\) and set_epoch\(\), or .*streams",
        ),
        (
            {"data": {"entrypoint": "tests.userland.data:noisy_rows", "streams": 2}},
            r"data\.streams: belongs to rows that come as a stream",
        ),
    ],
)
def test_what_only_the_worker_finds_is_refused_alike(changes: dict[str, Any], words: str) -> None:
    """A job need not say that its rows come as a stream."""
    with pytest.raises(InvalidInputError, match=words):
        train_of(job(**{"data": streamed("shards"), **changes}))


def test_what_goes_wrong_while_reading_names_the_row() -> None:
    """And a stream without rows ends the run rather than waiting for ever."""

    class Torn(Plain):
        def __iter__(self) -> Any:
            yield from islice(super().__iter__(), 2)
            raise OSError("connection reset")

    source = stream_source(Torn(5, impure=False), "train")
    assert source is not None
    with pytest.raises(UserCodeError, match="connection reset") as caught:
        StreamReader(source, StreamRules("train", 0, range(1), ())).row(2)
    assert "reading row 2 of epoch 0 of stream 0 of data.train" in str(caught.value)
    silent = train_of(job(data=streamed("silent")))
    with pytest.raises(InvalidInputError, match=r"data\.train: gives stream 0 no row in epoch 0"):
        silent.batch(torch.arange(2), BatchKeys())


def test_each_client_needs_a_shard_of_its_own() -> None:
    spec = federated(data=streamed("shards"), num_clients=7)
    with pytest.raises(InvalidInputError, match=r"has 6 shards for 7 clients \(num_clients\)"):
        train_of(spec, ClientShare(0, 7))
    own = train_of(federated(data=streamed("shards"), num_clients=4), ClientShare(1, 4))
    assert own.part == (1, 4)
    assert [len(batch) for batch in own.client_batches(1, 0)] == [16]  # shards of 6 and 10 rows
