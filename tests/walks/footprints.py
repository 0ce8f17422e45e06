"""Writes down each function of the product at its first call, in all processes of a run.

Loaded by a `sitecustomize` of the processes that are followed, and so knows nothing of ours. A
process has a file of its own, with a line for each function: when, which file, which function. A
window is what happens between two calls of one function, such as a step: there each function counts
anew, and its lines have the name of the window.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO

PLACE = "/stratagem/"
SKIPPED = "/stratagem/v1/"


class Footprints:
    """The functions that one process has called."""

    def __init__(self, folder: Path, window: str, number: int) -> None:
        """Begin without footprints.

        window: the end of the qualified name of a function, of which the call of this number is
        one; or "BEGIN..END", two of them: from a call of the first to the next one of the second.
        """
        self._folder, self._number = folder, number
        self._first, _, self._last = window.partition("..")
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._seen = set[CodeType]()
        self._num_windows = 0
        self._inside: FrameType | None = None
        path = self._folder / f"{self._process}.txt"
        self._file: TextIO = path.open("a", buffering=1)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function of Python."""
        if event == "return" and frame is self._inside and not self._last:
            self._close()
            return
        if event != "call":
            return
        code = frame.f_code
        if PLACE not in code.co_filename or SKIPPED in code.co_filename:
            return
        if self._process != os.getpid():
            self._begin()
        opener = self._inside
        if opener is None and code.co_qualname.endswith(self._first):
            self._num_windows += 1
            self._inside = frame
            self._seen.clear()
        if code not in self._seen and not code.co_name.startswith("<") and not _imports(frame):
            self._seen.add(code)
            kind = "inside" if self._is_chosen() else "outside"
            at_s = time.monotonic()
            file = code.co_filename.rpartition(PLACE)[2]
            self._file.write(f"{at_s:.9f} {kind} {file} {code.co_qualname}\n")
        # A coroutine is called again each time that it goes on.
        is_other = opener is not None and opener is not frame
        if is_other and self._last and code.co_qualname.endswith(self._last):
            self._close()

    def _is_chosen(self) -> bool:
        return self._inside is not None and self._num_windows == self._number

    def _close(self) -> None:
        self._inside = None
        self._seen.clear()


def _imports(frame: FrameType | None) -> bool:
    """True where a module is being executed: what it calls then is no part of a walk."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and PLACE in frame.f_code.co_filename:
            return frame.f_globals.get("__name__") != "__main__"
        frame = frame.f_back
    return False


def follow(folder: Path, window: str, number: int) -> None:
    """Follow this process and its forks, in all of their threads."""
    footprints = Footprints(folder, window, number)
    threading.setprofile(footprints.note)
    sys.setprofile(footprints.note)
