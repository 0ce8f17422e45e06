"""What goes wrong first is said in one sentence by the command, and what goes well in none.

Commands run inside this process where they leave nothing in it, and a few as the processes that
they are.
"""

import csv
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from stratagem.client.sdk.blocking import Client
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import Purpose
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.worker.process import main as worker_main
from tests.client.cli.command_line import PROGRAM, invoke
from tests.client.fake_coordinator import JOB as FAKES_JOB
from tests.client.fake_coordinator import FakeCoordinator
from tests.client.local.stand_in_cluster import PROGRAMS, make_cluster
from tests.patience import PATIENCE_S
from tests.repository import ROOT

pytestmark = pytest.mark.cluster

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
    done = invoke(*arguments)
    return done.exit_code, done.stdout, done.stderr.splitlines()


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


def test_a_worker_that_cannot_begin_says_why(
    worker_says: Callable[..., tuple[int, str, list[str]]],
) -> None:
    for device, words in DEVICES.items():
        worker = ("--coordinator", "127.0.0.1:9", "--name", "w", "--device", device)
        status, out, (line,) = worker_says(*worker)
        assert (status, out) == (1, "")
        assert line.startswith(f"stratagem worker: --device: {words}")
    for address in ADDRESSES:
        status, out, (line,) = worker_says("--name", "w", "--coordinator", address)
        assert (status, out) == (2, "")
        assert line.endswith(addressed(address))


@pytest.mark.parametrize("command", [["list"], ["run", str(ROOT / "examples/digits.yaml")]])
def test_an_address_without_a_port(command: list[str]) -> None:
    for address in ADDRESSES:
        status, out, (line,) = said(*command, "--coordinator", address)
        assert (status, out) == (1, "")
        assert line.endswith(addressed(address))
    assert said("health", "nonsense") == (1, "", ["error: address: 'nonsense' is not HOST:PORT"])


@pytest.mark.sweep
def test_a_process_says_it_as_well() -> None:
    command = [*PROGRAM, "worker", "--name", "w", "--coordinator", "a:7070,b"]
    done = subprocess.run(command, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.endswith(addressed("a:7070,b"))


def test_another_local_cluster_is_named_with_its_address(tmp_path: Path) -> None:
    alone = {"PYTHONNODEBUGRANGES": "1"}  # no template, which would load torch
    with make_cluster(tmp_path, workers=0, environment=alone) as cluster:
        before = signal.getsignal(signal.SIGTERM)
        try:
            status, out, (line,) = said("up", "--data-dir", tmp_path)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert (status, out) == (1, "")
        assert line == (
            f"error: another local cluster uses {tmp_path}; talk to it with --coordinator "
            f"{cluster.address}, or name another folder with --data-dir"
        )


UP = f"""
import sys
from functools import partial
from stratagem.client.cli import servers
from stratagem.common.process import template
from stratagem.program.__main__ import main

template.SHARED, template.PRELOADED = (), ((),)
servers.LocalCluster = partial(servers.LocalCluster, programs={PROGRAMS})
sys.argv[1:1] = ["up", "--workers", "1", "--listen", "127.0.0.1:0"]
main()
"""
"""The command, with stand-ins for its coordinator and its worker."""


def test_a_cluster_that_a_script_starts_in_the_background_hears_sigint(tmp_path: Path) -> None:
    """A shell without job control has it begin with SIGINT ignored."""
    up = (sys.executable, "-c", UP, "--data-dir", str(tmp_path))
    in_background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *up]
    with subprocess.Popen(
        in_background, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert lines[1].endswith("stop with Ctrl-C or SIGTERM\n")
    assert (process.returncode, errors) == (130, "")


@pytest.mark.sweep
def test_a_local_run_of_what_a_package_offers(tmp_path: Path) -> None:
    """A model that another module defines, tied weights, and a batch larger than the data."""
    (tmp_path / "brought").mkdir()
    (tmp_path / "brought" / "__init__.py").write_text("from brought.inside import rows, tied\n")
    (tmp_path / "brought" / "inside.py").write_text(INSIDE)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    given = ("--local", 1, "--threads", 2, "--log-to", "csv:rows.csv")
    command = [*PROGRAM, "run", "job.yaml", *map(str, given)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    out = done.stdout
    assert (done.returncode, done.stderr) == (0, ""), out
    assert "threads   2 of each worker; runs with other numbers of threads have other bits" in out
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    losses = [row["step"] for row in rows if row["series"] == "train.loss"]
    assert losses == [str(step) for step in range(1, len(losses) + 1)] != []
    warning = "warning: batch_size 64 is larger than the 10 rows of the train split"
    assert f"model built: 24 parameters; {warning}, so every step takes all of them" in out


def test_a_tied_model_loads_strictly_what_is_downloaded(
    client: Client, fake: FakeCoordinator, tmp_path: Path
) -> None:
    namespace: dict[str, object] = {}
    exec(INSIDE, namespace)
    model = namespace["tied"]()  # type: ignore[operator]
    trained = {f"model/{name}": value.detach() for name, value in model.state_dict().items()}
    manifest, buffers = manifest_of(trained, Purpose.STATE)
    fake.state = replace(manifest, digest=blob_digest(manifest, buffers)), buffers
    result = client.submit(FAKES_JOB).result()
    state = result.state_dict()
    plain = result.run.download(tmp_path / "plain.safetensors", plain=True)
    status, out, errors = said(
        *("download", result.run.run_id, "--plain", "--output", tmp_path / "b.safetensors"),
        *("--coordinator", client.address),
    )
    assert (status, errors) == (0, []), out
    assert namespace["tied"]().load_state_dict(state, strict=True)  # type: ignore[operator]
    for path in (plain, tmp_path / "b.safetensors"):
        found = load_file(path)
        assert found.keys() == model.state_dict().keys()
        assert all(found[name].equal(each) for name, each in model.state_dict().items())
