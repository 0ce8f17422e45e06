"""What reaches a sink: finished rows and facts, each once, whatever fails on the way."""

import csv
import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.client.course.views import Event
from stratagem.client.sinks.files import CsvSink, JsonLinesSink, TensorBoardSink
from stratagem.client.sinks.outlet import Outlet, bring
from stratagem.client.sinks.sink import Cursor, RowBlock, Sink, SinkRun, sink_names, sink_of
from stratagem.common.base.errors import InvalidInputError
from tests.client.sinks.source import PlayedRun
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.core

RUN = SinkRun("mine", "digits", "Local", 100.0)
SINKS: dict[str, Callable[[str], Sink]] = {
    "csv": CsvSink,
    "jsonl": JsonLinesSink,
    "tensorboard": TensorBoardSink,
}


def written(kind: str, target: Path) -> bytes:
    found = sorted(target.rglob("events.*")) if kind == "tensorboard" else [target]
    return b"".join(path.read_bytes() for path in found)


class TornSink:
    """A sink whose process ends during one of its calls; part of the call may be done."""

    def __init__(self, sink: Sink, calls: int) -> None:
        self.sink, self.calls = sink, calls

    def open(self, run: SinkRun) -> Cursor:
        return self.sink.open(run)

    def restart(self) -> Cursor:
        return self.sink.restart()

    def rows(self, block: RowBlock) -> None:
        self.sink.rows(block)
        self._tear()

    def fact(self, event: Event) -> None:
        self.sink.fact(event)
        self._tear()

    def keep(self, cursor: Cursor) -> None:
        self._tear()
        self.sink.keep(cursor)

    def close(self) -> None:
        self.sink.close()

    def _tear(self) -> None:
        self.calls -= 1
        if not self.calls:
            raise OSError("no space left")


@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from(sorted(SINKS)),
    segments=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    tears=st.lists(st.integers(1, 12), max_size=4),
    looks=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_however_it_is_cut_the_same_rows_are_there(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    segments: list[int],
    tears: list[int],
    looks: list[bool],
) -> None:
    folder = tmp_path_factory.mktemp("sinks")
    run, left = PlayedRun(segments), list(tears)

    def look(is_whole: bool) -> None:
        is_torn = True
        while is_torn:
            sink = TornSink(SINKS[kind](str(folder / "often")), left.pop() if left else -1)
            is_torn = False
            try:
                bring(run, sink, sink.open(RUN), is_whole=is_whole)
            except OSError:
                is_torn = True
            finally:
                sink.close()

    for looks_now, _ in zip(looks, segments, strict=False):
        run.advance()
        if looks_now:
            look(False)
    run.end()
    look(True)
    sink = SINKS[kind](str(folder / "once"))
    bring(run, sink, sink.open(RUN), is_whole=True)
    sink.close()
    often, once = (written(kind, folder / name) for name in ("often", "once"))
    if kind == "tensorboard":  # times differ
        assert sorted(scalars(often)) == sorted(scalars(once))
    else:
        assert sorted(often.splitlines()) == sorted(once.splitlines())


def test_csv_holds_all_series_in_long_form(tmp_path: Path) -> None:
    path = tmp_path / "a" / "rows.csv"
    run, sink = PlayedRun([6, 3]), CsvSink(str(path))
    cursor = sink.open(RUN)
    run.advance()
    cursor = bring(run, sink, cursor, is_whole=False)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    # Of the steps 5 and 6 the row is not whole yet, and what is in flight does not count.
    assert [(r["party"], r["series"], r["step"]) for r in rows] == [
        ("", "test.accuracy", "6"),
        ("", "train.loss", "4"),
        ("", "train.lr", "4"),
        *(("member1", "train.loss", str(step)) for step in (1, 2, 3)),
    ]
    assert (rows[1]["last"], rows[1]["min"], rows[1]["max"]) == ("2.5", "2.5", "10.0")
    assert (rows[1]["count"], rows[1]["nonfinite"], rows[1]["observed"]) == ("4", "0", "0")
    run.advance()
    run.end()
    assert bring(run, sink, cursor, is_whole=True).steps == {
        "train.loss": 9,
        "train.lr": 9,
        "member1/train.loss": 4,
    }
    sink.close()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [r["step"] for r in rows if not r["party"] and r["series"] == "train.loss"] == [
        *("4", "8", "9")
    ]
    assert [(r["last"], r["nonfinite"]) for r in rows if r["series"] == "train.lr"] == [
        *(("2.5", "0"), ("1.25", "1"), (repr(10 / 9), "0"))
    ]
    assert run.asked_from == [1, 4]  # not all of it each time


def test_json_lines_hold_facts_and_numbers_that_are_none(tmp_path: Path) -> None:
    run, sink = PlayedRun([14]), JsonLinesSink(str(tmp_path / "rows.jsonl"))
    run.advance()
    run.end()
    bring(run, sink, sink.open(RUN), is_whole=True)
    sink.close()
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["event"]["kind"] for line in lines[:2]] == ["SegmentFinished", "RunCompleted"]
    member = [line for line in lines[2:] if line["party"] == "member1"]
    assert member[6] == {
        "party": "member1",
        "series": "train.loss",
        "step": 7,
        "last": None,
        "min": None,
        "max": None,
        "count": 0,
        "nonfinite": 1,
        "observed": False,
    }


def frames(data: bytes) -> Iterator[bytes]:
    """Read an event file as TensorFlow's record_reader does."""

    def checked(part: bytes, masked: bytes) -> bytes:
        rotated = (struct.unpack("<I", masked)[0] - 0xA282EAD8) & 0xFFFFFFFF
        crc = (rotated >> 17 | rotated << 15) & 0xFFFFFFFF
        assert crc == google_crc32c.value(part)
        return part

    while data:
        (length,) = struct.unpack("<Q", checked(data[:8], data[8:12]))
        yield checked(data[12 : 12 + length], data[12 + length : 16 + length])
        data = data[16 + length :]


def fields(message: bytes) -> dict[int, bytes | int | float]:
    """The fields of a protobuf message, by number."""
    found: dict[int, bytes | int | float] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        match key & 7:
            case 0:
                found[key >> 3] = varint()
            case 1:
                (found[key >> 3],) = struct.unpack_from("<d", message, at)
                at += 8
            case 2:
                length = varint()
                found[key >> 3] = message[at : at + length]
                at += length
            case _:
                (found[key >> 3],) = struct.unpack_from("<f", message, at)
                at += 4
    return found


def scalars(data: bytes) -> Iterator[tuple[str, int, str]]:
    """Tag, step and value of each point of an event file."""
    first, *points = frames(data)
    assert fields(first)[3] == b"brain.Event:2"
    for point in points:
        event = fields(point)
        assert isinstance(event[5], bytes)
        summary = fields(event[5])[1]
        assert isinstance(summary, bytes)
        value = fields(summary)
        assert isinstance(value[1], bytes)
        step = event[2]
        assert isinstance(step, int)
        yield value[1].decode(), step, repr(value[2])


def whole_event_file(folder: Path) -> Path:
    run = PlayedRun([300, 9])
    run.advance()
    run.advance()
    run.end()
    sink = TensorBoardSink(str(folder))
    bring(run, sink, sink.open(RUN), is_whole=True)
    sink.close()
    (path,) = (folder / "mine").glob("events.out.tfevents.*")
    return path


def test_an_event_file_holds_points_and_their_extremes(tmp_path: Path) -> None:
    found = list(scalars(whole_event_file(tmp_path).read_bytes()))
    assert ("test.accuracy", 309, repr(struct.unpack("<f", struct.pack("<f", 0.309))[0])) in found
    assert [step for tag, step, _ in found if tag == "train.loss"] == [*range(4, 309, 4), 309]
    assert ("train.loss/max", 4, "10.0") in found
    assert ("train.loss/min", 4, "2.5") in found
    assert ("member1/train.loss", 7, "nan") in found
    assert not [tag for tag, _, _ in found if tag == "member1/train.loss/max"]


def test_tensorboard_reads_an_event_file(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    path = whole_event_file(tmp_path)
    found = accumulator.EventAccumulator(str(path), size_guidance={"scalars": 0})
    found.Reload()
    for tag in found.Tags()["scalars"]:
        read = [(tag, point.step, repr(point.value)) for point in found.Scalars(tag)]
        assert read == [each for each in scalars(path.read_bytes()) if each[0] == tag]


# ---- going back, and files of others ----


@pytest.mark.parametrize("kind", sorted(SINKS))
def test_a_run_that_goes_back_is_written_anew(kind: str, tmp_path: Path) -> None:
    run, sink = PlayedRun([8, 8]), SINKS[kind](str(tmp_path / "target"))
    cursor = sink.open(RUN)
    run.advance()
    run.advance()
    cursor = bring(run, sink, cursor, is_whole=True)
    sink.close()
    run.shown = 1
    run.say("RunResumed", from_segment=1, step=8)
    run.advance()
    run.end()
    sink = SINKS[kind](str(tmp_path / "target"))
    cursor = bring(run, sink, sink.open(RUN), is_whole=True)
    sink.close()
    assert cursor.steps["train.loss"] == 16
    once = SINKS[kind](str(tmp_path / "once"))
    bring(run, once, once.open(RUN), is_whole=True)
    once.close()
    again, anew = (written(kind, tmp_path / name) for name in ("target", "once"))
    if kind == "tensorboard":
        assert sorted(scalars(again)) == sorted(scalars(anew))
    else:
        assert again == anew


def test_two_files_in_a_folder_do_not_meet(tmp_path: Path) -> None:
    run = PlayedRun([8])
    run.advance()
    sinks: list[Sink] = [CsvSink(str(tmp_path / "rows.a")), JsonLinesSink(str(tmp_path / "rows.b"))]
    cursors = [sink.open(RUN) for sink in sinks]
    for sink, cursor in zip(sinks, cursors, strict=True):
        bring(run, sink, cursor, is_whole=False)
        sink.close()
    sizes = [sink.open(RUN).size for sink in sinks]
    assert sizes == [(tmp_path / name).stat().st_size for name in ("rows.a", "rows.b")]
    for sink in sinks:
        sink.close()


def test_a_file_that_was_removed_is_written_anew(tmp_path: Path) -> None:
    path, run = tmp_path / "rows.csv", PlayedRun([8])
    run.advance()
    run.end()
    texts = []
    for _ in range(2):
        sink = CsvSink(str(path))
        bring(run, sink, sink.open(RUN), is_whole=True)
        sink.close()
        texts.append(path.read_text())
        path.unlink()
    assert texts[0] == texts[1]


# ---- by name ----


def test_sinks_are_found_by_name() -> None:
    assert {"csv", "jsonl", "tensorboard", "mlflow", "wandb"} <= set(sink_names())
    assert isinstance(sink_of("csv:a.csv"), CsvSink)
    with pytest.raises(InvalidInputError, match=r"'cvs' is not one of .*did you mean csv"):
        sink_of("cvs:a.csv")
    with pytest.raises(InvalidInputError, match="'csv' names no target; write csv:TARGET"):
        sink_of("csv")


def test_mlflow_holds_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    target, run = f"file:{tmp_path}", PlayedRun([30, 9])
    for _ in run.segments:
        run.advance()
        sink = sink_of(f"mlflow:{target}")
        bring(run, sink, sink.open(RUN), is_whole=False)
        sink.close()
    client = mlflow.MlflowClient(tracking_uri=target)
    experiment = client.get_experiment_by_name("digits")
    (found,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(found.info.run_id, "train.loss")
    assert sorted(point.step for point in points) == list(range(4, 39, 4))


# ---- the thread ----


class FailingSink(CsvSink):
    """Fails until it may go on."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.tried, self.may = threading.Semaphore(0), False

    def keep(self, cursor: Cursor) -> None:
        self.tried.release()
        if not self.may:
            raise OSError("no space left")
        super().keep(cursor)


def test_a_sink_that_fails_is_told_of_once_and_completed(tmp_path: Path) -> None:
    run, sink, told = PlayedRun([8]), FailingSink(str(tmp_path / "rows.csv")), list[str]()
    run.advance()
    outlet = Outlet("csv:rows.csv", sink, run, told.append)
    outlet.wake()
    for _ in range(2):  # it is tried again by itself
        assert sink.tried.acquire(timeout=PATIENCE_S)
    run.end()
    sink.may = True
    assert outlet.finish() == ""
    assert told == ["csv:rows.csv: OSError: no space left; it is tried again"]
    assert (tmp_path / "rows.csv").read_text().count("\n") > 4


def test_a_sink_that_cannot_be_completed_says_so(tmp_path: Path) -> None:
    run, sink, told = PlayedRun([8]), FailingSink(str(tmp_path / "rows.csv")), list[str]()
    outlet = Outlet("csv:rows.csv", sink, run, told.append)
    assert outlet.finish() == "OSError: no space left"
    assert len(told) == 1


class SlowSink(CsvSink):
    """Keeps nothing before it may."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.reached, self.may = threading.Event(), threading.Event()

    def keep(self, cursor: Cursor) -> None:
        self.reached.set()
        assert self.may.wait(PATIENCE_S)
        super().keep(cursor)


def test_a_run_that_ends_while_a_sink_is_written_is_written_to_its_end(tmp_path: Path) -> None:
    run, sink, told = PlayedRun([8]), SlowSink(str(tmp_path / "rows.csv")), list[str]()
    outlet = Outlet("csv:rows.csv", sink, run, told.append)
    outlet.wake()
    assert sink.reached.wait(PATIENCE_S)
    run.advance()
    run.end()
    with ThreadPoolExecutor() as pool:
        problem = pool.submit(outlet.finish)
        assert outlet._ending.wait(PATIENCE_S)
        sink.may.set()
        assert problem.result(PATIENCE_S) == ""
    assert not told
    assert (tmp_path / "rows.csv").read_text().count("\n") > 4


def test_what_only_verifies_a_run_is_in_no_sink(tmp_path: Path) -> None:
    run = PlayedRun([4])
    run.advance()
    metrics = {"test.accuracy": 0.5}
    run.say("SegmentFinished", party="verifier", segment=1, step=4, metrics=metrics)
    run.say("SegmentRefuted", segment=1, step=4)
    run.end()
    sink = SINKS["jsonl"](str(tmp_path / "mine"))
    bring(run, sink, sink.open(RUN), is_whole=True)
    sink.close()
    lines = [json.loads(line) for line in written("jsonl", tmp_path / "mine").splitlines()]
    kinds = [line["event"]["kind"] for line in lines if "event" in line]
    assert kinds == ["SegmentFinished", "SegmentRefuted", "RunCompleted"]
