"""Histories of segments in flight: whole as long as they are small, and bounded."""

import hashlib

import numpy as np

from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Recorder, Series
from stratagem.common.history.recording import pack
from stratagem.coordinator.observe.history import LiveHistory, SegmentTail, TailKey, rows_in_flight
from stratagem.v1 import worker_pb2

RUN, ROOT = RunId("r"), Party("")
FIRST = TailKey(RUN, ROOT, 0)
LOSS = Series("train.loss")


def parts_of(num_parts: int, steps_each: int = 100) -> list[worker_pb2.HistoryPart]:
    recorder = Recorder(1, 0)
    values = np.random.default_rng(1).random(num_parts * steps_each + 1)
    made = []
    for number in range(num_parts):
        for step in range(number * steps_each + 1, (number + 1) * steps_each + 1):
            recorder.add(step, [(LOSS, float(values[step]))])
        recorder.add((number + 1) * steps_each + 1, [(LOSS, 0.5)])
        made.append(worker_pb2.HistoryPart(number=number, rows=pack(recorder.take())))
    return made


def result_of(parts: list[worker_pb2.HistoryPart]) -> worker_pb2.TrainResult:
    digest = hashlib.sha256(b"".join(part.rows for part in parts)).hexdigest()
    return worker_pb2.TrainResult(num_history_parts=len(parts), history_digest=digest)


def test_parts_are_whole_until_one_is_missing() -> None:
    live, parts = LiveHistory(), parts_of(3)
    for part in parts:
        live.add(FIRST, SegmentTail(1, 1), part)
    tail = live.tail(FIRST)
    assert tail is not None
    assert tail.sent.are_all(result_of(parts))
    assert not tail.sent.are_all(result_of(parts[:2]))
    assert not tail.sent.are_all(worker_pb2.TrainResult(num_history_parts=3, history_digest="x"))
    for part in (parts[0], parts[2]):  # attached again, and one is lost
        live.add(FIRST, SegmentTail(1, 1), part)
    tail = live.tail(FIRST)
    assert tail is not None
    assert not tail.sent.are_all(result_of(parts))
    for part in parts:
        live.add(FIRST, SegmentTail(1, 1), part)
    live.add(FIRST, SegmentTail(2, 1), parts[0])
    assert live.parties(RUN) == [ROOT]
    live.end(RUN, ROOT)
    assert live.tail(FIRST) is None


def test_what_is_too_much_is_merged_and_no_longer_whole() -> None:
    parts = parts_of(20)
    num_bytes = sum(len(part.rows) for part in parts)
    live = LiveHistory(max_tail_bytes=num_bytes // 3)
    for part in parts:
        live.add(FIRST, SegmentTail(1, 1), part)
    tail = live.tail(FIRST)
    assert tail is not None
    assert tail.num_bytes <= num_bytes // 3
    assert not tail.sent.are_all(result_of(parts))
    rows = rows_in_flight(live.sent(RUN, ROOT))[LOSS]
    assert tail.stride > 1
    assert (rows.step[-1], rows.count.sum()) == (2000, 2000)

    live = LiveHistory(max_bytes=num_bytes)
    for run in ("one", "two"):
        for part in parts:
            live.add(TailKey(RunId(run), ROOT, 0), SegmentTail(1, 1), part)
    sizes = [live.tail(TailKey(RunId(run), ROOT, 0)) for run in ("one", "two")]
    assert sum(tail.num_bytes for tail in sizes if tail) <= num_bytes
    for run in ("one", "two"):
        assert rows_in_flight(live.sent(RunId(run), ROOT))[LOSS].count.sum() == 2000


def test_parts_that_cannot_be_read_are_dropped() -> None:
    live = LiveHistory(max_tail_bytes=100)
    live.add(FIRST, SegmentTail(1, 1), worker_pb2.HistoryPart(number=0, rows=bytes(200)))
    tail = live.tail(FIRST)
    assert tail is not None
    assert (tail.num_bytes, rows_in_flight(live.sent(RUN, ROOT))) == (0, {})
    large = worker_pb2.HistoryPart(number=0, rows=bytes(256 * 1024 + 1))
    live.add(FIRST, SegmentTail(2, 1), large)
    assert (tail := live.tail(FIRST)) is not None
    assert (tail.num_bytes, tail.sent.are_all(result_of([large]))) == (0, False)


def test_what_is_a_members_own_goes_with_it_and_the_newest_membership_counts() -> None:
    live = LiveHistory()

    def add(rank: int, membership: int, party: str, value: float) -> None:
        recorder = Recorder(1, 0)
        recorder.add(1, [(LOSS, value)])
        part = worker_pb2.HistoryPart(number=0, rows=pack(recorder.end()), party=party)
        live.add(TailKey(RUN, ROOT, rank), SegmentTail(1, 1, membership), part)

    add(0, 1, "node/0", 0.0)
    add(1, 1, "node/1", 1.0)
    add(2, 1, "node/2", 2.0)
    add(0, 2, "node/2", 3.0)  # two are left, and rank 1 has not sent yet
    assert live.parties(RUN) == ["node/1", "node/2"]
    found = {party: rows_in_flight(live.sent(RUN, party))[LOSS] for party in live.parties(RUN)}
    assert {party: rows.last.tolist() for party, rows in found.items()} == {
        "node/1": [1.0],
        "node/2": [3.0],
    }
    add(1, 2, "../../x", 1.0)
    assert live.parties(RUN) == ["node/2"], "what is no party is not kept"
    live.end(RUN, ROOT)
    assert live.parties(RUN) == []
