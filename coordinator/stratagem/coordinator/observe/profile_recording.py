"""One recording of a worker's profile: validated as it is parsed, and stored as a file.

What a worker sends is compressed JSON, {"base_ns": ..., "events": [[name, category, begin_us,
duration_us, thread], ...]}, and may be anything: sixty kilobytes unpack to as many megabytes, and a
JSON parser that is given these holds the interpreter for seconds. So no more is unpacked than a
limit, and rows are parsed one by one, each of a bounded length.

A file is one line of JSON, the head, followed by the events as they came.
"""

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from stratagem.common.base.text import printable
from stratagem.v1 import worker_pb2

MAX_EVENT_BYTES: Final = 16 * 2**20
"""Limit of the unpacked size; our workers record 20,000 events, of about 100 bytes each."""
MAX_ROWS: Final = 32_768
MAX_ROW_CHARS: Final = 4096
MAX_NAME_CHARS: Final = 256
_HEAD: Final = re.compile(r'\s*\{\s*"base_ns"\s*:\s*(-?\d{1,20})\s*,\s*"events"\s*:\s*\[\s*')
_NEXT: Final = re.compile(r"\s*,\s*")
_END: Final = re.compile(r"\s*\]\s*\}\s*")

Row = tuple[str, str, float, float, int | str]
"""Name, category, begin and duration in microseconds, thread."""


class UnreadableError(Exception):
    """A recording is not of the form that workers of this project send."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording with its origin; `events` is compressed, and empty where only the head was
    read."""

    worker_id: str
    party: str
    segment: int
    device_name: str
    clock_error_s: float | None
    base_ns: int
    num_bytes: int
    """Size of the events, unpacked."""
    events: bytes = b""

    @classmethod
    def of(cls, profile: worker_pb2.Profile) -> Self:
        """Return the recording of a message, checked to be readable. Raises UnreadableError."""
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
        """Read a recording from a file, without the events."""
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
        """Return True if a file has the form that is written here."""
        try:
            Recording.head_in(path)
        except (OSError, ValueError, TypeError):  # deleted meanwhile; or a power cut has damaged it
            return False
        return True

    def packed(self) -> bytes:
        """Return the content of the recording's file."""
        head = {key: value for key, value in asdict(self).items() if key != "events"}
        return json.dumps(head).encode() + b"\n" + self.events

    def rows(self) -> Iterator[Row]:
        """Yield the events, in order."""
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
    """Parse each row by itself, so that other threads get their turn between two rows."""
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
