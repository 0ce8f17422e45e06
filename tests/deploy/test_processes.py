"""What the processes do for containers: names and addresses by default, health, early SIGTERM."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from stratagem.common.health import main
from stratagem.common.rpc.health_probe import health_of
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Holder
from stratagem.worker.process.settings import WorkerSettings, advertised, from_command_line
from tests.client.cli.command_line import invoke
from tests.crash.rig import until
from tests.patience import PATIENCE_S

HEALTH = [sys.executable, "-m", "stratagem.common.health", "--timeout", str(PATIENCE_S)]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def settings(*flags: str) -> WorkerSettings:
    return from_command_line(["--coordinator", "h:1", *flags])


# ---- names and addresses ----


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("127.0.0.1:0", "", "127.0.0.1:9"),
        ("127.0.0.1:0", "node0", "node0:9"),
        ("0.0.0.0:9", "node0:5", "node0:5"),
        ("node0:9", "", "node0:9"),
        ("[::1]:9", "", "[::1]:9"),
        ("0.0.0.0:9", "", f"{socket.gethostname()}:9"),
        ("[::]:9", "", f"{socket.gethostname()}:9"),
    ],
)
def test_a_worker_advertises_where_it_can_be_reached_under_the_name_of_its_host(
    listen: str, advertise: str, expected: str
) -> None:
    flags = ["--listen", listen, *(["--advertise", advertise] if advertise else [])]
    told = settings(*flags)
    assert (told.name, advertised(told, 9)) == (socket.gethostname(), expected)


# ---- health ----


@pytest.fixture(scope="module", name="servicer")
def _servicer() -> health.HealthServicer:
    return health.HealthServicer()


@pytest.fixture(scope="module", name="health_address")
def _health_address(servicer: health.HealthServicer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_health_is_what_is_answered(servicer: health.HealthServicer, health_address: str) -> None:
    for status, name, code in ((NOT_SERVING, "NOT_SERVING", 1), (SERVING, "SERVING", 0)):
        servicer.set("", status)
        assert health_of(health_address, timeout_s=PATIENCE_S) == name
        done = invoke("health", "--timeout", PATIENCE_S, health_address)
        assert (done.stdout, done.exit_code) == (f"{name}\n", code)
    program = subprocess.run([*HEALTH, health_address], capture_output=True, text=True)
    assert (program.stdout, program.returncode) == ("SERVING\n", 0)


def test_the_program_asks_all_at_addresses_that_the_environment_may_complete(
    health_address: str,
    servicer: health.HealthServicer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer.set("", SERVING)
    monkeypatch.setenv("POD_IP", "127.0.0.1")

    def status(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["health", *arguments])
        return main()

    found = f"$POD_IP:{health_address.rpartition(':')[2]}"
    assert status(found, health_address, "--timeout", str(PATIENCE_S)) == 0
    assert capsys.readouterr().out == "SERVING\nSERVING\n"
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        nobody, mute = (f"127.0.0.1:{each.getsockname()[1]}" for each in (closed, silent))
        assert status(found, nobody) == 1
        said = f"UNAVAILABLE: nobody answers at {nobody}"
        assert capsys.readouterr().out == f"SERVING\n{said}\n"
        answer = health_of(mute, timeout_s=0.2)
        assert answer == f"DEADLINE_EXCEEDED: {mute} has not answered within 0.2 s"
    with pytest.raises(SystemExit) as wrong:
        status("nowhere", "--timeout", "x")
    assert wrong.value.code == 2
    assert "--timeout: invalid float value: 'x'" in capsys.readouterr().err


def test_a_health_check_loads_little() -> None:
    """It runs every few seconds in each container."""
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, stratagem.common.health; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"torch", "numpy", "pydantic", "typer"} & set(loaded)


# ---- SIGTERM before a process serves: ignored for the first process of a container by default ----


def handles_sigterm(pid: int) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def status_after_sigterm(*program: str) -> int:
    """The exit status of `python -m program` when SIGTERM comes before it serves."""
    process = subprocess.Popen([sys.executable, "-m", *program], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin:
        until(lambda: handles_sigterm(process.pid), "the process has a handler")
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE_S)


@pytest.mark.cluster
def test_a_coordinator_that_waits_for_the_lead_leaves_at_sigterm(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.sqlite")
    journal.take_lead(Holder.of_this_process(), ttl_s=60)
    options = ("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path), "--lease-ttl-s", "60")
    assert status_after_sigterm("stratagem.coordinator", *options) == 0
    journal.close()


@pytest.mark.cluster
def test_a_worker_that_does_not_serve_yet_leaves_at_sigterm() -> None:
    assert status_after_sigterm("stratagem.worker", "--coordinator", "-") == 0
