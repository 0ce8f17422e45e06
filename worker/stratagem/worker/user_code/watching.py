"""Watch the user's code: changes of its modules on disk, and its output and logs."""

import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

# ---- Changed modules ----
#
# An imported module stays the same as long as its process lives, so after a change of its file a
# job runs code that is in no file any more. The state of a file is recorded when this module first
# sees it, right after the import of an entry point; a file that was only touched has not changed.

MAX_SEEN: Final = 4096
"""Maximum number of watched modules."""
_OURS: Final = "stratagem"
MAX_BYTES: Final = 4 * 1024 * 1024
"""Maximum size of compared files."""


@dataclass(frozen=True, slots=True)
class _SeenFile:
    """The recorded state of a module's file."""

    path: str
    stamp: tuple[int, int]
    """(time of the last change in nanoseconds, size)."""
    digest: bytes


_BEFORE: Final = frozenset(sys.modules)
"""Names of modules that were imported before this one, and so before any code of a user. To look at
them costs a fork a copy of their memory."""
_seen: dict[str, _SeenFile] = {}
"""The recorded files, keyed by module name. Used by one thread."""
_passed_over: dict[tuple[str, ...], set[str]] = {}
"""Modules outside of these folders, keyed by the folders: thousands, so later searches skip
them."""


def see_modules(folders: Iterable[str | Path]) -> None:
    """Record the files of imported modules in these folders.

    Installed packages are left out, even inside the folders, since a new version needs a restart.
    """
    kinds = (Path(folder) for folder in folders)
    places = tuple(f"{root}/" for folder in kinds for root in {folder.absolute(), folder.resolve()})
    if not places:
        return
    passed_over = _passed_over.setdefault(places, set(_BEFORE))
    for name in set(sys.modules).difference(passed_over, _seen):
        path = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        # attributes are not read, as some modules then import others
        if not isinstance(path, str) or not path.startswith(places) or _is_installed(name, path):
            passed_over.add(name)
        elif len(_seen) < MAX_SEEN and (seen := _looked_at(path)) is not None:
            _seen[name] = seen


def changed_modules() -> Iterator[tuple[str, str]]:
    """Yield (name, path) of each module whose file was changed or removed."""
    for name, seen in sorted(_seen.items()):
        if _stamp(seen.path) == seen.stamp:
            continue
        now = _looked_at(seen.path)
        if now is None or now.digest != seen.digest:
            yield name, seen.path
        else:
            _seen[name] = now


def _is_installed(name: str, path: str) -> bool:
    is_ours = name.partition(".")[0] == _OURS
    return is_ours or "/site-packages/" in path or path.startswith(f"{sys.prefix}/")


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _looked_at(path: str) -> _SeenFile | None:
    stamp = _stamp(path)
    if stamp is None or stamp[1] > MAX_BYTES:
        return None
    try:
        return _SeenFile(path, stamp, hashlib.sha256(Path(path).read_bytes()).digest())
    except OSError:
        return None


# ---- Captured output ----
#
# Proxies replace sys.stdout and sys.stderr. They pass everything to the real streams, and complete
# lines to the sink of the writing thread. Other threads, and the worker's log lines, have no sink
# and are not captured.

Sink = Callable[[str, str], None]
"""Takes a level ("PRINT", "ERROR", "DEBUG" to "CRITICAL") and one line of text."""

MAX_LINE_CHARS: Final = 16_384
_OWN_LOGGERS: Final = "stratagem"


class _PerThread(threading.local):
    """The sink of this thread, and its unfinished line of output."""

    def __init__(self) -> None:
        self.sink: Sink | None = None
        self.partial: dict[str, str] = {}


_here = _PerThread()


class _Tee:
    """Text stream that passes lines also to the sink of the writing thread, if it has one."""

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
    """Context manager that also passes each thread's output and logs to its sink. Enter it after
    logging is set up."""
    real_out, real_err, records = sys.stdout, sys.stderr, _Records()
    sys.stdout, sys.stderr = _Tee(real_out, "PRINT"), _Tee(real_err, "ERROR")
    logging.getLogger().addHandler(records)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(records)
        sys.stdout, sys.stderr = real_out, real_err


def pass_on(level: str, text: str) -> None:
    """Pass a line captured by another process to this thread's sink."""
    if _here.sink is not None:
        _here.sink(level, text[:MAX_LINE_CHARS])


@contextmanager
def to(sink: Sink) -> Iterator[None]:
    """Context manager that passes this thread's output and logs to the sink."""
    _here.sink = sink
    try:
        yield
    finally:
        for level, rest in _here.partial.items():
            if rest:
                sink(level, rest)
        _here.partial.clear()
        _here.sink = None
