"""A worker that is not ours may send any recording; none of them spoils the run's trace."""

import gzip
import json
from pathlib import Path

import pytest

from stratagem.common.base.errors import NotFoundError
from stratagem.common.base.ids import RunId
from stratagem.coordinator.observe import profiles as profiles_module
from stratagem.coordinator.observe.profiles import MAX_EVENT_BYTES, MAX_ROWS, Profiles
from stratagem.v1 import worker_pb2 as wpb

RUN = RunId("run")


def recording(events: object, worker_id: str = "w") -> wpb.Profile:
    packed = gzip.compress(json.dumps({"base_ns": 5, "events": events}).encode())
    return wpb.Profile(worker_id=worker_id, party="../..", segment=1, events_gzip=packed)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{}" * 50)[:-9],
        gzip.compress(b"not JSON"),
        gzip.compress(b"[" * 100_000),
        gzip.compress(b'{"base_ns": 1}'),
        gzip.compress(b'{"base_ns": "x", "events": []}'),
        gzip.compress(b'{"base_ns": 1, "events": [[1]]}'),
        gzip.compress(b'{"base_ns": 1, "events": [["a", "b", "c", 1, 1]]}'),
        gzip.compress(b'{"base_ns": 1, "events": [["a", "b", 1, Infinity, 1]]}'),
        gzip.compress(b'{"base_ns": 1, "events": [["a", "b", 1, 1, 1]]'),
        gzip.compress(b'{"base_ns": 1, "events": [["a", "b", 1, 1, 1],]}'),
        gzip.compress(b'{"base_ns": 1, "events": [["a", "b", 1, 1, 1]], "more": []}'),
        gzip.compress(b'{"base_ns": 1, "events": [' + b"[" * 500_000 + b"]}"),
        gzip.compress(b'{"base_ns": 1, "events": [["' + b"a" * 500_000 + b'", "b", 1, 1, 1]]}'),
        gzip.compress(b'{"base_ns": 1, "events": [' + b'["a","b",1,1,1],' * MAX_ROWS + b"1]}"),
    ],
    ids=range(16),
)
def test_what_cannot_be_read_is_dropped(tmp_path: Path, packed: bytes) -> None:
    profiles = Profiles(tmp_path)
    profiles.add(RUN, wpb.Profile(worker_id="w", events_gzip=packed))
    with pytest.raises(NotFoundError):
        profiles.trace(RUN)


def test_a_bomb_is_not_unpacked_to_its_end(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path)
    bomb = gzip.compress(b" " * (MAX_EVENT_BYTES + 2))
    profiles.add(RUN, wpb.Profile(worker_id="w", events_gzip=bomb))
    profiles.add(RUN, recording([["step", "step", 1, 2, 0]]))
    names = {each["name"] for each in json.loads(b"".join(profiles.trace(RUN)))["traceEvents"]}
    assert "step" in names
    assert all(path.is_relative_to(tmp_path / "run") for path in tmp_path.rglob("*-*"))


def test_a_trace_is_made_a_recording_at_a_time_and_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen kilobytes from a worker are megabytes of a trace, which nobody holds as a whole."""
    rows = [["x" * 200, "cpu_op", 1.5, 2.0, 1]] * 5_000
    num_bytes = len(json.dumps({"base_ns": 5, "events": rows}))
    monkeypatch.setattr(profiles_module, "MAX_RUN_BYTES", 3 * num_bytes)
    profiles = Profiles(tmp_path)
    for number in range(5):
        profiles.add(RUN, recording(rows, f"w{number}"))
    pieces = list(profiles.trace(RUN))
    assert max(map(len, pieces)) < 2 * profiles_module.PIECE_BYTES
    events = json.loads(b"".join(pieces))["traceEvents"]
    assert len([each for each in events if each["ph"] == "X"]) == 3 * len(rows)


def test_names_in_a_trace_move_no_cursor(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path)
    profiles.add(RUN, recording([["a\x1b[2J", "b\n", 1, 2, "t\x07"]]))
    (event,) = [
        each
        for each in json.loads(b"".join(profiles.trace(RUN)))["traceEvents"]
        if each["ph"] == "X"
    ]
    assert (event["name"], event["cat"], event["tid"]) == ("a\\x1b[2J", "b\\x0a", "t\\x07")


def test_what_a_disk_does_to_recordings_is_no_matter_of_the_run(tmp_path: Path) -> None:
    """A power cut leaves half a file, and a full disk takes none; the segment goes on."""
    folder = tmp_path / "profiles" / RUN
    folder.mkdir(parents=True)
    (folder / "00000001--w").write_bytes(b'{"worker_id": "w", "par')
    profiles = Profiles(tmp_path / "profiles")
    profiles.add(RUN, recording([["step", "step", 1, 2, 0]]))
    names = {each["name"] for each in json.loads(b"".join(profiles.trace(RUN)))["traceEvents"]}
    assert "step" in names
    (tmp_path / "file").write_bytes(b"")
    Profiles(tmp_path / "file").add(RUN, recording([["step", "step", 1, 2, 0]]))
