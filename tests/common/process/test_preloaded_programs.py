"""Programs that are forks of a process which has imported them run as those started by exec."""

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from stratagem.common.process import template
from tests.patience import PATIENCE_S
from tests.repository import ROOT

REPORT = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv[1:], "word": os.environ.get("WORD"), "said": sys.stdin.read(),
    "others": sorted(set(os.environ) - {"WORD"}), "folder": os.getcwd(), "path": sys.path[0],
    "descriptors": len(os.listdir("/proc/self/fd")), "session": os.getsid(0) == os.getpid(),
    "preloaded": [name for name in ("torch", "wave") if name in sys.modules], "name": __name__,
}))
sys.exit(7)
"""
TORCH = ["torch"] if sys.platform == "linux" else []
WAIT = "import signal; print('waits', flush=True); signal.pause()"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="forks are Linux's")


def program(folder: Path, text: str) -> list[str]:
    file = folder / "program.py"
    file.write_text(text)
    return [sys.executable, str(file)]


def started(
    folder: Path, argv: list[str], environment: Mapping[str, str] = os.environ, text: bytes = b""
) -> template.Process:
    with (folder / "log").open("ab") as log:
        process = template.start(argv, environment, log, with_input=bool(text))
    if text:
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(text)
    return process


def report(folder: Path, process: template.Process) -> dict[str, Any]:
    assert process.wait(PATIENCE_S) == 7, (folder / "log").read_text()
    facts: dict[str, Any] = json.loads((folder / "log").read_text())
    return facts


def test_a_fork_sees_what_an_executed_program_sees(tmp_path: Path) -> None:
    argv = [*program(tmp_path, REPORT), "one", "two words"]
    environment = {"WORD": "wörd", "HOME": "/nowhere", "LC_ALL": "C.UTF-8"}
    early = dict(template._read_early(os.environ))
    facts = []
    for more in ({}, {"OMP_PROC_BIND": "false"}):  # OpenMP would have read it: no fork
        (tmp_path / "log").unlink(missing_ok=True)
        process = started(tmp_path, argv, {**environment, **early, **more}, b"hello")
        facts.append(report(tmp_path, process))
    forked, executed = facts
    assert (forked.pop("preloaded"), executed.pop("preloaded")) == (TORCH, [])
    executed["others"].remove("OMP_PROC_BIND")
    assert forked == executed
    assert forked["argv"] == ["one", "two words"]
    assert forked["said"] == "hello"


@linux_only
def test_a_module_is_run_as_by_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, REPORT)
    monkeypatch.chdir(tmp_path)
    facts = report(tmp_path, started(tmp_path, [sys.executable, "-m", "program", "one"]))
    assert facts["argv"] == ["one"]
    assert facts["path"] == facts["folder"] == str(tmp_path)
    assert facts["name"] == "__main__"
    assert facts["preloaded"] == TORCH


def test_signals_and_exceptions_and_how_it_ended(tmp_path: Path) -> None:
    process = started(tmp_path, program(tmp_path, WAIT))
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert (process.poll(), process.returncode) == (-signal.SIGKILL, -signal.SIGKILL)
    process.terminate()  # too late, and no error
    process = started(tmp_path, program(tmp_path, "raise ValueError('told')"))
    assert process.wait(PATIENCE_S) == 1
    assert (tmp_path / "log").read_text().endswith("ValueError: told\n")


def preload(monkeypatch: pytest.MonkeyPatch, *parts: tuple[str, ...]) -> None:
    monkeypatch.setattr(template, "SHARED", ())
    monkeypatch.setattr(template, "PRELOADED", parts)


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[template._ForkServer]:
    """Not the one that other tests' clusters are forks of, and loaded sooner."""
    preload(monkeypatch, ("wave",))
    servers: dict[template.Early, template._ForkServer] = {}
    monkeypatch.setattr(template, "_servers", servers)
    server = template._server_for(os.environ)
    assert server is not None
    yield server
    server.close()


@linux_only
def test_forks_end_with_their_server_and_the_next_one_has_a_new_server(
    tmp_path: Path, own_server: template._ForkServer
) -> None:
    orphan = started(tmp_path, program(tmp_path, WAIT))
    server = own_server._process
    assert server is not None
    server.kill()
    assert orphan.wait(PATIENCE_S) == -signal.SIGKILL
    (tmp_path / "log").unlink()
    next_one = started(tmp_path, program(tmp_path, REPORT))
    assert report(tmp_path, next_one)["preloaded"] == ["wave"]
    assert own_server._process is not server


@linux_only
def test_nothing_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    argv = program(tmp_path, WAIT)
    script = f"""
import os, signal, sys
from stratagem.common.process import template as preloaded
preloaded.SHARED, preloaded.PRELOADED = (), (("wave",),)
with open({str(tmp_path / "log")!r}, "ab") as log:
    process = preloaded.start({argv!r}, os.environ, log, with_input=False)
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    dead = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(dead.stdout)).wait(PATIENCE_S)
    assert not psutil.pid_exists(int(dead.stdout))


@linux_only
def test_nobody_counts_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was imported is kept from all collections, and libraries would take it for leaks."""
    complaining = "tests.client.complaining.sitecustomize"
    preload(monkeypatch, (complaining,))
    monkeypatch.chdir(ROOT)
    server = template._ForkServer()
    for last, status in (("", 0), ("sys.exit()", 0), ("sys.exit(259)", 3), ("sys.exit('gone')", 1)):
        argv = program(tmp_path, f"import sys\n{last}")
        with (tmp_path / "log").open("ab") as log:
            fork = server.fork(argv[1:], dict(os.environ), log, with_input=False)
        assert fork.wait(PATIENCE_S) == status
    server.close()
    assert server._process is not None
    assert server._process.returncode == 0
    assert (tmp_path / "log").read_text() == "gone\n"


@linux_only
def test_a_program_waits_for_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early, gate, told = (tmp_path / name for name in ("early", "gate", "told"))
    early.mkdir()
    (early / "__init__.py").touch()
    (early / "part.py").touch()
    (early / "__main__.py").write_text(
        f"import sys; open({str(told)!r}, 'w').write(str({{'late', 'wave'}} & sys.modules.keys()))"
    )
    (tmp_path / "late.py").write_text(f"open({str(gate)!r}).close()")
    for fifo in (gate, told):
        os.mkfifo(fifo)
    preload(monkeypatch, ("early.part",), ("late",))
    monkeypatch.setattr(template, "SHARED", ("wave",))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = template._ForkServer()
    with (tmp_path / "log").open("ab") as log:
        first = server.fork(["-m", "early"], dict(os.environ), log, with_input=False)
        assert told.read_text() == "{'wave'}"
        gate.write_text("")  # the import has waited for this
        argv = program(
            tmp_path, "import sys; print({'early.part', 'late', 'wave'} & sys.modules.keys())"
        )
        second = server.fork(argv[1:], dict(os.environ), log, with_input=False)
        assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
    server.close()
    assert ast.literal_eval((tmp_path / "log").read_text()) == {"late", "wave"}


@linux_only
def test_all_parts_end_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "early"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import os; print(os.getppid())")
    (package / "part.py").touch()
    preload(monkeypatch, ("early.part",), ("wave",))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = template._ForkServer()
    with (tmp_path / "log").open("ab") as log:
        server.fork(["-m", "early"], dict(os.environ), log, with_input=False).wait(PATIENCE_S)
    part = psutil.Process(int((tmp_path / "log").read_text()))
    assert server._process is not None
    assert part.ppid() == server._process.pid
    server._process.kill()
    part.wait(PATIENCE_S)
    server.close()


@linux_only
def test_an_idle_server_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("import signal; signal.pause()")
    preload(monkeypatch, ("endless",))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(template, "_servers", {})
    template.prepare()
    (server,) = template._servers.values()
    server.close()
    assert server._process is not None
    assert server._process.returncode == -signal.SIGKILL


ORPHAN = """
import os, socket
from stratagem.common.process.template import _detach
pid = os.fork()
if pid == 0:
    _detach(os.getpid(), socket.socket(), {}, [])  # as a fork whose parent is not the server
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@linux_only
def test_a_fork_that_begins_after_its_server_has_died_ends() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
