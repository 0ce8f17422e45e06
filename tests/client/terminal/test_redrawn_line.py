"""The line that redraws itself leaves nothing behind, whatever becomes of the terminal's width."""

import io
import re
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from stratagem.client.cli.shared import PlainConsole
from stratagem.client.terminal.line import RedrawnLine
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.core


class Screen(io.StringIO):
    """A terminal that folds long lines, and folds them anew when its width changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.rows: list[str] = [""]
        self.goes_on: list[bool] = [False]
        """By row: the next one belongs to the same line."""
        self.row = self.column = 0

    def isatty(self) -> bool:
        return True

    def resize(self, width: int) -> None:
        lines, cursor = [""], (0, 0)
        for number, (row, goes_on) in enumerate(zip(self.rows, self.goes_on, strict=True)):
            if number == self.row:
                cursor = len(lines) - 1, len(lines[-1]) + self.column
            lines[-1] += row
            lines += [] if goes_on else [""]
        self.width, self.rows, self.goes_on = width, [], []
        for number, line in enumerate(lines[:-1]):
            folded = [line[at : at + width] for at in range(0, max(len(line), 1), width)]
            if number == cursor[0]:
                below = min(cursor[1] // width, len(folded) - 1)
                self.row, self.column = len(self.rows) + below, cursor[1] - below * width
            self.rows += folded
            self.goes_on += [True] * (len(folded) - 1) + [False]

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|[^\x1b]", text):
            match part:
                case "\n":
                    self._next_row(goes_on=False)
                case "\r":
                    self.column = 0
                case "\x1b[1A":
                    self.row -= 1
                case "\x1b[2K":
                    self.rows[self.row], self.goes_on[self.row] = "", False
                case _:
                    assert len(part) == 1, f"{part!r} is not known"
                    self._put(part)
        return len(text)

    def _put(self, character: str) -> None:
        if self.column == self.width:
            self._next_row(goes_on=True)
        row = self.rows[self.row]
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += 1

    def _next_row(self, *, goes_on: bool) -> None:
        self.goes_on[self.row] = goes_on
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append("")
            self.goes_on.append(False)

    @property
    def lines(self) -> list[str]:
        """What stands there, without empty rows at its end."""
        lines = [""]
        for row, goes_on in zip(self.rows, self.goes_on, strict=True):
            lines[-1] += row
            lines += [] if goes_on else [""]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def console_of(screen: Screen) -> PlainConsole:
    return PlainConsole(
        file=screen, force_terminal=True, color_system=None, highlight=False, width=screen.width
    )


def line_of(text: str) -> Callable[[int], Text]:
    return lambda width: Text(text[:width])


@settings(max_examples=40)
@given(
    widths=st.lists(st.integers(20, 120), min_size=1, max_size=8),
    lengths=st.lists(st.integers(0, 130), min_size=8, max_size=8),
)
def test_whatever_the_widths_nothing_is_left_and_nothing_lost(
    widths: list[int], lengths: list[int]
) -> None:
    screen = Screen(widths[0])
    console = console_of(screen)
    console.print("before", soft_wrap=True)
    shown = ["before"]
    drawn = iter([*lengths, 0])
    line = RedrawnLine(console, lambda width: Text("x" * min(next(drawn), width)))
    line.redraw()
    for width in widths[1:]:
        screen.resize(width)
        console.width = width
        shown.append(f"said at {width}")
        line.say(Text(shown[-1]))
        assert screen.lines[: len(shown)] == shown
        assert all(len(each) < width for each in screen.lines)
        assert len(screen.lines) <= len(shown) + 1
    screen.resize(widths[0])
    console.width = widths[0]
    line.erase()
    assert screen.lines == shown


def test_what_others_write_stands_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(40)
    monkeypatch.setattr(sys, "stderr", screen)
    console = console_of(screen)
    with RedrawnLine(console, line_of("digits  61 %")):
        print("error: a", file=sys.stderr)
        print("half", end="", file=sys.stderr)
        assert screen.lines == ["error: a", "digits  61 %"]
    assert screen.lines == ["error: a", "half"]
    assert sys.stderr is screen


def test_it_is_drawn_again_when_the_run_or_the_width_has_changed() -> None:
    screen, texts = Screen(60), ["a"]
    drawn = threading.Event()

    def line(width: int) -> Text:
        if (texts[0], width) in (("b", 59), ("b", 29)):
            drawn.set()
        return Text(texts[0])

    console = console_of(screen)
    with RedrawnLine(console, line) as redrawn:
        with redrawn.changing():
            texts[0] = "b"
        assert drawn.wait(PATIENCE_S)
        drawn.clear()
        console.width = 30
        assert drawn.wait(PATIENCE_S)
    assert screen.lines == []
