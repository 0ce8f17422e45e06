"""A process that ends without taking its interpreter apart leaves what any other leaves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, ctypes, sys, threading
from stratagem.common.process.process_exit import end

file, closed = open("left-open", "w"), open("closed", "w")
file.write("in the file\\n")
closed.close()
is_last = threading.Event()

def outlive_the_program():
    is_last.wait()
    print("in a thread")

threading.Thread(target=outlive_the_program).start()
atexit.register(print, "at the end, and last")
atexit.register(print, "at the end")
print("in the program")
ctypes.CDLL(None).printf(b"in C\\n")
is_last.set()
"""


@pytest.mark.parametrize("last", ["sys.exit(3)", "end(3)"])
def test_all_that_was_said_and_written_is_there(last: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM + last)
    buffered = {name: each for name, each in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=buffered, stdout=log, stderr=log
        )
    assert done.returncode == 3
    said = (tmp_path / "log").read_text().splitlines()
    said.remove("in C")  # when its buffer is written is its own affair
    assert said == ["in the program", "in a thread", "at the end", "at the end, and last"]
    assert (tmp_path / "left-open").read_text() == "in the file\n"
