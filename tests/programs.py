"""Runs a piece of Python in a process of its own, for tests that kill, freeze or starve it.

It is a fork of a process that has imported all that it needs.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stratagem.common.process import template
from stratagem.common.process.template import Process
from tests.repository import ROOT

PREAMBLE = f"""
import os, resource, signal, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
"""


def _start(
    folder: Path, code: str, arguments: tuple[object, ...], log: IO[bytes], **how: str
) -> Process:
    file = folder / "program.py"
    file.write_text(PREAMBLE + code)
    argv = [sys.executable, str(file), *map(str, arguments)]
    return template.start(argv, {**os.environ, **how}, log, with_input=True)


@contextmanager
def conversation(code: str, *arguments: object) -> Iterator[tuple[int, Callable[[str], str]]]:
    """The process of a program that answers each line with a line, and who asks it; at the end it
    has no more to read."""
    answers, log = os.pipe()
    with tempfile.TemporaryDirectory() as name, os.fdopen(answers) as lines:
        with os.fdopen(log, "wb") as file:
            process = _start(Path(name), code, arguments, file)
        assert process.stdin is not None

        def ask(line: str) -> str:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()
            return lines.readline().strip()

        with process.stdin:
            yield process.pid, ask
        assert process.wait() == 0


def run(code: str, *arguments: object, failpoints: Path | None = None) -> tuple[int, str]:
    """The exit status, and what it printed."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as log:
        out = Path(name, "out")
        code = f"sys.stdout = open({str(out)!r}, 'w')\n{code}\nsys.stdout.flush()\n"
        armed = {} if failpoints is None else {"STRATAGEM_FAILPOINTS": str(failpoints)}
        process = _start(Path(name), code, arguments, log, **armed)
        assert process.stdin is not None
        process.stdin.close()
        status = process.wait()
        if status not in (0, 137):
            log.seek(0)
            raise AssertionError(log.read().decode())
        return status, out.read_text()
