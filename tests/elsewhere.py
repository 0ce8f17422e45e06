"""Runs a command on another day, in another time zone and locale: `make elsewhere`, for tests.

Their verdicts depend on none of these. `tests/endurance/wall_clock.c` moves the wall clock of every
process of the command and nothing else. libfaketime 0.9.10 is no choice: it moves the monotonic
clock too, but not the waits of Python's locks until a time of it, which then last for years; with
DONT_FAKE_MONOTONIC=1 it still moves the end of `time.sleep`, which fails.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest

from tests.endurance.wall_clocks import WallClocks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.elsewhere", description=__doc__)
    parser.add_argument("--days", type=float, default=1.0, help="how far the clock is ahead")
    # 12:45 or 13:45 ahead of UTC: another day for most hours, and minutes of its own.
    parser.add_argument("--zone", default="Pacific/Chatham")
    parser.add_argument("--locale", default="C")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="such as: make test")
    given = parser.parse_args()
    if not given.command:
        parser.error("no command is given; allowed: a program and its arguments")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # a server of another user has this clock, too
        try:
            clocks = WallClocks(folder)
        except pytest.skip.Exception as error:
            sys.exit(str(error))
        moved = clocks.environment_of("all")
        clocks.move(timedelta(days=given.days).total_seconds(), "all")
        place = {"TZ": given.zone, "LC_ALL": given.locale}
        return subprocess.call(given.command, env={**os.environ, **moved, **place})


if __name__ == "__main__":
    sys.exit(main())
