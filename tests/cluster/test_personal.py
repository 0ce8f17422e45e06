"""Layers that each client keeps to itself: the same bits as the plain rounds, and nothing of them
leaves a site."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec
from stratagem.worker.models.model_builder import build_model
from tests.cluster.jobs import ALLOWED, assert_same_bits, federated, outcome_of, train
from tests.jobs import ALLOW, user_data
from tests.reference.personal_rounds import Own, personal_rounds
from tests.repository import ROOT
from tests.userland.data import per_client, rows_of

pytestmark = pytest.mark.cluster

RECORDED_WORKER = Path(__file__).with_name("recorded_worker.py")
NUM_CLIENTS, ROUNDS = 3, 3
EVALUATION = {"split": "test", "metrics": ["accuracy"], "batch_size": 4}
MODEL = "batch_norm_mlp"
HEAD_AND_STATISTICS = ["3.*", "1.running_*"]


def rows_to_test(client: int) -> tuple[Tensor, Tensor]:
    return rows_of(7, seed=60 + client)


def sites_of(folder: Path) -> dict[str, list[str]]:
    """Arguments of workers with the rows of `per_client`, 40 for three, and with rows to test."""
    arguments = {}
    for client in range(NUM_CLIENTS):
        x, y = per_client(client, NUM_CLIENTS)["train"]
        test_x, test_y = rows_to_test(client)
        file = folder / f"ward-{client}.safetensors"
        tensors = {"train.x": x, "train.y": y, "test.x": test_x, "test.y": test_y}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        arguments[f"worker-{client}"] = ["--local-data", f"ward={file}"]
    return arguments


def personal_job(*patterns: str, **options: Any) -> JobSpec:
    return federated(
        MODEL,
        num_clients=NUM_CLIENTS,
        rounds=ROUNDS,
        data={"worker_local": "ward"},
        evaluation=EVALUATION,
        options={"personal": patterns, **options},
    )


def accuracy(job: JobSpec, shared: Any, own: list[Own]) -> float:
    """Of all test rows, each by the model of its client."""
    right = []
    for client in range(NUM_CLIENTS):
        model = build_model(job, ALLOWED, device=torch.device("cpu"), fresh=True).eval()
        model.load_state_dict({**shared, **own[client]})
        x, y = rows_to_test(client)
        right.append(model(x).argmax(1) == y)
    return torch.cat(right).double().mean().item()


def test_personal_layers_have_the_bits_of_plain_rounds_and_stay(tmp_path: Path) -> None:
    wire = tmp_path / "wire"
    wire.mkdir()
    spec = personal_job(*HEAD_AND_STATISTICS)
    plain = federated(MODEL, num_clients=NUM_CLIENTS, rounds=ROUNDS, data=user_data("per_client"))
    expected, kept = personal_rounds(plain, ALLOWED, HEAD_AND_STATISTICS)
    cluster = LocalCluster(
        workers=NUM_CLIENTS,
        threads=1,
        data_dir=tmp_path / "cluster",
        import_path=[ROOT],
        allow=[ALLOW],
        programs={
            "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
            "worker": [sys.executable, str(RECORDED_WORKER)],
        },
        environment={"TEST_WIRE": str(wire)},
        worker_arguments=sites_of(tmp_path),
    )
    with cluster, cluster.client() as client:
        outcome = train(client, spec)
        for patterns, why in ((["head.*"], "fits no tensor"), (["*"], "share nothing")):
            with pytest.raises(UserCodeError, match=why):
                outcome_of(client.submit(personal_job(*patterns)))
    assert_same_bits(outcome.state, expected.state)
    assert outcome.status.reproducible
    last = []
    for number in range(NUM_CLIENTS):
        folder = tmp_path / "cluster" / f"worker-{number}" / f"clients-worker-{number}"
        files = sorted((folder / outcome.run.run_id / f"client-{number}").iterdir())
        assert [file.name for file in files][-1] == f"round-{ROUNDS}.safetensors"
        last.append({name.removeprefix("model/"): t for name, t in load_file(files[-1]).items()})
        assert_same_bits(last[-1], kept[ROUNDS][number])
    worth = accuracy(spec, expected.state, last)
    assert outcome.status.metrics["test.accuracy"] == pytest.approx(worth, rel=1e-12)

    received = b"".join(path.read_bytes() for path in sorted(wire.iterdir()))
    built = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True).state_dict()
    assert built["0.weight"].numpy().tobytes()[:64] in received  # so is what did cross
    assert outcome.of("UpdateReceived")[0].payload["client_state"].encode() in received
    for own in (own for of_clients in kept for own in of_clients.values()):
        for name, tensor in own.items():
            if tensor.unique().numel() > 1:  # zeros are everywhere
                assert tensor.numpy().tobytes()[:16] not in received, name
