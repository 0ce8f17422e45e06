"""Runs a piece of Python in a process of its own, for tests that kill, freeze or starve it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from stratagem.common.process import preloaded_programs
from tests.repository import ROOT

PREAMBLE = """
import os, resource, signal, sys
from pathlib import Path
"""


def _environment(failpoints: Path | None) -> dict[str, str]:
    armed = {} if failpoints is None else {"STRATAGEM_FAILPOINTS": str(failpoints)}
    return {**os.environ, **armed}


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, *arguments: object, failpoints: Path | None = None) -> tuple[int, str]:
    """The exit status, and what it printed; a fork of a process that has imported all it needs."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as log:
        file, out = Path(name, "program.py"), Path(name, "out")
        begin = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        begin += f"sys.stdout = open({str(out)!r}, 'w')\n"
        file.write_text(f"{begin}{PREAMBLE}{code}\nsys.stdout.flush()\n")
        argv = [sys.executable, str(file), *map(str, arguments)]
        process = preloaded_programs.start(argv, _environment(failpoints), log, with_input=False)
        status = process.wait()
        if status not in (0, 137):
            log.seek(0)
            raise AssertionError(log.read().decode())
        return status, out.read_text()
