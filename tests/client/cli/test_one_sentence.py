"""What goes wrong first is said in one sentence by the command, and what goes well in none.

Commands run inside this process where they leave nothing in it, and a few as the processes that
they are.
"""

import csv
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from stratagem.client.cli.main import app
from stratagem.client.local.local_cluster import LocalCluster
from stratagem.worker.process import worker_main
from tests.client.local.stand_in_cluster import make_cluster
from tests.crash.rig import until
from tests.patience import PATIENCE_S
from tests.repository import ROOT

pytestmark = pytest.mark.cluster

PROGRAM = [sys.executable, "-m", "stratagem.program"]
JOB = {
    "name": "small",
    "model": {"entrypoint": "brought:tied"},
    "data": {"entrypoint": "brought:rows"},
    "loss": "mse",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "steps": 2,
    "batch_size": 64,
}
INSIDE = """
import torch
from torch import nn

def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model

def rows():
    return {"train": (torch.randn(10, 4), torch.randn(10, 4))}
"""


def said(*arguments: object) -> tuple[int, str, list[str]]:
    """(exit code, stdout, lines of stderr) of a command that runs in this process."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr.splitlines()


def said_by_process(*arguments: object, cwd: Path = ROOT) -> tuple[int, str, list[str]]:
    """The same of a process of its own."""
    command = [*PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr.splitlines()


DEVICES = {
    "cuda:99": "cuda:99",  # "is built without CUDA", or "is not there"
    "gpu": "'gpu' is not cpu or cuda:N",
    "cpu:1": "'cpu:1' is not cpu or cuda:N",
}
ADDRESSES = ("localhost", "a:7070,b", "http://localhost:7070")


def addressed(address: str) -> str:
    """What is said of an address without a port."""
    return f"coordinator: {address.rpartition(',')[2]!r} is not HOST:PORT"


@pytest.fixture
def worker_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[str]]]:
    """What a worker says that ends before it serves, as a function in this process."""
    monkeypatch.setattr(worker_main, "keep_forks_away", lambda: None)  # of this process for good

    def says(*arguments: str) -> tuple[int, str, list[str]]:
        status = worker_main.main([*arguments])
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return says


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_whose_device_is_not_there(
    worker_says: Callable[..., tuple[int, str, list[str]]], device: str
) -> None:
    worker = ("--coordinator", "127.0.0.1:9", "--name", "w", "--device", device)
    status, out, (line,) = worker_says(*worker)
    assert (status, out) == (1, "")
    assert line.startswith(f"stratagem worker: --device: {DEVICES[device]}")


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_worker_whose_coordinator_has_no_port(
    worker_says: Callable[..., tuple[int, str, list[str]]], address: str
) -> None:
    status, out, (line,) = worker_says("--name", "w", "--coordinator", address)
    assert (status, out) == (2, "")
    assert line.endswith(addressed(address))


@pytest.mark.parametrize("command", [["list"], ["run", str(ROOT / "examples/digits.yaml")]])
@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_without_a_port(command: list[str], address: str) -> None:
    status, out, (line,) = said(*command, "--coordinator", address)
    assert (status, out) == (1, "")
    assert line.endswith(addressed(address))


def test_a_health_port_without_a_port() -> None:
    assert said("health", "nonsense") == (1, "", ["error: address: 'nonsense' is not HOST:PORT"])


@pytest.mark.parametrize(
    ("command", "ended"),
    [
        pytest.param(["list"], 1, id="list"),
        pytest.param(["worker", "--name", "w"], 2, id="worker", marks=pytest.mark.sweep),
    ],
)
def test_processes_say_it_as_well(command: list[str], ended: int) -> None:
    status, out, (line,) = said_by_process(*command, "--coordinator", "a:7070,b")
    assert (status, out) == (ended, "")
    assert line.endswith(addressed("a:7070,b"))


def test_another_local_cluster_is_named_with_its_address(tmp_path: Path) -> None:
    with make_cluster(tmp_path, workers=0) as cluster:
        status, out, (line,) = said_by_process("up", "--data-dir", tmp_path)
        assert (status, out) == (1, "")
        assert line == (
            f"error: another local cluster uses {tmp_path}; talk to it with --coordinator "
            f"{cluster.address}, or name another folder with --data-dir"
        )


def test_a_new_journal_is_no_news(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    serve = ("coordinator", "--listen", "127.0.0.1:0", "--data-dir", tmp_path / "data")
    command = [*PROGRAM, *map(str, serve), "--ready-file", str(ready)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(ready.exists, "serving")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "serving" in log
    assert "alembic" not in log


def test_a_cluster_that_a_script_starts_in_the_background_hears_sigint(tmp_path: Path) -> None:
    """A shell without job control has it begin with SIGINT ignored."""
    up = ("up", "--workers", "1", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path))
    in_background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *PROGRAM, *up]
    with subprocess.Popen(
        in_background, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert lines[1].endswith("stop with Ctrl-C or SIGTERM\n")
    assert (process.returncode, errors) == (130, "")


def test_a_local_run_of_what_a_package_offers(tmp_path: Path) -> None:
    """A model that another module defines, tied weights, and a batch larger than the data."""
    (tmp_path / "brought").mkdir()
    (tmp_path / "brought" / "__init__.py").write_text("from brought.inside import rows, tied\n")
    (tmp_path / "brought" / "inside.py").write_text(INSIDE)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    given = ("--local", 1, "--threads", 2, "--log-to", "csv:rows.csv")
    status, out, errors = said_by_process("run", "job.yaml", *given, cwd=tmp_path)
    assert (status, errors) == (0, []), out
    assert "threads   2 of each worker; runs with other numbers of threads have other bits" in out
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    losses = [row["step"] for row in rows if row["series"] == "train.loss"]
    assert losses == [str(step) for step in range(1, len(losses) + 1)] != []
    warning = "warning: batch_size 64 is larger than the 10 rows of the train split"
    assert f"model built: 24 parameters; {warning}, so every step takes all of them" in out


def test_a_tied_model_loads_strictly_what_is_downloaded(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / "brought.py").write_text(INSIDE)
    namespace: dict[str, object] = {}
    exec(INSIDE, namespace)
    with (
        LocalCluster(workers=1, threads=1, import_path=[tmp_path]) as cluster,
        cluster.client() as client,
    ):
        result = client.submit(JOB).result()
        state = result.state_dict()
        plain = result.run.download(tmp_path / "plain.safetensors", plain=True)
        status, out, errors = said(
            *("download", result.run.run_id, "--plain", "--output", tmp_path / "b.safetensors"),
            *("--coordinator", cluster.address),
        )
        assert (status, errors) == (0, []), out
    model = namespace["tied"]()  # type: ignore[operator]
    assert model.load_state_dict(state, strict=True)
    for path in (plain, tmp_path / "b.safetensors"):
        found = safetensors.load_file(path)
        assert found.keys() == model.state_dict().keys()
        assert all(found[name].equal(state[name]) for name in found)
