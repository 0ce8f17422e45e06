"""Runs a piece of Python in a process of its own, for tests that kill, freeze or starve it."""

import os
import subprocess
import sys
from pathlib import Path

PREAMBLE = """
import os, resource, signal, sys
from pathlib import Path
"""


def start(code: str, *arguments: object, failpoints: Path | None = None) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if failpoints is not None:
        environment["STRATAGEM_FAILPOINTS"] = str(failpoints)
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(code: str, *arguments: object, failpoints: Path | None = None) -> tuple[int, str]:
    """The exit status, and what it printed."""
    with start(code, *arguments, failpoints=failpoints) as process:
        out, err = process.communicate()
    if process.returncode not in (0, 137):
        raise AssertionError(err)
    return process.returncode, out
