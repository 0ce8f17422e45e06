"""The workers' recordings of training steps, one file for each worker and segment of a run.

The recordings are joined into one trace in the Trace Event Format, which Chrome and Perfetto show:
a process for each worker, all in the coordinator's time. Nothing else needs them. They survive
every crash except the loss of the disk. All methods block; call them in a thread.
"""

import gzip
import io
import json
import math
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import structlog

from stratagem.common.base.errors import NotFoundError
from stratagem.common.base.files import whole_file
from stratagem.common.base.ids import RunId
from stratagem.common.base.text import printable
from stratagem.v1 import worker_pb2

# ---- Recordings ----
#
# A recording is validated while it is parsed, and is stored as a file.
#
# A worker, which may belong to another party, sends compressed JSON, {"base_ns": ..., "events":
# [[name, category, begin_us, duration_us, thread], ...]}, and it may send anything: sixty
# kilobytes unpack to as many megabytes, and a JSON parser would hold the interpreter for seconds
# on these. Unpacking therefore stops at a limit, and rows are parsed one by one, each of a
# bounded length.
#
# A file is one line of JSON, the head, followed by the events as they came.

MAX_EVENT_BYTES: Final = 16 * 2**20
"""The limit of the unpacked size; our workers record 20,000 events of about 100 bytes."""
MAX_ROWS: Final = 32_768
MAX_ROW_CHARS: Final = 4096
MAX_NAME_CHARS: Final = 256
_HEAD: Final = re.compile(r'\s*\{\s*"base_ns"\s*:\s*(-?\d{1,20})\s*,\s*"events"\s*:\s*\[\s*')
_NEXT: Final = re.compile(r"\s*,\s*")
_END: Final = re.compile(r"\s*\]\s*\}\s*")

Row = tuple[str, str, float, float, int | str]
"""The name, category, begin and duration in microseconds, and thread of an event."""


class UnreadableError(Exception):
    """A recording does not have the form that workers of this project send."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording of training steps, and its origin; `events` is compressed, and empty if only
    the head was read."""

    worker_id: str
    party: str
    segment: int
    device_name: str
    clock_error_s: float | None
    base_ns: int
    num_bytes: int
    """The unpacked size of the events."""
    events: bytes = b""

    @classmethod
    def of(cls, profile: worker_pb2.Profile) -> Self:
        """Validate the recording in a message, and return it. Raises UnreadableError."""
        text = _unpacked(profile.events_gzip)
        base_ns = int(_head_of(text)[1])
        for _ in _rows(text):
            pass
        error_s = profile.clock_error_s
        return cls(
            worker_id=profile.worker_id,
            party=profile.party,
            segment=profile.segment,
            device_name=profile.device_name,
            clock_error_s=error_s if math.isfinite(error_s) else None,
            base_ns=base_ns,
            num_bytes=len(text),
            events=profile.events_gzip,
        )

    @classmethod
    def head_in(cls, path: Path) -> Self:
        """Read the head of a recording from a file, without the events."""
        with path.open("rb") as file:
            return cls(**json.loads(file.readline()))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recording from a file."""
        with path.open("rb") as file:
            head = cls(**json.loads(file.readline()))
            return replace(head, events=file.read())

    @staticmethod
    def is_one(path: Path) -> bool:
        """Return True if a file is a readable recording."""
        try:
            Recording.head_in(path)
        except (OSError, ValueError, TypeError):  # deleted meanwhile, or damaged by a power cut
            return False
        return True

    def packed(self) -> bytes:
        """Return the recording as the content of its file."""
        head = {key: value for key, value in asdict(self).items() if key != "events"}
        return json.dumps(head).encode() + b"\n" + self.events

    def rows(self) -> Iterator[Row]:
        """Yield the recorded events as rows, in order."""
        return _rows(_unpacked(self.events))


def _unpacked(events: bytes) -> str:
    try:
        with gzip.open(io.BytesIO(events)) as file:
            content = file.read(MAX_EVENT_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableError(f"it cannot be unpacked: {error}") from None
    if len(content) > MAX_EVENT_BYTES:
        raise UnreadableError(f"it unpacks to more than {MAX_EVENT_BYTES} bytes")
    try:
        return content.decode("ascii")  # as our workers write JSON
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is not JSON in ASCII: {error.reason}") from None


def _head_of(text: str) -> re.Match[str]:
    head = _HEAD.match(text[:MAX_ROW_CHARS])
    if head is None:
        raise UnreadableError("it does not begin with base_ns and events")
    return head


def _rows(text: str) -> Iterator[Row]:
    """Yield the events, parsed one by one so that other threads get their turn in between."""
    at, decoder = _head_of(text).end(), json.JSONDecoder()
    num_rows = 0
    while not (num_rows == 0 and _END.fullmatch(text, at)):
        num_rows += 1
        if num_rows > MAX_ROWS:
            raise UnreadableError(f"it has more than {MAX_ROWS} events")
        try:
            value, length = decoder.raw_decode(text[at : at + MAX_ROW_CHARS])
        except (ValueError, RecursionError):
            reason = f"event {num_rows} is not JSON of at most {MAX_ROW_CHARS} characters"
            raise UnreadableError(reason) from None
        yield _row(value, num_rows)
        at += length
        behind = _NEXT.match(text, at, at + MAX_ROW_CHARS)
        if behind is None:
            if _END.fullmatch(text, at):
                return
            raise UnreadableError(f"behind event {num_rows} stands neither another one nor the end")
        at = behind.end()


def _row(value: Any, number: int) -> Row:
    try:
        name, category, begin_us, duration_us, thread = value
        begin, duration = float(begin_us), float(duration_us)
    except (TypeError, ValueError, OverflowError):
        raise UnreadableError(f"event {number} has another form") from None
    is_right = isinstance(name, str) and isinstance(category, str)
    is_right &= isinstance(thread, int | str) and math.isfinite(begin + duration)
    if not is_right:
        raise UnreadableError(f"event {number} has another form")
    label = thread if isinstance(thread, int) else printable(thread[:MAX_NAME_CHARS], is_line=True)
    return (
        printable(name[:MAX_NAME_CHARS], is_line=True),
        printable(category[:MAX_NAME_CHARS], is_line=True),
        begin,
        duration,
        label,
    )


# ---- Files ----

log = structlog.get_logger(__name__)

MAX_RUN_BYTES: Final = 256 * 2**20
"""The most unpacked bytes of all recordings of a run; later ones are dropped."""
PIECE_BYTES: Final = 2**20
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


class Profiles:
    """The store of recordings: files below `root`, in one folder per run."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, run_id: RunId, profile: worker_pb2.Profile) -> None:
        """Store a recording, in place of an earlier one of the same worker, party and segment.

        A recording that cannot be read (this project's workers send none) or written to disk is
        dropped; the run continues without it.
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
        """Return the runs that have recordings."""
        return [RunId(path.name) for path in self._root.glob("*")]

    def trace(self, run_id: RunId) -> Iterator[bytes]:
        """Yield all recordings of a run as one JSON text, piece by piece, with one recording in
        memory at a time.

        Raises NotFoundError if nothing was recorded.
        """
        paths = _kept(self._root / run_id)
        heads = [Recording.head_in(path) for path in paths]
        if not paths:
            raise NotFoundError(
                f"run {run_id!r} has recorded nothing; execution.profiling: true does, and the "
                "first recording comes when some steps are done"
            )
        return _pieces(_text(heads, (Recording.read(path) for path in paths)))


def _kept(folder: Path) -> list[Path]:
    """Return the recordings in a folder; damaged files and those of other versions are left out."""
    paths = sorted(folder.glob("[!.]*")) if folder.is_dir() else []
    return [path for path in paths if Recording.is_one(path)]


def joined(heads: list[Recording], recordings: Iterator[Recording]) -> Iterator[dict[str, Any]]:
    """Yield the events of one trace; times are microseconds since the earliest recording, by the
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
    """Join texts into pieces, each about as large as a message may be."""
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
