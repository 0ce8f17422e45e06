"""What is stored of a segment: rows of several steps, of a party and of its parts, cut anywhere."""

import asyncio

import pytest

from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Recorder, Series, joined
from stratagem.common.history.recording import packed_parts, unpack
from stratagem.coordinator.effects.segment import TrainedSteps, rows_of
from stratagem.coordinator.observe.history import PackedRows
from stratagem.coordinator.store.step_history import HistoryRow

STRIDE = 4
SILO = Party("client1")
LOSS, BUSY = Series("train.loss"), Series("busy_s", observed=True)
OF_PARTS = {"": LOSS, "node/3": LOSS, "stage/0": BUSY}


def value(part: str, step: int) -> float:
    return (step * 37 % 101) / 7 + len(part)


def recorded(part: str, first: int, last: int) -> list[PackedRows]:
    """What a member sends of the steps from first to last, in two pieces."""
    recorder = Recorder(STRIDE, first - 1)
    sent: list[bytes] = []
    for step in range(first, last + 1):
        recorder.add(step, [(OF_PARTS[part], value(part, step))])
        if step == (first + last) // 2:
            sent += packed_parts(recorder.take())
    sent += packed_parts(recorder.end())
    return [PackedRows(part, rows, first - 1) for rows in sent]


def stored(segment: int, first: int, last: int) -> list[HistoryRow]:
    parts = [each for part in OF_PARTS for each in recorded(part, first, last)]
    trained = TrainedSteps(RunId("run"), SILO, segment, STRIDE, last)
    return asyncio.run(rows_of(trained, parts))


def test_parts_of_a_nested_party_have_the_rows_that_one_recording_has() -> None:
    ends = [0, 3, 9, 10, 22, 23, 41]  # none but 0 is the end of a row
    rows = [row for i in range(1, 7) for row in stored(i, ends[i - 1] + 1, ends[i])]
    assert {row.party for row in rows} == {"client1", "client1/node/3", "client1/stage/0"}
    for part, series in OF_PARTS.items():
        own = [row for row in rows if row.party == "/".join(filter(None, (SILO, part)))]
        spans = [(row.segment, row.from_step, row.to_step) for row in own]
        assert spans == [(i, ends[i - 1], ends[i]) for i in range(1, 7)]
        whole = Recorder(STRIDE, 0)
        for step in range(1, 42):
            whole.add(step, [(series, value(part, step))])
        shown = joined([unpack(row.rows)[series] for row in own], STRIDE)
        assert shown.to_bytes() == whole.end()[series].to_bytes()
        assert shown.count.tolist() == [4] * 10 + [1]


def test_steps_outside_of_the_segment_are_not_stored(capsys: pytest.CaptureFixture[str]) -> None:
    trained = TrainedSteps(RunId("run"), SILO, 1, STRIDE, 8)
    assert asyncio.run(rows_of(trained, recorded("", 1, 8)))
    assert not asyncio.run(rows_of(trained, recorded("", 1, 9)))
    assert "has steps outside of 1 to 8" in capsys.readouterr().out
