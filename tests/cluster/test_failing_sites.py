"""Sites with rows of their own, on real processes: one that fails does not end the federation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.worker.models.build import build_model
from tests.cluster.jobs import ALLOWED, Outcome, cluster_of, federated, train, wait_for
from tests.userland.data import rows_of
from tests.userland.metrics import macro_f1

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("a site that fails does not end its federation"),
]

SITES = ("anna", "berta", "clara")


def rows_at(folder: Path, site: str, **changes: Tensor) -> Path:
    """A site's own file."""
    number = SITES.index(site)
    train_x, train_y = rows_of(30 + number, seed=100 + number)
    test_x, test_y = rows_of(7, seed=200 + number)
    tensors = {"train.x": train_x, "train.y": train_y, "test.x": test_x, "test.y": test_y}
    path = folder / f"{site}.safetensors"
    save_file(
        {name: each for name, each in {**tensors, **changes}.items() if each is not None}, path
    )
    return path


@contextmanager
def sites(folder: Path, files: dict[str, Path]) -> Iterator[tuple[LocalCluster, Client]]:
    """A cluster of three workers, each with a file of its own."""
    arguments = [["--local-data", f"ward={path}"] for path in files.values()]
    with cluster_of(folder, arguments) as cluster, cluster.client() as client:
        yield cluster, client


def federation(**changes: Any) -> Any:
    return federated(**{"num_clients": 3, "rounds": 2, "data": {"worker_local": "ward"}, **changes})


def clients_of(outcome: Outcome) -> list[list[int]]:
    """Of each round, those whose updates made it."""
    closed = [event.payload["accepted"] for event in outcome.of("RoundClosed")]
    return [[each["client"] for each in accepted] for accepted in closed]


def test_a_site_whose_rows_do_not_fit_is_left_out_from_the_build_on(tmp_path: Path) -> None:
    """Worker-0, the first to build, has no labels; worker-2 has rows of another width."""
    files = {site: rows_at(tmp_path, site) for site in SITES}
    rows_at(tmp_path, "clara", **{"train.x": torch.randn(32, 5), "test.x": torch.randn(7, 5)})
    files["anna"].write_bytes(b"no safetensors")
    with sites(tmp_path, files) as (_, client):
        outcome = train(client, federation(evaluation={"split": "test", "metrics": ["accuracy"]}))
    (unfit,) = {event.sentence.partition(" ")[0] for event in outcome.of("BuildFailed")} or {""}
    assert unfit in ("", "worker-0")  # whichever was asked to build
    assert clients_of(outcome) == [[1], [1]]
    rejected = [(e.payload["round_num"], e.payload["client"]) for e in outcome.of("UpdateRejected")]
    assert sorted(rejected) == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert "rejected: client 0 (worker-0) in 2 rounds" in outcome.status.reason
    assert 0 <= outcome.status.metrics["test.accuracy"] <= 1


def test_a_round_that_waits_takes_a_site_that_was_mended_and_started_anew(tmp_path: Path) -> None:
    files = {site: rows_at(tmp_path, site) for site in SITES}
    rows_at(tmp_path, "berta", **{"train.x": torch.randn(31, 5)})
    options = {"quorum": 3, "on_missing_quorum": "wait"}
    with sites(tmp_path, files) as (cluster, client):
        run = client.submit(federation(options=options))
        wait_for(run, "RoundWaits")
        assert "2 of 3 updates" in wait_for(run, "RoundWaits")[0].sentence
        status = run.status()
        assert "1 rejected (client 1 (worker-1): RuntimeError" in status.reason
        rows_at(tmp_path, "berta")
        cluster.kill("worker-1")
        status = run.result().status
    assert status.reason.startswith("2 rounds committed")
    assert not status.reproducible


def test_metrics_have_their_spread_over_sites_and_own_ones_only_that(tmp_path: Path) -> None:
    """Macro-F1 is no sum over rows: no value is published under its own name."""
    files = {site: rows_at(tmp_path, site) for site in SITES}
    own = "tests.userland.metrics:macro_f1"
    evaluation = {"split": "test", "metrics": ["accuracy", own]}
    spec = federation(evaluation=evaluation)
    with sites(tmp_path, files) as (_, client):
        outcome = train(client, spec)
    model = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True)
    model.load_state_dict(outcome.state)
    accuracies, scores = [], []
    for path in files.values():
        rows = load_file(path)
        outputs, targets = model(rows["test.x"]), rows["test.y"]
        accuracies.append((outputs.argmax(1) == targets).double().mean().item())
        scores.append(macro_f1(outputs, targets))
    found = outcome.status.metrics
    for name, values in (("test.accuracy", accuracies), (f"test.{own}", scores)):
        assert found[f"{name}.client_min"] == pytest.approx(min(values), abs=1e-12)
        assert found[f"{name}.client_median"] == pytest.approx(sorted(values)[1], abs=1e-12)
        assert found[f"{name}.client_max"] == pytest.approx(max(values), abs=1e-12)
    assert found[f"test.{own}.client_mean"] == pytest.approx(sum(scores) / 3, abs=1e-12)
    assert f"test.{own}" not in found
    assert found["test.accuracy"] == pytest.approx(sum(accuracies) / 3, abs=1e-12)
