"""A worker that is not ours may send any recording; none of them spoils the run's trace."""

import gzip
import json
from pathlib import Path

import pytest

from stratagem.common.errors import NotFoundError
from stratagem.common.ids import RunId
from stratagem.coordinator.watching.profiles import MAX_EVENT_BYTES, Profiles
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
    ],
    ids=range(9),
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
    names = {each["name"] for each in json.loads(profiles.trace(RUN))["traceEvents"]}
    assert "step" in names
    assert all(path.is_relative_to(tmp_path / "run") for path in tmp_path.rglob("*-*"))
