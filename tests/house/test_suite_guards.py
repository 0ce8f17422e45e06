"""What watches over the tests themselves: what they leave behind, and what they may cost."""

import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cpu_budget import Measured, excesses
from tests.left_behind import LeftBehind

STAYS = "import sys; print(flush=True); sys.stdin.read()"


def ended(guard: LeftBehind) -> pytest.ExitCode:
    """The exit code of tests that have passed, after a guard has looked."""
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    steps = guard.pytest_sessionfinish(session)
    next(steps)
    assert next(steps, None) is None
    return pytest.ExitCode(session.exitstatus)


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> LeftBehind:
    monkeypatch.setenv("TMPDIR", os.environ.get("TMPDIR", tempfile.gettempdir()))
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    return LeftBehind(patience_s=0.0)


def test_tests_that_leave_nothing_pass(guard: LeftBehind) -> None:
    with tempfile.TemporaryDirectory():
        pass
    assert ended(guard) is pytest.ExitCode.OK
    assert not os.path.exists(tempfile.gettempdir())


def test_a_process_and_a_file_that_stay_are_named_and_go(
    guard: LeftBehind, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tempfile.mkdtemp()
    with subprocess.Popen(
        [sys.executable, "-c", STAYS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        assert ended(guard) is pytest.ExitCode.TESTS_FAILED
        process.wait()
    said = capsys.readouterr().out
    assert f"process {process.pid}:" in said
    assert os.path.basename(folder) in said
    assert not os.path.exists(folder)


def test_only_what_is_above_its_budget_is_named() -> None:
    rows = [Measured(9.0, 9.0, f"tests/a/b/test_x.py::test_{i}") for i in range(2)]
    rows.append(Measured(1.0, 9.0, "tests/a/c/test_y.py::test_0"))
    long = {rows[0].name: "it compiles"}
    assert [each.partition(":")[0] for each in excesses(rows, {}, long, 1.0)] == [
        "a/b",
        "tests/a/b/test_x.py",
    ]
    assert excesses(rows, {"a/b": 18.0}, long | {rows[1].name: "it compiles too"}, 1.0) == []
    assert excesses(rows, {"a/b": 4.5}, long, 4.0) == []
    gone = f"{rows[0].name} is listed and there is none"
    assert excesses(rows[1:], {"a/b": 9.0}, long, 9.0) == [gone]
    assert excesses(rows[2:], {}, long, 9.0) == [], "its file is not run"
    assert excesses(rows, {"a/b": 18.0}, {"tests/a/b/": "they compile"}, 1.0) == []
