"""Profiles that workers recorded of their training steps: one file for each worker and segment of a
run.

Joined into one trace in the Trace Event Format, which Chrome and Perfetto show: a process for each
worker, all in the coordinator's time. Not needed for anything else; survives every crash but that
of the disk.

A recording is made by a worker, which may be of another party: no more of it is unpacked than a
limit, and it is read row by row, so that no thread holds the interpreter for long; see
`profile_recording.py`.

All of this blocks: call it in a thread.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import structlog

from stratagem.common.base.errors import NotFoundError
from stratagem.common.base.files import whole_file
from stratagem.common.base.ids import RunId
from stratagem.coordinator.observe.profile_recording import Recording, Row, UnreadableError
from stratagem.v1 import worker_pb2

log = structlog.get_logger(__name__)

MAX_RUN_BYTES: Final = 256 * 2**20
"""Limit of a run's recordings, unpacked; later ones are dropped."""
PIECE_BYTES: Final = 2**20
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


class Profiles:
    """The recordings in files below `root`, in a folder for each run."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, run_id: RunId, profile: worker_pb2.Profile) -> None:
        """Keep a recording; one of the same worker, party and segment replaces an earlier one.

        One that cannot be read, which no worker of ours sends, is dropped, and so is one that the
        disk does not take: the run continues without it.
        """
        try:
            self._add(run_id, Recording.of(profile))
        except (UnreadableError, OSError) as error:
            log.warning("a recording is dropped", run_id=run_id, reason=str(error))

    def _add(self, run_id: RunId, recording: Recording) -> None:
        folder = self._root / run_id
        folder.mkdir(parents=True, exist_ok=True)
        party, worker = _UNSAFE.sub("_", recording.party), _UNSAFE.sub("_", recording.worker_id)
        path = folder / f"{recording.segment:08}-{party}-{worker}"
        others = (other for other in _kept(folder) if other != path)
        used = sum(Recording.head_in(other).num_bytes for other in others)
        if used + recording.num_bytes > MAX_RUN_BYTES:
            return
        with whole_file(path, durable=False) as file:
            file.write(recording.packed())

    def delete(self, run_id: RunId) -> None:
        """Delete the recordings of a run."""
        shutil.rmtree(self._root / run_id, ignore_errors=True)

    def run_ids(self) -> list[RunId]:
        """Return the runs that have recorded something."""
        return [RunId(path.name) for path in self._root.glob("*")]

    def trace(self, run_id: RunId) -> Iterator[bytes]:
        """Yield all recordings of a run as one JSON text, piece by piece: one recording is in
        memory at a time.

        Raises NotFoundError when nothing was recorded.
        """
        kept = _kept(self._root / run_id)
        heads = [Recording.head_in(path) for path in kept]
        if not kept:
            raise NotFoundError(
                f"run {run_id!r} has recorded nothing; execution.profiling: true does, and the "
                "first recording comes when some steps are done"
            )
        return _pieces(_text(heads, (Recording.read(path) for path in kept)))


def _kept(folder: Path) -> list[Path]:
    """Return the recordings in a folder; a file that is damaged, or of another version, is
    not one."""
    paths = sorted(folder.glob("[!.]*")) if folder.is_dir() else []
    return [path for path in paths if Recording.is_one(path)]


def joined(heads: list[Recording], recordings: Iterator[Recording]) -> Iterator[dict[str, Any]]:
    """Yield the events of one trace; times are microseconds since the earliest, by the
    coordinator's clock."""
    first_ns = min(head.base_ns for head in heads)
    workers = {head.worker_id: head for head in heads}
    pids = {worker: number for number, worker in enumerate(sorted(workers), start=1)}
    for worker, pid in pids.items():
        yield _metadata("process_name", pid, {"name": _row_name(workers[worker])})
        yield _metadata("process_sort_index", pid, {"sort_index": pid})
    for recording in recordings:
        shift_us = (recording.base_ns - first_ns) / 1000
        for row in recording.rows():
            yield _timed(recording, pids[recording.worker_id], row, shift_us)


def _text(heads: list[Recording], recordings: Iterator[Recording]) -> Iterator[str]:
    about = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": min(head.base_ns for head in heads),
        "clockErrorSeconds": {
            head.worker_id: head.clock_error_s for head in heads if head.clock_error_s is not None
        },
    }
    yield json.dumps(about)[:-1] + ', "traceEvents": ['
    for number, event in enumerate(joined(heads, recordings)):
        yield (", " if number else "") + json.dumps(event)
    yield "]}"


def _pieces(texts: Iterator[str]) -> Iterator[bytes]:
    """Join texts into pieces that are each worth a message."""
    waiting, num_bytes = [], 0
    for text in texts:
        raw = text.encode()
        waiting.append(raw)
        num_bytes += len(raw)
        if num_bytes >= PIECE_BYTES:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
    yield b"".join(waiting)


def _timed(recording: Recording, pid: int, row: Row, shift_us: float) -> dict[str, Any]:
    name, category, begin_us, duration_us, thread = row
    event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": thread}
    event |= {"ts": round(begin_us + shift_us, 3), "dur": duration_us}
    if category == "step":
        event["args"] = {"segment": recording.segment, "party": recording.party}
    return event


def _row_name(head: Recording) -> str:
    error = head.clock_error_s
    clock = "clock not compared" if error is None else f"clock ± {error * 1e3:.2f} ms"
    return f"{head.worker_id} ({head.device_name}, {clock})"


def _metadata(name: str, pid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}
