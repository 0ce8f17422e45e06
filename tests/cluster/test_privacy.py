"""Rows that lie on a worker never reach the coordinator: every byte that it gets is looked at."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.worker.models.model_builder import build_model
from tests.cluster.jobs import ALLOWED, federated, train
from tests.jobs import ALLOW
from tests.repository import ROOT
from tests.userland.data import rows_of

pytestmark = pytest.mark.cluster

RECORDED_WORKER = Path(__file__).with_name("recorded_worker.py")
NUM_CLIENTS = 2
WINDOW = 2  # neighbours in a row that must not stand side by side on the wire


def data_of(folder: Path, client: int) -> tuple[Path, list[Tensor]]:
    """A client's own file, and the inputs in it."""
    train_x, train_y = rows_of(30 + client, seed=100 + client)
    test_x, test_y = rows_of(7, seed=200 + client)
    path = folder / f"ward-{client}.safetensors"
    tensors = {"train.x": train_x, "train.y": train_y, "test.x": test_x, "test.y": test_y}
    save_file(tensors, path)
    return path, [train_x, test_x]


def traces(rows: Tensor) -> set[bytes]:
    """Every few neighbouring values of every row, in each width in which they might be sent."""
    found = set()
    for row in rows.numpy():
        for start in range(len(row) - WINDOW + 1):
            piece = row[start : start + WINDOW]
            found |= {piece.astype(kind).tobytes() for kind in (np.float32, np.float64)}
    return found


def test_rows_on_a_worker_never_reach_the_coordinator(tmp_path: Path) -> None:
    wire = tmp_path / "wire"
    wire.mkdir()
    files = [data_of(tmp_path, client) for client in range(NUM_CLIENTS)]
    spec = federated(
        num_clients=NUM_CLIENTS,
        rounds=3,
        data={"worker_local": "ward"},
        evaluation={"split": "test", "metrics": ["accuracy"]},
    )
    with (
        LocalCluster(
            workers=NUM_CLIENTS,
            threads=1,
            data_dir=tmp_path / "cluster",
            import_path=[ROOT],
            allow=[ALLOW],
            programs={
                "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
                "worker": [sys.executable, str(RECORDED_WORKER)],
            },
            environment={"TEST_WIRE": str(wire), "STRATAGEM_WORKER_OPEN_FILES": "false"},
            worker_arguments={
                f"worker-{client}": ["--local-data", f"ward={path}"]
                for client, (path, _) in enumerate(files)
            },
        ) as cluster,
        cluster.client() as client,
    ):
        outcome = train(client, spec)
    assert len(outcome.of("Evaluated")) == 3
    assert len(outcome.of("ClientEvaluated")) == 3 * NUM_CLIENTS
    model = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True)
    model.load_state_dict(outcome.state)
    right = [model(tensors[1]).argmax(1) == tensors[1][:, :5].argmax(1) for _, tensors in files]
    accuracy = torch.cat(right).double().mean().item()
    assert outcome.status.metrics["test.accuracy"] == pytest.approx(accuracy, rel=1e-12)

    received = b"".join(path.read_bytes() for path in sorted(wire.iterdir()))
    torch.manual_seed(spec.seed)
    built = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True).state_dict()
    for name, tensor in built.items():  # what did cross is found by the same search
        assert tensor.numpy().tobytes()[:64] in received, name
    step = np.dtype(np.float32).itemsize
    for _, tensors in files:
        for rows in tensors:
            assert rows.numpy().tobytes()[: 4 * step] not in received
            assert not any(trace in received for trace in traces(rows))
