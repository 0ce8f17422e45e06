"""Where a process can be told to die, and how often it passes there before it does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.common.process.failpoints import directory_of_this_process, failpoint

HIT = """
import sys
from stratagem.common.process.failpoints import failpoint
for count in range(int(sys.argv[1])):
    failpoint("coordinator.journal.before_commit")
    print(count, flush=True)
"""


def run(num_hits: int, failpoints: Path) -> tuple[int, str]:
    """The exit status of a process that passes there so often, and what it printed."""
    environment = {**os.environ, "STRATAGEM_FAILPOINTS": str(failpoints)}
    argv = [sys.executable, "-c", HIT, str(num_hits)]
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


@pytest.fixture(autouse=True)
def _reads_anew() -> Iterator[None]:
    directory_of_this_process.cache_clear()
    yield
    directory_of_this_process.cache_clear()


def test_nothing_happens_unless_armed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STRATAGEM_FAILPOINTS", raising=False)
    failpoint("coordinator.journal.before_commit")
    directory_of_this_process.cache_clear()
    monkeypatch.setenv("STRATAGEM_FAILPOINTS", str(tmp_path))
    failpoint("coordinator.journal.before_commit")
    with pytest.raises(AssertionError, match="not declared"):
        failpoint("coordinator.nowhere")


@pytest.mark.parametrize(("content", "survived"), [("", 0), ("2\n", 2)])
def test_the_process_dies_at_the_armed_hit(tmp_path: Path, content: str, survived: int) -> None:
    armed = tmp_path / "coordinator.journal.before_commit"
    armed.write_text(content)
    status, out = run(5, tmp_path)
    assert (status, len(out.split())) == (137, survived)
    assert not armed.exists()


def test_hits_are_counted_over_processes(tmp_path: Path) -> None:
    (tmp_path / "coordinator.journal.before_commit").write_text("3")
    assert run(2, tmp_path)[0] == 0
    assert run(2, tmp_path) == (137, "0\n")
