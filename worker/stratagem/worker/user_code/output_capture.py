"""Captures what the user's code prints and logs in the torch thread, line by line.

Owns the proxies that stand in for sys.stdout and sys.stderr. They pass everything through to the
real streams, and give complete lines to the sink of the thread that wrote them. Other threads,
and the worker's own log lines, have no sink and stay out. Knows nothing of runs or gRPC.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

Sink = Callable[[str, str], None]
"""Takes a level ("PRINT", "ERROR", "DEBUG" to "CRITICAL") and one line of text."""

MAX_LINE_CHARS: Final = 16_384
_OWN_LOGGERS: Final = "stratagem"


class _PerThread(threading.local):
    """The sink of this thread, and what it has written since its last line end."""

    def __init__(self) -> None:
        self.sink: Sink | None = None
        self.partial: dict[str, str] = {}


_here = _PerThread()


class _Tee:
    """A text stream that also gives the lines of threads with a sink to that sink."""

    def __init__(self, stream: TextIO, level: str) -> None:
        self._stream = stream
        self._level = level

    def write(self, text: str) -> int:
        if _here.sink is not None:
            self._collect(text, _here.sink)
        return self._stream.write(text)

    def _collect(self, text: str, sink: Sink) -> None:
        *lines, rest = (_here.partial.get(self._level, "") + text).split("\n")
        for line in lines:
            sink(self._level, line[:MAX_LINE_CHARS])
        _here.partial[self._level] = rest[:MAX_LINE_CHARS]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Records(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sink = _here.sink
        if sink is None or record.name.split(".")[0] == _OWN_LOGGERS:
            return
        for line in record.getMessage().splitlines():
            sink(record.levelname, line[:MAX_LINE_CHARS])


@contextmanager
def installed() -> Iterator[None]:
    """Put the proxies in place for this process; call after the process's logging is set up."""
    real_out, real_err, records = sys.stdout, sys.stderr, _Records()
    sys.stdout, sys.stderr = _Tee(real_out, "PRINT"), _Tee(real_err, "ERROR")
    logging.getLogger().addHandler(records)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(records)
        sys.stdout, sys.stderr = real_out, real_err


def pass_on(level: str, text: str) -> None:
    """Give a line, which another process has captured, to the sink of this thread."""
    if _here.sink is not None:
        _here.sink(level, text[:MAX_LINE_CHARS])


@contextmanager
def to(sink: Sink) -> Iterator[None]:
    """Give what this thread prints and logs inside the `with` to the sink."""
    _here.sink = sink
    try:
        yield
    finally:
        for level, rest in _here.partial.items():
            if rest:
                sink(level, rest)
        _here.partial.clear()
        _here.sink = None
