"""The server that the tests use leaves nothing behind when they are killed."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.rig import until
from tests.patience import PATIENCE_S
from tests.repository import ROOT

pytestmark = pytest.mark.sweep

STARTS = """
import json, sys
from tests.postgres import Postgres
with Postgres() as server:
    pid = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
    print(json.dumps([pid, str(server.folder)]), flush=True)
    sys.stdin.read()
"""


def test_it_ends_with_who_has_started_it() -> None:
    """In order it ends after all tests, which look for what is left behind (left_behind.py)."""
    command = [sys.executable, "-c", STARTS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as starter:
        assert starter.stdout is not None
        pid, folder = json.loads(starter.stdout.readline())
        server = os.pidfd_open(pid)
        starter.kill()
        starter.communicate()
    ended = select.poll()
    ended.register(server)
    assert ended.poll(1000 * PATIENCE_S)
    os.close(server)
    until(lambda: not Path(folder).exists(), "its folder is gone")
