"""A line at the bottom of a terminal that is drawn again and again, with other output above it.

Owns how it is erased. A terminal that becomes narrower folds the line that is there into several;
all of them are erased, as many as the cells that were drawn need at the new width.
"""

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

INTERVAL_S: Final = 0.1
"""The line is drawn at most this often; a new width is seen as fast."""


class RedrawnLine:
    """Shows what `line(width)` returns, from entering to leaving the context.

    Thread-safe. What is written to stderr meanwhile stands above it, where that is a terminal.
    """

    def __init__(self, console: Console, line: Callable[[int], Text]) -> None:
        self._console, self._line = console, line
        self._lock = threading.RLock()
        self._is_stale = True
        self._cells = self._width = 0
        """What is on the screen now."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_drawing, name="line", daemon=True)
        self._stderr = sys.stderr

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Draw the line again soon; not while what it is made of changes."""
        with self._lock:
            yield
            self._is_stale = True

    def say(self, text: Text) -> None:
        """Print above the line."""
        with self._lock, self._console:
            self._erase()
            self._console.print(text, soft_wrap=True)
            self._draw()

    def erase(self) -> None:
        """Leave nothing of the line."""
        with self._lock, self._console:
            self._erase()

    def __enter__(self) -> Self:
        if self._stderr.isatty():
            sys.stderr = _Above(self)
        self.redraw()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if isinstance(sys.stderr, _Above):
            sys.stderr.flush()
            sys.stderr = self._stderr
        self.erase()

    def _keep_drawing(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            if self._is_stale or self._console.width != self._width:
                self.redraw()

    def redraw(self) -> None:
        """Draw the line as it is now, in the place of the one that is there."""
        with self._lock, self._console:
            self._erase()
            self._draw()

    def _draw(self) -> None:
        self._is_stale, self._width = False, self._console.width
        # A line of the full width would leave the cursor where terminals differ.
        line = self._line(self._width - 1)
        self._console.print(line, end="", soft_wrap=True)
        self._cells = line.cell_len

    def _erase(self) -> None:
        num_lines = max(1, -(-self._cells // self._console.width))
        whole_line = (ControlType.ERASE_IN_LINE, 2)
        above = [(ControlType.CURSOR_UP, 1), whole_line] * (num_lines - 1)
        self._console.control(Control(ControlType.CARRIAGE_RETURN, whole_line, *above))
        self._cells = 0


class _Above(io.TextIOBase):
    """A stderr whose lines stand above a line."""

    def __init__(self, line: RedrawnLine) -> None:
        self._line, self._rest = line, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for each in lines:
            self._line.say(Text(each))
        return len(text)

    def flush(self) -> None:
        """Print what has no end of line yet."""
        rest, self._rest = self._rest, ""
        if rest:
            self._line.say(Text(rest))

    def isatty(self) -> bool:
        return True
