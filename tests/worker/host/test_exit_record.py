"""What a worker process leaves for the next one of its name, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.worker.host.exit_record import MAX_FRAMES, MAX_LINES, LastWords, check_previous_exit

DYING = """
import ctypes, os, sys
from pathlib import Path
from stratagem.worker.host.exit_record import LastWords
words = LastWords(Path(sys.argv[1]), "w", "first")
words.explain_faults()
words.registered()
with words.at("run-0", ""):
    words.line("of another run")
with words.at("run-1", "client3"):
    for number in range(5000):
        words.step(number)
        words.line(f"line {number} \\x1b[2J")
    {end}
"""


def ended(folder: Path, end: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", DYING.replace("{end}", end), str(folder)])


def test_sigkill_takes_nothing_of_it_and_only_its_owner_may_read_it(
    tmp_path: Path,
) -> None:
    """It holds what the code of jobs has printed."""
    (tmp_path / "w.last-words").touch(0o644)  # of an earlier version
    assert ended(tmp_path, "os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"w.last-words": 0o600, "w.fault": 0o600}
    told = LastWords(tmp_path, "w", "second").previous
    assert (told.incarnation, told.knows_work, told.stopped) == ("first", True, False)
    assert (told.session.run_id, told.session.party, told.step) == ("run-1", "client3", 4999)
    assert list(told.last_lines) == [f"line {n}  [2J" for n in range(5000 - MAX_LINES, 5000)]
    assert not told.HasField("status")


def test_a_fault_names_its_signal_without_a_supervisor_and_a_few_frames(tmp_path: Path) -> None:
    calls = "chr(10).join(f'def f{n}(): f{n + 1}()' for n in range(30))"
    deep = f"exec({calls} + chr(10) + 'def f30(): ctypes.string_at(0)'); f0()"
    assert ended(tmp_path, deep).returncode == -signal.SIGSEGV
    told = LastWords(tmp_path, "w", "second").previous
    assert told.status == -signal.SIGSEGV
    at = list(told.last_lines).index("Fatal Python error: Segmentation fault")
    assert len(told.last_lines) == MAX_LINES
    own, library, caller, *others = told.last_lines[at + 1 :]
    assert own.startswith('File "<string>", line ')  # the user's frame first
    assert own.endswith("in f30")
    assert "ctypes" in library
    assert caller.endswith("in f29")
    assert len(others) == MAX_FRAMES - 3


@pytest.mark.parametrize("is_there", [False, True])
def test_without_a_folder_that_takes_files_nothing_is_kept(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "data"
    folder.write_text("a file")
    words = LastWords(folder if is_there else None, "w", "first")
    words.explain_faults()
    words.registered()
    with words.at("run-1", ""):
        words.step(1)
        words.line("kept nowhere")
    words.stopped()
    assert words.previous.incarnation == ""


def test_who_executed_nothing_says_so_and_who_was_stopped_too(tmp_path: Path) -> None:
    """And who ended before it registered has taken nobody's place."""
    words = LastWords(tmp_path, "w", "first")
    words.registered()
    file = os.open(tmp_path / "w.last-words", os.O_RDONLY)
    try:  # a disk that fills up later has room for all of it
        assert os.lseek(file, 0, os.SEEK_HOLE) == os.fstat(file).st_size
    finally:
        os.close(file)
    with words.at("run-1", ""):
        words.line("not of interest")
    told = LastWords(tmp_path, "w", "second").previous
    assert (told.knows_work, told.HasField("session"), list(told.last_lines)) == (True, False, [])
    words.stopped()
    third = LastWords(tmp_path, "w", "third")
    assert (third.previous.incarnation, third.previous.stopped) == ("first", True)
    third.registered()
    assert LastWords(tmp_path, "w", "fourth").previous.incarnation == "third"


@pytest.mark.parametrize(
    ("said", "status", "is_stopped"),
    [
        ("{pid}:3", 3, False),
        ("{pid}:-9", -9, False),
        ("137", -9, False),  # as a shell says it
        ("200", 200, False),
        ("{pid}:stopped", None, True),
        ("1{pid}:3", None, False),  # of another process
        ("", None, False),
    ],
)
def test_a_supervisor_adds_to_it(
    tmp_path: Path, said: str, status: int | None, is_stopped: bool
) -> None:
    LastWords(tmp_path, "w", "first").registered()
    told = LastWords(tmp_path, "w", "second", said.format(pid=os.getpid())).previous
    assert (told.status if told.HasField("status") else None) == status
    assert told.stopped == is_stopped


def test_what_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    for content in (b"", b"lastwrd1", b"\0" * 16384, b"x" * 100):
        (tmp_path / "w.last-words").write_bytes(content)
        assert LastWords(tmp_path, "w", "second", "3").previous.incarnation == ""


def test_a_supervisor_that_says_something_else_is_told() -> None:
    for value in ("", "3", "-9", "12:-9", "12:stopped", "stopped"):
        assert check_previous_exit(value) == value
    with pytest.raises(ValueError, match=r"'dead' is neither \[PID:\]STATUS nor \[PID:\]stopped"):
        check_previous_exit("dead")
