"""End a process: at once on a signal before it has anything to clean up; later without the slow
destruction of the interpreter.

Linux ignores a SIGTERM to the first process of a container unless the process has a handler, and
ours install their handlers only once they serve: after the import of torch, or when they lead. The
destruction of an interpreter with torch costs 0.3 s of CPU time, and in a fork 1.3 s if objects
frozen by `gc.freeze` are unfrozen before. If they are not, libraries that count the remaining
objects (nanobind does, under torch 2.15) report leaks.
"""

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Final, NoReturn

PREEMPTED: Final = 75
"""The exit status of a launched worker that a signal ended while it was needed (EX_TEMPFAIL); the
launcher starts it again."""

MISTAKEN: Final = 2
"""The exit status of a program that was started with an invalid option or setting."""

_libc: Final = ctypes.CDLL(None)  # loaded once, so that a fork has it


def leave_on(*numbers: signal.Signals, status: int = 0) -> None:
    """Make these signals end the process at once with this status, until handlers replace this."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(status)  # an orderly exit would wait for the thread that is waiting for the lead

    for number in numbers:
        signal.signal(number, leave)


def end(status: int) -> NoReturn:
    """Exit as Python does, but without deleting objects: threads end, `atexit` functions are
    called, and buffered output is written."""
    threading._shutdown()  # type: ignore[attr-defined]  # as forks of multiprocessing end
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr, *gc.get_objects()):
        if issubclass(type(file), io.IOBase):
            with suppress(Exception):  # it, or the file below it, is closed
                file.flush()
    _libc.fflush(None)
    os._exit(status)
