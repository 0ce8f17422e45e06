"""Ends a process: at once while it has nothing to put in order yet; later all is put in order, and
the interpreter is not taken apart.

Linux ignores a SIGTERM to the first process of a container unless the process has a handler, and
ours install theirs only once they serve: after the import of torch, or when they have the lead.

To take an interpreter with torch in it apart costs 0.3 s of a processor, and in a fork 1.3 s if
what was kept from collections (`gc.freeze`) is given back before. If it is not, libraries that
count what is left (nanobind's do, under torch 2.15) take it for leaks.
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
"""The exit status of a worker that a launcher started and a signal ended while it was wanted
(EX_TEMPFAIL of sysexits.h): its launcher starts it again."""

MISTAKEN: Final = 2
"""The exit status of a program that was started with a value that cannot be right."""

_libc: Final = ctypes.CDLL(None)  # loaded once, so that a fork has it


def leave_on(*numbers: signal.Signals, status: int = 0) -> None:
    """Make each of these signals end the process with this status, until it has a handler of its
    own."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(status)  # an orderly exit would wait for the thread that waits for the lead

    for number in numbers:
        signal.signal(number, leave)


def end(status: int) -> NoReturn:
    """End this process as Python does, but for the deletion of objects: threads end, functions that
    are registered with `atexit` are called, and what files still hold in memory is written."""
    threading._shutdown()  # type: ignore[attr-defined]  # as forks of multiprocessing end
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr, *gc.get_objects()):
        if issubclass(type(file), io.IOBase):
            with suppress(Exception):  # it is closed, or what it writes to is
                file.flush()
    _libc.fflush(None)
    os._exit(status)
