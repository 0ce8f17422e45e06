"""Recordings of workers: their clocks, their bounds, and the one trace they make."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import NotFoundError
from stratagem.common.base.ids import RunId
from stratagem.coordinator.observe import profiles
from stratagem.coordinator.observe.profiles import Profiles, Recording, joined
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.clock import CoordinatorClock
from stratagem.worker.session import profiling
from stratagem.worker.session.profiling import compacted

RUN = RunId("run-1")


def recorded(worker: str, base_ns: int, *rows: list[Any], segment: int = 1) -> pb.Profile:
    events = json.dumps({"base_ns": base_ns, "events": list(rows)})
    return pb.Profile(
        worker_id=worker,
        segment=segment,
        device_name="cpu",
        clock_error_s=0.0005,
        events_gzip=gzip.compress(events.encode()),
    )


def test_the_shortest_round_trip_tells_the_clock() -> None:
    clock = CoordinatorClock()
    assert clock.offset.error_s == float("inf")
    clock.note(100.0, 100.4, 50.3)  # the answer took longer than the question
    assert (clock.offset.seconds, clock.offset.error_s) == pytest.approx((-49.9, 0.2))
    clock.note(101.0, 101.002, 51.001)
    assert (clock.offset.seconds, clock.offset.error_s) == pytest.approx((-50.0, 0.001))
    clock.note(102.0, 104.0, 53.5)
    assert clock.offset.seconds == pytest.approx(-50.0)
    for beat in range(16):  # what is long ago no longer counts
        clock.note(200.0 + beat, 200.2 + beat, 151.1 + beat)
    assert clock.offset.seconds == pytest.approx(-49.0)


def event(name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": "cpu_op",
        "pid": 7,
        "tid": 8,
        "ts": ts,
        "dur": dur,
        **more,
    }


def test_a_recording_is_short_and_in_the_coordinators_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiling, "MAX_EVENTS", 2)
    events = [
        event("training step 3", 1000.0, 50.0, cat="user_annotation"),
        event("ProfilerStep#1", 1000.0, 60.0),
        event("short", 1001.0, 1.0),
        event("long", 1002.0, 9.0),
        event("longer" * 100, 1003.0, 10.0),
        event("of torch itself", 990.0, 99.0, pid="Spans"),
        {"ph": "M", "name": "process_name", "pid": 7},
    ]
    found = compacted({"baseTimeNanoseconds": 5_000_000, "traceEvents": events}, offset_s=-0.001)
    assert found["base_ns"] == 5_000_000 + 990_000 - 1_000_000
    assert found["events"] == [
        ["training step 3", "step", 10.0, 50.0, 8],
        [("longer" * 100)[:200], "cpu_op", 13.0, 10.0, 8],
        ["long", "cpu_op", 12.0, 9.0, 8],
    ]


def test_one_trace_has_a_row_for_each_worker_in_one_time() -> None:
    one = recorded("b", 2_000_000, ["training step 1", "step", 0.0, 5.0, 1])
    two = recorded("a", 2_001_500, ["training step 1", "step", 1.0, 5.0, 9])
    later = recorded("a", 2_009_000, ["training step 4", "step", 0.0, 5.0, 9], segment=2)
    recordings = [Recording.of(each) for each in (one, two, later)]
    events = list(joined(recordings, iter(recordings)))
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["args"]["segment"]) for e in spans] == [
        *((2, 0.0, 1), (1, 2.5, 1), (1, 9.0, 2)),
    ]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["a (cpu, clock ± 0.50 ms)", "b (cpu, clock ± 0.50 ms)"]


def test_recordings_are_kept_replaced_limited_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Profiles(tmp_path)
    with pytest.raises(NotFoundError, match=r"execution\.profiling"):
        store.trace(RUN)
    store.add(RUN, recorded("../w", 0, ["first", "cpu_op", 0.0, 1.0, 1]))
    store.add(RUN, recorded("../w", 0, ["again", "cpu_op", 0.0, 1.0, 1]))
    assert [path.parent for path in tmp_path.rglob("*-*-*")] == [tmp_path / RUN]
    trace = json.loads(b"".join(store.trace(RUN)))
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"] == ["again"]
    monkeypatch.setattr(profiles, "MAX_RUN_BYTES", 10)
    store.add(RUN, recorded("other", 0, ["late", "cpu_op", 0.0, 1.0, 1]))
    assert b"late" not in b"".join(store.trace(RUN))
    store.delete(RUN)
    assert not (tmp_path / RUN).exists()
