"""A command on another day: its processes agree on the date, and waits end when they would."""

import shutil
import subprocess
import sys

import pytest

from tests.repository import ROOT

HOUR_S, DAY_S = 3600.0, 86400.0
CHILD = """
import threading, time
time.sleep(0.01)
threading.Event().wait(0.01)
print(time.time(), time.monotonic(), time.strftime("%z"))
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"


def told(days: int) -> tuple[float, float, str]:
    """What a process of a process says: the time of both clocks, and how far its zone is off."""
    command = [sys.executable, "-m", "tests.elsewhere", f"--days={days}", "--zone=Asia/Kathmandu"]
    output = subprocess.check_output([*command, sys.executable, "-c", PARENT], cwd=ROOT, text=True)
    wall_s, monotonic_s, zone = output.split()
    return float(wall_s), float(monotonic_s), zone


@pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="a clock is moved by a C compiler"
)
@pytest.mark.parametrize("days", [3, -400])
def test_the_wall_clock_alone_is_moved_for_all_processes(days: int) -> None:
    here, there = told(0), told(days)
    assert abs(there[0] - here[0] - days * DAY_S) < HOUR_S
    assert abs(there[1] - here[1]) < HOUR_S
    assert {here[2], there[2]} == {"+0545"}
