"""Whatever a coordinator says, or somebody has written there: nothing moves in a terminal."""

import io
from dataclasses import replace

import pytest
from rich.table import Table
from rich.text import Text

from stratagem.client.cli.shared import PlainConsole, complain, print_line
from stratagem.client.course.views import Phase, Progress
from stratagem.client.terminal.followed import FollowedRun
from stratagem.client.terminal.line import live_line, milestone
from stratagem.common.base.text import is_printable, printable
from tests.client.terminal.items import finished
from tests.odd_texts import MOVING, ODD_TEXTS

WILD = "a\x1b[2J\x1b]0;title\x07\rb\u202ec\x9b1A\x00d"
TAME = "a\\x1b[2J\\x1b]0;title\\x07\\x0db\\x202ec\\x9b1A\\x00d"


def test_control_characters_are_written_out_and_lines_stay() -> None:
    assert printable(WILD) == TAME
    assert printable("one\n\ttwo\r\nthree") == "one\n\ttwo\nthree"
    assert printable("one\n\ttwo", is_line=True) == "one\\x0a\\x09two"
    assert printable("\x1b[1;31mred\x1b[0m") == "red"
    assert printable("ä 漢 🧨") == "ä 漢 🧨"
    assert is_printable("ä 漢 🧨")
    assert not is_printable(WILD)
    assert not is_printable("one\ntwo")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_console_shows_nothing_that_moves(is_terminal: bool) -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=is_terminal, width=400, color_system=None)
    print_line(console, WILD)
    console.print(Text.assemble(("name", "bold"), WILD))
    console.print(WILD, markup=False)
    table = Table("column")
    table.add_row(WILD)
    console.print(table)
    console.print(live_line(FollowedRun("run", sentence=WILD), 390), end="", soft_wrap=True)
    shown = out.getvalue()
    for moving in ("\x1b[2J", "\x1b]", "\x07", "\u202e", "\x9b", "\x00"):
        assert moving not in shown
    assert shown.count("\\x1b[2J\\x1b]0;title") >= 4  # a cell of a table may be cut


@pytest.mark.parametrize("odd", ODD_TEXTS.values(), ids=ODD_TEXTS)
def test_odd_text_is_in_lines_that_nothing_moves(
    odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=400, color_system=None)
    run = FollowedRun("run", name=odd, strategy="Local", metrics={odd: 0.5}, num_steps=10)
    measured = Progress(5, 10, 0.5, 1.0, 0, 0, 1, 2, "", metrics={odd: 0.25}, reason="")
    for item in (finished(1, metrics={f"test.{odd}": 0.5}), measured):
        run.update(item)
        live = live_line(run, 390).plain
        assert is_printable(live)
        print_line(console, live)
    told = milestone(Phase.RUNNING, run, finished(1, metrics={f"test.{odd}": 0.5}))
    assert told is not None
    for text in (told.text, odd):
        print_line(console, text)
        complain(text)
    console.print(live_line(replace(run, phase=Phase.PLACING, sentence=odd), 390), soft_wrap=True)
    assert not MOVING.search(out.getvalue() + capsys.readouterr().err)


def test_complaints_show_nothing_that_moves(capsys: pytest.CaptureFixture[str]) -> None:
    complain(WILD)
    assert capsys.readouterr().err == f"{TAME}\n"
