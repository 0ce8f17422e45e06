"""The Triton programs compile for GPUs, here too, and into nothing that would cost equal bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S


@pytest.mark.sweep
def test_programs_compile(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_all.py"))],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {
        f"{name}_program"
        for name in (
            *("sign", "quantise", "unpack", "magnitude", "dot", "tree", "sketch", "unsketch"),
        )
    }
    # No atomic operation, whose order is the device's, and no contracted product and sum.
    assert [line for line in lines if len(line) > 3] == []
