"""The command line and the SDK on real processes: user errors, Ctrl-C and resume, inline data."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from stratagem.client import Event, LocalCluster, Phase, Progress
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.cluster

PROGRAM = [sys.executable, "-m", "stratagem.program"]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}

MODULE = """
import torch

def build(fails_at=0):
    model = torch.nn.Linear(3, 2)
    calls = []
    def hook(module, inputs):
        calls.append(1)
        if len(calls) == fails_at:
            raise KeyError("third batch")
    model.register_forward_pre_hook(hook)
    return model

def load():
    rows = torch.arange(120.0).reshape(40, 3) / 120
    return {"train": (rows, (rows.sum(1) > 1.5).long())}
"""


def write_job(folder: Path, **changes: object) -> Path:
    (folder / "mymodel.py").write_text(MODULE)
    job: dict[str, Any] = {
        "name": "mine",
        "model": {"entrypoint": "mymodel:build"},
        "data": {"entrypoint": "mymodel:load"},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "epochs": 2,
        "batch_size": 8,
        **changes,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_an_exception_in_the_users_model_is_shown_with_its_worker(tmp_path: Path) -> None:
    job = write_job(tmp_path, model={"entrypoint": "mymodel:build", "kwargs": {"fails_at": 3}})
    command = [*PROGRAM, "run", str(job), "--local", "1", "--data-dir", str(tmp_path / "state")]
    command += ["--report", str(tmp_path / "report.html")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert "Traceback (most recent call last):" in lines
    assert f'  File "{tmp_path}/mymodel.py", line 10, in hook' in lines
    assert lines[-3:] == [
        "KeyError: 'third batch'",
        "model Linear was called with float32[8, 3]",
        "error: KeyError in your code on worker-0, training step 3",
    ]
    report = (tmp_path / "report.html").read_text()
    assert report.index("in your code on worker-0, training step 3") < report.index("<nav")
    assert "in hook" in report


@pytest.mark.sweep
def test_ctrl_c_stops_a_local_run_which_can_be_resumed(tmp_path: Path) -> None:
    job = write_job(tmp_path, epochs=1_000_000, checkpoint={"every": "5 epochs"})
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
        f"is kept; go on with: stratagem resume mine --local 1 --data-dir {state[1]}"
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
        assert any("-sockets-" in path.name for path in place.iterdir())  # of the worker
        for name in cluster.processes:
            cluster.kill(name)  # they may be back when the cluster ends, or not
    assert not [*place.iterdir()]
    assert seen == list(range(len(seen)))
    assert result.status.phase is Phase.COMPLETED
    assert result.status.step == 160
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "out.weight": (2, 3),
        "out.bias": (2,),
    }
    assert all(torch.isfinite(value).all() for value in state.values())
