"""The page's scripts: few enough to be read, and of the types that they say."""

import shutil
import subprocess
from pathlib import Path

import pytest

from stratagem.client.dashboard.app import STATIC
from tests.client.dashboard.page_tabs import tool
from tests.patience import PATIENCE_S

MAX_LINES = 1500


def test_they_can_be_read() -> None:
    scripts = list(STATIC.glob("*.js"))
    assert sum(len(path.read_text().splitlines()) for path in scripts) <= MAX_LINES


@pytest.mark.browser
def test_their_types_hold() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not here, which tsc needs")
    project = str(Path(__file__).with_name("page_tools"))
    command = [node, tool("typescript/bin/tsc"), "--project", project]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "")
