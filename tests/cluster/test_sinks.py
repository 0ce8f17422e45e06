"""What the history of a real run is in each sink, read back with the tool's own reader.

TensorBoard, MLflow and W&B are large, so they are in no extra that tests are run with; with the
versions of constraints.txt installed, their tests run, too.
"""

import csv
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stratagem.client.cli.main import assemble
from stratagem.client.course.step_history import History
from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.client.sinks.sink import cursor_path, read_cursor
from tests.cluster.jobs import Gates, data_parallel
from tests.crash.rig import until
from tests.jobs import document, user_data
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("each sink holds the history, also when its process is killed"),
]

Point = tuple[str, int, str]
"""Name of a series, step, and the value's shortest text."""

PACKAGE = """
import os, signal
from stratagem.client.sinks.files import CsvSink

class Refusing(CsvSink):
    def rows(self, block):
        raise OSError("no space left")

class Killed(CsvSink):
    has_kept = False
    def keep(self, cursor):
        super().keep(cursor)
        Killed.has_kept = bool(cursor.steps)
    def rows(self, block):
        super().rows(block)
        if Killed.has_kept:  # behind what is kept, in the middle of what comes next
            self._file._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
"""
ENTRY_POINTS = """
[stratagem.sinks]
plain = theirs:CsvSink
refusing = theirs:Refusing
killed = theirs:Killed
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of somebody else's that is installed and offers sinks."""
    folder = tmp_path / "site"
    info = folder / "theirs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "theirs.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("theirs", None)


def job_file(folder: Path, **sections: Any) -> Path:
    """A run whose rows stand for a step each, with evaluations between them."""
    evaluation = {"split": "test", "every": "4 steps", "metrics": ["accuracy"]}
    strategy = data_parallel(2)
    written = document(
        "dropout_mlp", steps=14, strategy=strategy, evaluation=evaluation, name="sinks", **sections
    )
    path = folder / "job.json"
    path.write_text(json.dumps(written))
    return path


def invoke(client: Client, *arguments: object) -> Result:
    return CliRunner().invoke(assemble(), [*map(str, arguments), "--coordinator", client.address])


def in_history(run: RunHandle) -> list[Point]:
    """The last values of all rows, and what evaluations measured."""
    history: History = run.history((), ("*",))
    found = [
        (f"{each.party}/{each.name}" if each.party else each.name, step, repr(value))
        for each in history.values()
        for step, value in zip(each.step.tolist(), each.last.tolist(), strict=True)
    ]
    for event in run.events():
        if event.kind == "SegmentFinished":
            measured = event.payload["metrics"].items()
            step = event.payload["step"]
            found += [(n, step, repr(v)) for n, v in measured if not n.startswith("train.")]
    return sorted(found)


def in_csv(path: Path) -> list[Point]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(int(row["count"]) + int(row["nonfinite"]) for row in rows)
    names = [f"{row['party']}/{row['series']}".lstrip("/") for row in rows]
    return sorted((name, int(r["step"]), r["last"]) for name, r in zip(names, rows, strict=True))


def in_json_lines(path: Path) -> list[Point]:
    rows, measured = [], []
    for line in map(json.loads, path.read_text().splitlines()):
        if "event" not in line:
            name = f"{line['party']}/{line['series']}".lstrip("/")
            value = float("nan") if line["last"] is None else line["last"]
            rows.append((name, line["step"], repr(value)))
        elif line["event"]["kind"] == "SegmentFinished":
            fact = line["event"]["payload"]
            numbers = fact["metrics"].items()
            measured += [
                (n, fact["step"], repr(v)) for n, v in numbers if not n.startswith("train.")
            ]
    return sorted([*rows, *measured])


@pytest.fixture(scope="module")
def run(client: Client, tmp_path_factory: pytest.TempPathFactory) -> RunHandle:
    handle = client.submit(json.loads(job_file(tmp_path_factory.mktemp("job")).read_text()))
    handle.result()
    assert len({name for name, _, _ in in_history(handle)}) > 5
    return handle


def test_files_and_the_sink_of_a_package_hold_the_history(
    client: Client, run: RunHandle, theirs: Path, tmp_path: Path
) -> None:
    expected, targets = in_history(run), {"csv": "a/rows.csv", "jsonl": "b.jsonl", "plain": "c.csv"}
    for name, target in targets.items():
        done = invoke(client, "export", run.run_id, "--to", f"{name}:{tmp_path / target}")
        assert (done.exit_code, done.stderr) == (0, "")
    assert in_csv(tmp_path / "a" / "rows.csv") == expected
    assert in_json_lines(tmp_path / "b.jsonl") == expected
    assert (tmp_path / "c.csv").read_bytes() == (tmp_path / "a" / "rows.csv").read_bytes()
    again = invoke(client, "export", run.run_id, "--to", f"csv:{tmp_path / 'a' / 'rows.csv'}")
    assert again.exit_code == 0
    assert in_csv(tmp_path / "a" / "rows.csv") == expected


@pytest.mark.filterwarnings("ignore")
def test_an_offline_file_of_wandb_holds_the_history(
    client: Client, run: RunHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for _ in range(2):
        assert invoke(client, "export", run.run_id, "--to", "wandb:project").exit_code == 0
    read: list[Point] = []
    for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb"):
        for row in offline_rows(path):
            step = int(row.pop("step"))
            read += [(n, step, repr(float(v))) for n, v in row.items() if not n.startswith("_")]
    assert sorted(read) == in_history(run)


def offline_rows(path: Path) -> Iterator[dict[str, Any]]:
    """What was logged: records in the frames of a LevelDB log, as W&B's own messages."""
    messages = import_module("wandb.proto.wandb_internal_pb2")
    for data in log_records(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items
            }


def log_records(log: bytes) -> Iterator[bytes]:
    """Frames (CRC, length, kind) that do not cross blocks of 32 KiB; kinds 2, 3, 4 are parts."""
    at, whole = 7, b""  # behind the header of the file
    while at + 7 <= len(log):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def test_a_sink_whose_process_is_killed_is_completed(
    client: Client, theirs: Path, gates: Gates, tmp_path: Path
) -> None:
    """The process that follows the run and writes is killed within a write; the run goes on. It is
    held until rows of its first steps are kept: all rows at once are written as one."""
    target, run_id = tmp_path / "rows.csv", "sink-killed"
    job = job_file(tmp_path, data=user_data("gated", folder=str(gates.folder)))
    command = [
        *(sys.executable, "-m", "stratagem.program", "run", str(job)),
        *("--run-id", run_id, "--coordinator", client.address, "--log-to", f"killed:{target}"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(theirs), *sys.path])}
    pipe = subprocess.PIPE
    gates.close("batch-7")  # after three commits
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe) as writing:
        try:
            until(lambda: has_kept(target, run_id) or writing.poll() is not None, "rows are kept")
            gates.open()
            _, said = writing.communicate(timeout=PATIENCE_S)
        finally:
            writing.kill()
    assert writing.returncode == -signal.SIGKILL, said
    run = client.get(run_id)
    run.result()
    assert target.stat().st_size
    done = invoke(client, "export", run_id, "--to", f"csv:{target}")
    assert done.exit_code == 0, done.output
    assert in_csv(target) == in_history(run)


def has_kept(target: Path, run_id: str) -> bool:
    """Whether rows of a run are in a file to stay."""
    kept = read_cursor(cursor_path(target, run_id))
    return kept is not None and bool(kept.steps)


def test_a_sink_that_fails_changes_no_run(client: Client, theirs: Path, tmp_path: Path) -> None:
    target, run_id = tmp_path / "rows.csv", "sink-refuses"
    logged = ("--run-id", run_id, "--log-to", f"refusing:{target}")
    done = invoke(client, "run", job_file(tmp_path), *logged)
    assert done.exit_code == 0
    assert "COMPLETED" in done.stdout
    problem = f"refusing:{target}: not all is written (OSError: no space left)"
    completed = f'"stratagem export {run_id} --to refusing:{target}" completes it'
    assert done.stderr.splitlines()[-1] == f"{problem}; {completed}"
    asked = invoke(client, "export", run_id, "--to", f"refusing:{target}")
    assert asked.exit_code == 1
    assert problem in asked.stderr
    assert invoke(client, "export", run_id, "--to", f"csv:{target}").exit_code == 0
    assert in_csv(target) == in_history(client.get(run_id))
