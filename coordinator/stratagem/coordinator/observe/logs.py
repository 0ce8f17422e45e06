"""The logs of runs: one file of JSON lines per run, for the `logs` command alone.

The coordinator's lines are the sentences of its facts; the workers' lines are the output and log
records of user code. A crash may lose lines, but never facts.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import structlog

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.apply import CLUSTER
from stratagem.coordinator.core.facts import Member

# ---- Log files ----

MAX_LINE_CHARS = 8192
MAX_FILE_BYTES = 64 * 2**20
"""The size of a log beyond which lines are dropped; one line in the log says so."""
READ_BYTES = 2**18
"""The bytes read at once for one follower; no line is longer."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RunLogLine:
    """One line of a run's log; worker_id: "" for the coordinator's lines; time_s: Unix time."""

    time_s: float
    worker_id: str
    level: str
    text: str


class RunLogs:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._root.mkdir(parents=True, exist_ok=True)
        self._files: dict[RunId, TextIO] = {}
        self._full: set[RunId] = set()
        self._changed: dict[RunId, asyncio.Event] = {}

    def add(self, run_id: RunId, line: RunLogLine) -> None:
        """Append a line, and wake its readers. A line that cannot be written is dropped."""
        if run_id in self._full:
            return
        try:
            self._add(run_id, line)
        except OSError as error:
            self._drop_file(run_id)
            log.warning("line of a run's log is lost", run_id=run_id, reason=error.strerror)
        self._wake(run_id)

    def _add(self, run_id: RunId, line: RunLogLine) -> None:
        file = self._files.get(run_id)
        if file is None:
            file = self._files[run_id] = self._path(run_id).open("a", encoding="utf-8")
        if file.tell() > MAX_FILE_BYTES:
            self._full.add(run_id)
            line = RunLogLine(
                line.time_s, "", "WARNING", "the log is full; later lines are dropped"
            )
        short = RunLogLine(line.time_s, line.worker_id, line.level, line.text[:MAX_LINE_CHARS])
        file.write(json.dumps(asdict(short)) + "\n")
        file.flush()

    def close_run(self, run_id: RunId) -> None:
        """Close the log of an ended run; its followers end once they have read all lines."""
        self._drop_file(run_id)
        self._wake(run_id)

    def _drop_file(self, run_id: RunId) -> None:
        """Close the file; lines that it cannot write are lost."""
        file = self._files.pop(run_id, None)
        if file is not None:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        """Close all files."""
        for run_id in list(self._files):
            self.close_run(run_id)

    def delete(self, run_id: RunId) -> None:
        """Delete a run's log."""
        self.close_run(run_id)
        self._full.discard(run_id)
        self._path(run_id).unlink(missing_ok=True)

    def run_ids(self) -> list[RunId]:
        """Return the runs that have a log."""
        return [RunId(path.stem) for path in self._root.glob("*.jsonl")]

    async def tail(
        self,
        run_id: RunId,
        from_line: int = 0,
        *,
        follow: bool,
        is_over: Callable[[RunId], bool],
    ) -> AsyncIterator[tuple[int, RunLogLine]]:
        """Yield each line so far with its number; with follow, also later lines, until the run is
        over.

        from_line: the number of the first line, from 0; a negative number counts from the end.
        """
        position = number = 0
        if from_line < 0:
            from_line = max(await asyncio.to_thread(self._count, run_id) + from_line, 0)
        if from_line > 0:
            position, number = await asyncio.to_thread(self._skip, run_id, from_line)
        while True:
            over = is_over(run_id)
            before = position
            lines, position = self._read(run_id, position)
            for line in lines:
                if line is not None and number >= from_line:
                    yield number, line
                number += 1
            if position > before:
                continue  # there may be more; lines written meanwhile are read in the next turn
            if not follow or over:
                return
            await self._changed.setdefault(run_id, asyncio.Event()).wait()

    def _count(self, run_id: RunId) -> int:
        with suppress(FileNotFoundError), self._path(run_id).open("rb") as file:
            return sum(data.count(b"\n") for data in iter(lambda: file.read(READ_BYTES), b""))
        return 0

    def _skip(self, run_id: RunId, num_lines: int) -> tuple[int, int]:
        """Return a position in the log that is num_lines or fewer lines from the start, and the
        number of lines before that position."""
        position = number = 0
        with suppress(FileNotFoundError), self._path(run_id).open("rb") as file:
            while data := file.read(READ_BYTES):
                whole = data[: data.rfind(b"\n") + 1]
                num_here = whole.count(b"\n")
                if not whole or number + num_here > num_lines:
                    break
                position, number = position + len(whole), number + num_here
                file.seek(position)
        return position, number

    def _read(self, run_id: RunId, position: int) -> tuple[list[RunLogLine | None], int]:
        path = self._path(run_id)
        if not path.exists():
            return [], position
        with path.open("rb") as file:
            file.seek(position)
            data = file.read(READ_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        return [_line(raw) for raw in whole.split(b"\n")[:-1]], position + len(whole)

    def _path(self, run_id: RunId) -> Path:
        return self._root / f"{run_id}.jsonl"

    def _wake(self, run_id: RunId) -> None:
        event = self._changed.pop(run_id, None)
        if event is not None:
            event.set()


def _line(raw: bytes) -> RunLogLine | None:
    """Parse a line; return None if a crash or a full disk has cut it off, or has joined it to a
    line that was cut off."""
    try:
        return RunLogLine(**json.loads(raw))
    except (ValueError, TypeError):
        return None


# ---- Identifiers ----
#
# A log line or a span carries these identifiers of its effect or fact.

_NAMES = (("party", "party"), ("segment", "segment"), ("round", "round_num"))


def ids_of(run_id: RunId, thing: object) -> dict[str, Any]:
    """Return the identifiers that an effect or fact has: run_id, party, segment or round,
    worker_id, and population member."""
    ids: dict[str, Any] = {} if run_id == CLUSTER else {"run_id": run_id}
    for key, name in _NAMES:
        value = getattr(thing, name, None)
        if value is not None:
            ids[key] = value
    member = getattr(thing, "member", None)
    if isinstance(member, Member):
        ids["worker_id"] = member.worker_id
    elif member is not None:
        ids["member"] = member
    return ids
