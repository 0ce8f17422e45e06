"""Histories of segments in flight: whole as long as they are small, and bounded."""

import hashlib

import numpy as np

from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Recorder, Series
from stratagem.common.history.packing import pack
from stratagem.coordinator.observe.live_history import LiveHistory, SegmentTail
from stratagem.v1 import worker_pb2

RUN, ROOT = RunId("r"), Party("")
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
        live.add(RUN, ROOT, SegmentTail(1, 1), part)
    tail = live.tail(RUN, ROOT)
    assert tail is not None
    assert tail.sent.are_all(result_of(parts))
    assert not tail.sent.are_all(result_of(parts[:2]))
    assert not tail.sent.are_all(worker_pb2.TrainResult(num_history_parts=3, history_digest="x"))
    for part in (parts[0], parts[2]):  # attached again, and one is lost
        live.add(RUN, ROOT, SegmentTail(1, 1), part)
    tail = live.tail(RUN, ROOT)
    assert tail is not None
    assert not tail.sent.are_all(result_of(parts))
    for part in parts:
        live.add(RUN, ROOT, SegmentTail(1, 1), part)
    live.add(RUN, ROOT, SegmentTail(2, 1), parts[0])
    assert live.parties(RUN) == [ROOT]
    live.end(RUN, ROOT, 1)
    assert (kept := live.tail(RUN, ROOT)) is not None
    assert kept.segment == 2
    live.end(RUN, ROOT, 2)
    assert live.tail(RUN, ROOT) is None


def test_what_is_too_much_is_merged_and_no_longer_whole() -> None:
    parts = parts_of(20)
    num_bytes = sum(len(part.rows) for part in parts)
    live = LiveHistory(max_tail_bytes=num_bytes // 3)
    for part in parts:
        live.add(RUN, ROOT, SegmentTail(1, 1), part)
    tail = live.tail(RUN, ROOT)
    assert tail is not None
    assert tail.num_bytes <= num_bytes // 3
    assert not tail.sent.are_all(result_of(parts))
    rows = tail.rows()[LOSS]
    assert tail.stride > 1
    assert (rows.step[-1], rows.count.sum()) == (2000, 2000)

    live = LiveHistory(max_bytes=num_bytes)
    for run in ("one", "two"):
        for part in parts:
            live.add(RunId(run), ROOT, SegmentTail(1, 1), part)
    sizes = [live.tail(RunId(run), ROOT) for run in ("one", "two")]
    assert sum(tail.num_bytes for tail in sizes if tail) <= num_bytes
    assert all(tail is not None and tail.rows()[LOSS].count.sum() == 2000 for tail in sizes)


def test_parts_that_cannot_be_read_are_dropped() -> None:
    live = LiveHistory(max_tail_bytes=100)
    live.add(RUN, ROOT, SegmentTail(1, 1), worker_pb2.HistoryPart(number=0, rows=bytes(200)))
    tail = live.tail(RUN, ROOT)
    assert tail is not None
    assert (tail.num_bytes, tail.rows()) == (0, {})
    large = worker_pb2.HistoryPart(number=0, rows=bytes(256 * 1024 + 1))
    live.add(RUN, ROOT, SegmentTail(2, 1), large)
    assert (tail := live.tail(RUN, ROOT)) is not None
    assert (tail.num_bytes, tail.sent.are_all(result_of([large]))) == (0, False)
