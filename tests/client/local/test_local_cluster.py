"""LocalCluster keeps processes alive and leaves none behind; stand-ins play the processes."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stratagem.client.local import supervisor
from stratagem.client.local.cluster import threads_each
from stratagem.common.base.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from stratagem.common.process import parent_guard, template
from stratagem.common.process.template import Process
from tests.client.local.stand_in_cluster import PROGRAMS, make_cluster
from tests.free_ports import free_port
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module", autouse=True)
def light_template() -> Iterator[None]:
    """Stand-ins need nothing of what is imported for real processes."""
    with pytest.MonkeyPatch.context() as patch:
        servers: dict[Any, Any] = {}
        patch.setattr(template, "SHARED", ())
        patch.setattr(template, "PRELOADED", ((),))
        patch.setattr(template, "_servers", servers)
        yield
        for server in servers.values():
            server.close()


@pytest.mark.parametrize(
    ("asked", "environment", "threads"),
    [
        (None, {}, "1 thread each (--threads T for a large model)"),
        (None, {"OMP_NUM_THREADS": "3"}, "3 threads each (OMP_NUM_THREADS)"),
        (2, {"OMP_NUM_THREADS": "3"}, "2 threads each"),
    ],
)
def test_threads_depend_on_neither_cores_nor_workers(
    asked: int | None, environment: dict[str, str], threads: str
) -> None:
    """So one worker and many give the same bits."""
    assert threads_each(asked, environment).each == threads


def facts(folder: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / name / "facts.json").read_text())
    return loaded


def test_all_processes_are_ready_inside_the_block_and_gone_after_it(tmp_path: Path) -> None:
    """With the threads of the environment, where nobody says how many."""
    with make_cluster(tmp_path, workers=2, environment={"OMP_NUM_THREADS": "3"}) as cluster:
        views = cluster.processes
        assert list(views) == ["coordinator", "worker-0", "worker-1"]
        assert all(view.is_ready and view.pid is not None for view in views.values())
        assert cluster.address == views["coordinator"].address
        pids = [view.pid for view in views.values() if view.pid is not None]
        told = facts(tmp_path, "worker-0")
        with pytest.raises(NotFoundError, match="no process 'worker-9'; there are coordinator"):
            cluster.kill("worker-9")
    assert told["argv"][told["argv"].index("--threads") + 1] == "3"
    assert told["failpoints"] is None
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(NotFoundError, match="not running"):
        _ = cluster.address


def test_processes_are_told_where_to_find_each_other(tmp_path: Path) -> None:
    options = {
        "workers": 2,
        "allow": ("jobs.a:build", "jobs.a:load"),
        "import_path": (Path("/modules"),),
        "threads": 3,
        "worker_arguments": {"worker-1": ("--tag", "gpu")},
        "failpoints": True,
    }
    with make_cluster(tmp_path, **options) as cluster:
        coordinator = facts(tmp_path, "coordinator")["argv"]
        worker, address = facts(tmp_path, "worker-1"), cluster.address
        armed = cluster.failpoint_file("worker-1", "worker.step.before_backward")
    assert coordinator == [
        *("--listen", "127.0.0.1:0", "--health-port", "0"),
        *("--data-dir", str(tmp_path / "coordinator")),
        *("--ready-file", str(tmp_path / "ready" / "coordinator")),
    ]
    assert worker["argv"] == [
        *("--coordinator", address, "--name", "worker-1", "--listen", "127.0.0.1:0"),
        *("--data-dir", str(tmp_path / "worker-1")),
        *("--allow", "jobs.a:build", "--allow", "jobs.a:load"),
        *("--allow-code", "any", "--import-path", "/modules"),
        *("--data-root", "/"),
        *("--threads", "3", "--ready-file", str(tmp_path / "ready" / "worker-1")),
        *("--tag", "gpu"),
    ]
    assert worker["failpoints"] == str(armed.parent) == str(tmp_path / "failpoints" / "worker-1")
    assert armed.parent.is_dir()


def test_a_killed_process_comes_back_where_it_was(tmp_path: Path) -> None:
    with make_cluster(tmp_path, workers=1) as cluster:
        address, before = cluster.address, cluster.processes
        for name in ("coordinator", "worker-0"):
            cluster.kill(name)
            cluster.wait_ready(PATIENCE_S)
        after = cluster.processes
        assert cluster.address == address
        for name in ("coordinator", "worker-0"):
            assert after[name].num_starts == 2
            assert after[name].last_exit == -signal.SIGKILL
            assert after[name].pid != before[name].pid
    assert f"--listen {address}" in " ".join(facts(tmp_path, "coordinator")["argv"])


def test_a_process_that_ends_by_itself_comes_back(tmp_path: Path) -> None:
    with make_cluster(tmp_path, workers=1) as cluster:
        cluster.kill("worker-0", signal.SIGTERM)
        cluster.wait_restarted("worker-0", 1)


def test_a_process_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    (tmp_path / "coordinator" / "die").write_text("2")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "coordinator.log").write_text("what an earlier one has said\n")
    with pytest.raises(UnavailableError) as caught:
        make_cluster(tmp_path, workers=1).start()
    assert str(caught.value) == (
        "coordinator ended with status 2 before it was ready; "
        f"{tmp_path}/logs/coordinator.log ends with:\nI was told to die"
    )


def test_wrong_addresses_and_counts_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="listen: 'nowhere' is not HOST:PORT"):
        make_cluster(tmp_path / "new", listen="nowhere")
    with pytest.raises(InvalidInputError, match="workers: -1 is not 0 or more"):
        make_cluster(tmp_path / "new", workers=-1)
    assert not (tmp_path / "new").exists()


def test_a_stubborn_or_frozen_process_is_killed_after_the_grace(tmp_path: Path) -> None:
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "worker-0" / "stubborn").touch()
    cluster = make_cluster(tmp_path, workers=2).start()
    cluster._running().grace_s = 0.2
    cluster.kill("worker-1", signal.SIGSTOP)
    pids = [view.pid for view in cluster.processes.values() if view.pid is not None]
    cluster.close()
    cluster.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_one_folder_serves_one_cluster_at_a_time(tmp_path: Path) -> None:
    with (
        make_cluster(tmp_path, workers=0),
        pytest.raises(ConflictError, match="another local cluster uses"),
    ):
        make_cluster(tmp_path, workers=0).start()
    with make_cluster(tmp_path, workers=0):
        pass


def test_a_start_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptors left, say, when a process is to be started again."""
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3

    def start(*args: Any, **options: Any) -> Process:
        if failures:
            raise failures.pop()
        return template.start(*args, **options)

    with make_cluster(tmp_path, workers=1) as cluster:
        monkeypatch.setattr(supervisor, "start", start)
        cluster.kill("worker-0")
        cluster.wait_restarted("worker-0", 1)
        assert failures == []
        cluster.kill("worker-0")  # the thread is as good as before
        cluster.wait_restarted("worker-0", 2)


def test_an_end_that_cannot_be_watched_is_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_descriptor(_: Process) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(supervisor, "end_descriptor", end_descriptor)
    with make_cluster(tmp_path, workers=1) as cluster:
        pid = cluster.processes["worker-0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        cluster.wait_restarted("worker-0", 1)


def test_what_cannot_be_started_at_all_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> Process:
        raise FileNotFoundError(errno.ENOENT, "No such file", "python4")

    monkeypatch.setattr(supervisor, "start", start)
    said = "cannot be started: FileNotFoundError.*python4"
    with pytest.raises(UnavailableError, match=said), make_cluster(tmp_path, workers=1):
        pass


def test_a_supervisor_that_fails_ends_its_processes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_cluster(tmp_path, workers=1) as cluster:
        processes = [psutil.Process(view.pid) for view in cluster.processes.values()]

        def wait(*_: object) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(supervisor.ProcessSupervisor, "_wait", wait)
        os.kill(processes[1].pid, signal.SIGKILL)  # wakes the thread
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert alive == []
        said = pytest.raises(UnavailableError, match=r"have ended, because.*MemoryError: no room")
        with said:
            cluster.wait_restarted("worker-0", 1)
        for ask in (lambda: cluster.address, lambda: cluster.kill("worker-0"), cluster.wait_ready):
            with pytest.raises(UnavailableError, match="MemoryError: no room"):
                ask()


def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import signal, sys
from pathlib import Path
from stratagem.client.local.cluster import LocalCluster
from stratagem.common.process import template
template.SHARED, template.PRELOADED = (), ((),)
programs = {PROGRAMS!r}
cluster = LocalCluster(workers=1, data_dir=Path({str(tmp_path)!r}), programs=programs).start()
print(*[view.pid for view in cluster.processes.values()], flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == []


def test_the_guard_refuses_to_start_without_its_parent() -> None:
    command = [sys.executable, "-I", "-S", str(parent_guard.__file__), str(os.getpid() + 1)]
    ended = subprocess.run([*command, sys.executable, "-c", "print('ran')"], capture_output=True)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_restarts_are_immediate_at_first_and_slow_down() -> None:
    delays = [supervisor._restart_delay_s(num) for num in (0, 1, 2, 3, 4, 50)]
    assert delays == [0.0, 0.0, 0.0, 0.2, 0.4, 5.0]


def test_a_taken_port_is_named_and_the_folder_is_free_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = f"listen: {address} cannot be listened on: {os.strerror(errno.EADDRINUSE)}; name "
        with pytest.raises(InvalidInputError, match=said):
            make_cluster(tmp_path, workers=1, listen=address).start()
    with make_cluster(tmp_path, workers=1, listen=address) as cluster:
        assert cluster.address
    left = {folder.name for folder in tmp_path.iterdir() if folder.is_dir()}
    assert left == {"logs", "coordinator", "worker-0"}
