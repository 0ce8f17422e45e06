"""What each client keeps to itself, rows, layers, models and control variates: the same bits as the
plain rounds, and nothing of them leaves a site. Every byte that the coordinator gets is looked at,
so the workers are others than those of the folder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec
from stratagem.worker.models.build import build_model
from tests.cluster.jobs import (
    ALLOWED,
    Outcome,
    assert_same_bits,
    cluster_of,
    federated,
    outcome_of,
    train,
)
from tests.jobs import user_data
from tests.reference.ditto_rounds import ditto_rounds
from tests.reference.personal_rounds import Own, personal_rounds
from tests.reference.scaffold_rounds import Scaffold
from tests.userland.data import per_client, rows_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("rows, layers and models of a client's own stay with it, to the byte"),
]

RECORDED_WORKER = Path(__file__).with_name("recorded_worker.py")
NUM_CLIENTS, ROUNDS = 3, 3
EVALUATION = {"split": "test", "metrics": ["accuracy"], "batch_size": 4}
MODEL = "batch_norm_mlp"
HEAD_AND_STATISTICS = ["3.*", "1.running_*"]


def rows_to_test(client: int) -> tuple[Tensor, Tensor]:
    return rows_of(7, seed=60 + client)


def sites_of(folder: Path) -> list[list[str]]:
    """Arguments of workers with the rows of `per_client`, 40 for three, and with rows to test."""
    arguments = []
    for client in range(NUM_CLIENTS):
        x, y = per_client(client, NUM_CLIENTS)["train"]
        test_x, test_y = rows_to_test(client)
        file = folder / f"ward-{client}.safetensors"
        tensors = {"train.x": x, "train.y": y, "test.x": test_x, "test.y": test_y}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        arguments.append(["--local-data", f"ward={file}"])
    return arguments


@dataclass(frozen=True, slots=True)
class Sites:
    """Three sites, and all that has left them."""

    folder: Path
    client: Client

    def received(self) -> bytes:
        files = sorted((self.folder / "wire").iterdir())
        return b"".join(path.read_bytes() for path in files)

    def kept(self, outcome: Outcome, number: int) -> Own:
        """What a client keeps after the last round, by the names of its model."""
        name = f"worker-{number}"
        states = self.folder / "cluster" / name / f"clients-{name}"
        newest = states / outcome.run.run_id / f"client-{number}" / f"round-{ROUNDS}.safetensors"
        return {name.partition("/")[2]: tensor for name, tensor in load_file(newest).items()}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    folder = tmp_path_factory.mktemp("sites")
    (folder / "wire").mkdir()
    # What is not sent, as files of one machine are not, is not recorded.
    environment = {"TEST_WIRE": str(folder / "wire"), "STRATAGEM_WORKER_OPEN_FILES": "false"}
    cluster = cluster_of(folder, sites_of(folder), worker=RECORDED_WORKER, environment=environment)
    with cluster, cluster.client() as client:
        yield Sites(folder, client)


def ward_job(**options: Any) -> JobSpec:
    return federated(
        MODEL,
        num_clients=NUM_CLIENTS,
        rounds=ROUNDS,
        data={"worker_local": "ward"},
        evaluation=EVALUATION,
        options=options,
    )


def plain_job() -> JobSpec:
    """The same without anything of the clients' own, for the references."""
    return federated(MODEL, num_clients=NUM_CLIENTS, rounds=ROUNDS, data=user_data("per_client"))


def accuracy(job: JobSpec, shared: Any, own: list[Own]) -> float:
    """Of all test rows, each by the model of its client."""
    right = []
    for client in range(NUM_CLIENTS):
        model = build_model(job, ALLOWED, device=torch.device("cpu"), fresh=True).eval()
        model.load_state_dict({**shared, **own[client]})
        x, y = rows_to_test(client)
        right.append(model(x).argmax(1) == y)
    return torch.cat(right).double().mean().item()


def check_not_sent(received: bytes, own: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        values = tensor.numpy().tobytes()
        windows = [values[start : start + 16] for start in range(0, len(values) - 15, 4)]
        # Zeros are everywhere: on some processors a gradient is exactly zero.
        telling = next((each for each in windows if each.count(0) < 4), None)
        if telling is not None:
            assert telling not in received, name


def traces(rows: Tensor) -> set[bytes]:
    """Pairs of neighbours in every row, in each width in which they might be sent."""
    found = set()
    for row in rows.numpy():
        for start in range(0, len(row) - 1, 2):
            piece = row[start : start + 2]
            found |= {piece.astype(kind).tobytes() for kind in (np.float32, np.float64)}
    return found


def test_personal_layers_have_the_bits_of_plain_rounds_and_stay_as_rows_do(
    sites: Sites,
) -> None:
    spec = ward_job(personal=HEAD_AND_STATISTICS)
    expected, kept = personal_rounds(plain_job(), ALLOWED, HEAD_AND_STATISTICS)
    outcome = train(sites.client, spec)
    for patterns, why in ((["head.*"], "fits no tensor"), (["*"], "share nothing")):
        with pytest.raises(UserCodeError, match=why):
            outcome_of(sites.client.submit(ward_job(personal=patterns)))
    assert_same_bits(outcome.state, expected.state)
    assert outcome.status.reproducible
    last = [sites.kept(outcome, number) for number in range(NUM_CLIENTS)]
    for number, own in enumerate(last):
        assert_same_bits(own, kept[ROUNDS][number])
    worth = accuracy(spec, expected.state, last)
    assert outcome.status.metrics["test.accuracy"] == pytest.approx(worth, rel=1e-12)
    received = sites.received()
    built = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True).state_dict()
    assert built["0.weight"].numpy().tobytes()[:64] in received  # so is what did cross
    assert outcome.of("UpdateReceived")[0].payload["client_state"].encode() in received
    for of_clients in kept:
        for own in of_clients.values():
            check_not_sent(received, own)
    for client in range(NUM_CLIENTS):
        for rows in (per_client(client, NUM_CLIENTS)["train"][0], rows_to_test(client)[0]):
            assert not any(trace in received for trace in traces(rows))


@pytest.mark.sweep
def test_ditto_has_the_bits_of_its_paper_and_leaves_the_global_model_as_it_is(sites: Sites) -> None:
    spec = ward_job(ditto={"lambda": 0.5})
    expected, own = ditto_rounds(plain_job(), ALLOWED, 0.5)
    outcome = train(sites.client, spec)
    assert_same_bits(outcome.state, expected.state)
    last = [sites.kept(outcome, number) for number in range(NUM_CLIENTS)]
    received = sites.received()
    for number, model in enumerate(last):
        assert_same_bits(model, own[number])
        # A bias before batch norm hardly moves, so that of all models is the same.
        check_not_sent(received, {n: t for n, t in model.items() if n.endswith(".weight")})
    worth = accuracy(spec, {}, last)
    assert outcome.status.metrics["test.accuracy"] == pytest.approx(worth, rel=1e-12)


@pytest.mark.sweep
def test_scaffold_has_the_bits_of_its_paper(sites: Sites, tmp_path: Path) -> None:
    spec = ward_job(control="scaffold", local_epochs=2)
    job = federated(
        MODEL,
        num_clients=NUM_CLIENTS,
        rounds=ROUNDS,
        data=user_data("per_client"),
        options={"local_epochs": 2},
    )
    expected = Scaffold(job, ALLOWED)
    outcome = train(sites.client, spec)
    assert_same_bits(outcome.state, expected.state)
    assert outcome.status.reproducible
    outcome.run.download(tmp_path / "state.safetensors")
    state = load_file(tmp_path / "state.safetensors")
    c = {name.removeprefix("control/"): t for name, t in state.items() if "control/" in name}
    assert_same_bits(c, expected.c)
    assert any(tensor.abs().max() > 0 for tensor in c.values())
    received = sites.received()
    for number in range(NUM_CLIENTS):
        own = sites.kept(outcome, number)
        assert_same_bits(own, expected.own[number])
        check_not_sent(received, own)
