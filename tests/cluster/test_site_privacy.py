"""Every byte that leaves a worker with a site file is looked at: no row is in it, and no word of
what the job's code has printed, logged or raised, unless the file says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stratagem.client.local import supervisor
from tests.cluster.jobs import cluster_of, federated, train
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("no row and no word leaves a site unless its file says so"),
]

RECORDED_WORKER = Path(__file__).with_name("recorded_worker.py")
CANARY = "SmithAnna4711"
SITES = ("prints", "raises", "dies")
WINDOW = 2  # neighbours in a row that must not stand side by side on the wire

KEPT, SUMMED = [4711.25, 815.125], [1815.75, 3.5]
"""What the states of two metrics hold."""

LOADERS = f'''
import logging
import torch

def rows_of(number, count):
    generator = torch.Generator().manual_seed(1000 + number)
    x = torch.randn(count, 12, generator=generator)
    return x, x[:, :5].argmax(1)

def ward(number, habit):
    print("{CANARY} loader prints")
    logging.getLogger("ward").warning("{CANARY} loader logs")
    x, y = rows_of(number, 30)
    test = rows_of(number + 10, 7)
    x[:, 0] = ["prints", "raises", "dies"].index(habit)
    return {{"train": (x, y), "test": test}}
'''
TASK = f'''
import logging
import os
import torch
from torch import nn

class {CANARY}Error(Exception):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            habit = int(x[0, 0])
            print("{CANARY} model prints", x[0].tolist())
            logging.getLogger("task").warning("{CANARY} model logs %s", x[0].tolist())
            if habit == 1:
                made = type("{CANARY}Type", (KeyError,), {{}})
                try:
                    raise ValueError("{CANARY} cause")
                except ValueError as error:
                    raise made("{CANARY} message", x[0].tolist()) from error
            if habit == 2:
                os._exit(11)
        return self.layers(x)

def cat(rows):
    return torch.cat(rows)

def dim_zero_sum(states):
    return states.sum(0)

class KeepsRows:
    """Its state is a list, as that of a curve without thresholds: no sum, and so it stays."""

    def __init__(self):
        self.rows, self._defaults, self._reductions = [], {{"rows": []}}, {{"rows": cat}}

    def update(self, output, target):
        self.rows.append(torch.tensor({KEPT}))

    def compute(self):
        return torch.cat(self.rows).mean() * 0 + 0.625

class Counts:
    """Its state is a sum, and leaves."""

    summed_states = ("count",)

    def __init__(self):
        self.count = torch.zeros(2)

    def update(self, output, target):
        self.count += torch.tensor({SUMMED})

    def compute(self):
        return self.count[0]

class Watches:
    def on_step(self, view):
        view.log("{CANARY}.metric", 1.0)

def build():
    return Net()
'''


def site_file(folder: Path, number: int, shares: bool) -> Path:
    path = folder / f"site-{number}.toml"
    path.write_text(
        f'''
site = "site-{number}"
share_errors = "{"message" if shares else "type"}"
[data.ward]
entrypoint = "ward_loaders:ward"
kwargs = {{number = {number}, habit = "{SITES[number]}"}}
[[accept]]
data = ["ward"]
entrypoints = ["ward_task:*"]
metrics = ["accuracy", "ward_task:KeepsRows", "ward_task:Counts"]
[audit]
file = "audit-{number}.jsonl"
share_logs = {"true" if shares else "false"}
'''
    )
    return path


def traces(rows: Tensor) -> set[bytes]:
    """Every few neighbouring values of every row, in each width in which they might be sent."""
    found = set()
    for row in rows.numpy():
        for start in range(1, len(row) - WINDOW + 1):  # the first value is the habit
            piece = row[start : start + WINDOW]
            found |= {piece.astype(kind).tobytes() for kind in (np.float32, np.float64)}
    return found


def rows_of(number: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(count, 12, generator=generator)


def wire_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *, shares: bool) -> tuple[bytes, Any]:
    """Train with three sites, of which one prints, one raises and one dies; return every byte that
    has left them, and the outcome."""
    monkeypatch.setattr(supervisor, "MAX_DELAY_S", 0.2)
    wire, code = folder / "wire", folder / "code"
    wire.mkdir()
    code.mkdir()
    (code / "ward_loaders.py").write_text(LOADERS)
    (code / "ward_task.py").write_text(TASK)
    files = [site_file(folder, number, shares) for number in range(len(SITES))]
    spec = federated(
        {"entrypoint": "ward_task:build"},
        num_clients=len(SITES),
        rounds=2,
        data={"worker_local": "ward"},
        callbacks="ward_task:Watches",
        evaluation={
            "split": "test",
            "metrics": ["accuracy", "ward_task:KeepsRows", "ward_task:Counts"],
        },
    )
    cluster = cluster_of(
        folder,
        [["--site", str(file)] for file in files],
        worker=RECORDED_WORKER,
        import_path=[ROOT, code],
        allow=[],
        allow_code="none",
        environment={"TEST_WIRE": str(wire), "STRATAGEM_WORKER_OPEN_FILES": "false"},
    )
    with cluster, cluster.client() as client:
        outcome = train(client, spec)
    return b"".join(path.read_bytes() for path in sorted(wire.iterdir())), outcome


@pytest.mark.timeout(600)
def test_no_row_and_no_word_of_a_site_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, outcome = wire_of(tmp_path, monkeypatch, shares=False)
    rejected = {event.payload["client"]: event.payload for event in outcome.of("UpdateRejected")}
    assert {payload["cause"] for payload in rejected.values()} == {"exception", "crashed"}
    (raised,) = {p["reason"] for p in rejected.values() if p["cause"] == "exception"}
    line = 1 + TASK[: TASK.index("raise made")].count("\n")
    place = f"KeyError at ward_task.py, line {line}"
    assert raised == f"{place}; site site-1 keeps the message in its own log"
    assert raised.encode() in received  # what did cross is found by the same search
    assert len(outcome.of("UpdateReceived")) == 2
    assert CANARY.encode() not in received
    metrics = outcome.status.metrics
    assert metrics["test.ward_task:KeepsRows.client_mean"] == 0.625
    assert "test.ward_task:KeepsRows" not in metrics
    assert metrics["test.ward_task:Counts"] == SUMMED[0]  # of one site, in one batch of 7 rows
    for kind in (np.float32, np.float64):
        assert np.array(KEPT, kind).tobytes() not in received
    assert np.array(SUMMED, np.float64).tobytes() in received
    for number in range(len(SITES)):
        for rows in (rows_of(number, 30), rows_of(number + 10, 7)):
            assert not any(trace in received for trace in traces(rows))
    log = (tmp_path / "cluster" / "logs" / "worker-1.log").read_text()
    assert f"{CANARY} message" in log
    assert "Traceback" in log
    audits = "".join(path.read_text() for path in tmp_path.glob("audit-*.jsonl"))
    assert CANARY not in audits


@pytest.mark.timeout(600)
def test_a_site_that_shares_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received, _ = wire_of(tmp_path, monkeypatch, shares=True)
    for words in ("loader prints", "loader logs", "model prints", "model logs", "message"):
        assert f"{CANARY} {words}".encode() in received, words
    assert f"{CANARY} cause".encode() not in received  # it stands in the traceback alone
    assert f"{CANARY}.metric".encode() not in received
