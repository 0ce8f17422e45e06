"""The command line and the SDK on real processes: Ctrl-C and resume, inline data."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from stratagem.client import Event, LocalCluster, Phase, Progress

pytestmark = pytest.mark.cluster

PROGRAM = [sys.executable, "-m", "stratagem.program"]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}

MODULE = """
import torch

def build():
    return torch.nn.Linear(3, 2)

def load():
    rows = torch.arange(120.0).reshape(40, 3) / 120
    return {"train": (rows, (rows.sum(1) > 1.5).long())}
"""


@pytest.mark.sweep
def test_ctrl_c_stops_a_local_run_which_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "mymodel.py").write_text(MODULE)
    document = {
        "name": "mine",
        "model": {"entrypoint": "mymodel:build"},
        "data": {"entrypoint": "mymodel:load"},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "epochs": 1_000_000,
        "checkpoint": {"every": "5 epochs"},
        "batch_size": 8,
    }
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(document))
    state = ["--data-dir", str(tmp_path / "state")]
    local = ["--local", "1", "--threads", "5", *state]
    process = subprocess.Popen(
        [*PROGRAM, "run", str(job), "--run-id", "mine", "--verbose", *local],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "segment 2 committed" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        said = process.stderr.read().splitlines()
    assert process.returncode == 130, "\n".join(said)
    assert "stopping run mine" in said
    assert said[-1].startswith("stopped; step ")
    assert said[-1].endswith(
        f"is kept; continue with: stratagem resume mine --local 1 --data-dir {state[1]}"
    )
    resumed = subprocess.Popen(
        # Only workers with as many threads can go on with it.
        [*PROGRAM, "resume", "mine", "--verbose", "--local", "2", *state],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    with resumed:
        assert resumed.stdout is not None
        assert resumed.stderr is not None
        while "committed at step" not in (line := resumed.stdout.readline()):
            assert line, resumed.stderr.read()
        resumed.send_signal(signal.SIGINT)
        resumed.stdout.read()
        said = resumed.stderr.read().splitlines()
    assert int(line.split("committed at step ")[1].split(":")[0]) > 50
    assert resumed.returncode == 130, "\n".join(said)


def test_inline_data_train_while_the_coordinator_is_killed_and_nothing_stays_behind(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("t")  # short enough for sockets
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    rows = np.random.default_rng(0).random((64, 3), dtype=np.float32)
    data = {"train": (rows, (rows.sum(1) > 1.5).astype(np.int64))}
    job = {
        "name": "inline",
        "model": {"graph": {"nodes": [{"id": "out", "module": "Linear"}], "edges": []}},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.5},
        "epochs": 40,
        "batch_size": 16,
        "checkpoint": {"every": "10 epochs"},
    }
    job["model"]["graph"]["nodes"][0]["kwargs"] = {"in_features": 3, "out_features": 2}  # type: ignore[index]
    with LocalCluster(workers=1) as cluster, cluster.client() as client:
        run = client.submit(job, data=data)
        seen: list[int] = []
        for item in run.watch():
            match item:
                case Event(index, kind="ModelBuilt"):
                    seen.append(index)
                    cluster.kill("coordinator")
                case Event(index):
                    seen.append(index)
                case Progress():
                    pass
        result = run.result()
        state = result.state_dict()
        log = (cluster.folder / "logs" / "coordinator.log").read_text()
        assert "serving" in log
        assert "alembic" not in log, "a new journal is no news"
        assert any("-sockets-" in path.name for path in place.iterdir())  # of the worker
        for name in cluster.processes:
            cluster.kill(name)  # they may be back when the cluster ends, or not
    # A process that is killed while `tempfile` tries a folder leaves the file that it tried with.
    assert not [path for path in place.iterdir() if not re.fullmatch(r"[a-z0-9_]{8}", path.name)]
    assert seen == list(range(len(seen)))
    assert result.status.phase is Phase.COMPLETED
    assert result.status.step == 160
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "out.weight": (2, 3),
        "out.bias": (2,),
    }
    assert all(torch.isfinite(value).all() for value in state.values())
