"""Metrics of the user's own over sites with rows of their own, on real processes: the value over
all rows where states are added up, and what a site keeps to itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec
from stratagem.worker.models.build import build_model
from tests.cluster.jobs import ALLOWED, Outcome, cluster_of, federated, outcome_of, train
from tests.reference.summed_metrics import merged
from tests.userland.data import rows_of
from tests.userland.metrics import ClassCounts, Confidence
from tests.userland.models import NUM_FEATURES

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("metrics of sites are merged over all rows, by their files"),
]

COUNTS, CONFIDENCE, KEPT = (
    f"tests.userland.metrics:{name}" for name in ("ClassCounts", "Confidence", "KeptRows")
)
TEST_ROWS = (7, 1, 0, 23)
"""Of each site: no batch of 4 divides them, and one site has none."""
FILE = """
site = "site-{number}"
[data.ward]
file = "ward.safetensors"
[[accept]]
data = ["ward"]
entrypoints = ["tests.userland.*:*"]
metrics = [{metrics}]
report = "{report}"
"""


def evaluation(*metrics: str, **more: Any) -> dict[str, Any]:
    return {"split": "test", "metrics": [*metrics], "batch_size": 4, **more}


def ward_job(num_sites: int, **sections: Any) -> JobSpec:
    return federated(num_clients=num_sites, rounds=2, data={"worker_local": "ward"}, **sections)


def rows_at(folder: Path, num_test_rows: tuple[int, ...]) -> list[Path]:
    files = []
    for number, num_rows in enumerate(num_test_rows):
        train_x, train_y = rows_of(11 + number, seed=50 + number)
        test_x, test_y = rows_of(num_rows, seed=60 + number) if num_rows else nothing()
        tensors = {"train.x": train_x, "train.y": train_y, "test.x": test_x, "test.y": test_y}
        path = folder / f"site-{number}" / "ward.safetensors"
        path.parent.mkdir()
        save_file(tensors, path)
        files.append(path)
    return files


def nothing() -> tuple[Tensor, Tensor]:
    return torch.zeros(0, NUM_FEATURES), torch.zeros(0, dtype=torch.int64)


def batches_of(spec: JobSpec, outcome: Outcome, file: Path) -> list[tuple[Tensor, Tensor]]:
    """What the last state makes of a site's rows, batch by batch."""
    model = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True)
    model.load_state_dict(outcome.state)
    rows = load_file(file)
    pairs = zip(rows["test.x"].split(4), rows["test.y"].split(4), strict=True)
    with torch.no_grad():
        return [(model.eval()(x), y) for x, y in pairs if len(y)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, list[Path]]]:
    """Four sites without files of rules."""
    folder = tmp_path_factory.mktemp("wards")
    files = rows_at(folder, TEST_ROWS)
    cluster = cluster_of(folder, [["--local-data", f"ward={file}"] for file in files])
    with cluster, cluster.client() as client:
        yield client, files


def test_the_value_over_all_sites_has_the_bits_of_one_loop(
    plain: tuple[Client, list[Path]],
) -> None:
    """Counts also those of one object that sees the rows of all sites, one after the other."""
    client, files = plain
    best = {"best": f"{COUNTS}.f1", "mode": "max"}
    spec = ward_job(len(files), evaluation=evaluation("accuracy", COUNTS, CONFIDENCE, KEPT, **best))
    outcome = train(client, spec)
    found, sites = outcome.status.metrics, [batches_of(spec, outcome, file) for file in files]
    one = ClassCounts()
    for output, target in (batch for batches in sites for batch in batches):
        one.update(output, target)
    assert {name: found[f"test.{COUNTS}.{name}"] for name in ("f1", "rows")} == one.compute()
    assert one.compute() == merged(ClassCounts, ClassCounts.summed_states, sites)
    expected = merged(Confidence, ("total", "count"), [batches for batches in sites if batches])
    assert found[f"test.{CONFIDENCE}"] == float(expected)
    assert found[f"test.{CONFIDENCE}.client_min"] <= found[f"test.{CONFIDENCE}.client_mean"]
    assert f"test.{KEPT}" not in found
    assert f"test.{KEPT}.client_mean" in found
    said = {event.payload["client"]: event.payload for event in outcome.of("ClientEvaluated")}
    assert said[0]["summed"] == [f"test.{COUNTS}.f1".rpartition(".")[0], f"test.{CONFIDENCE}"]
    assert [said[n]["own"] == {} for n in range(4)] == [False, False, True, False]
    assert outcome.status.reproducible
    assert [event.payload["clients"] for event in outcome.of("MetricsMerged")] == [[0, 1, 3]] * 2


def test_a_metric_that_cannot_be_merged_keeps_no_other_from_it(
    plain: tuple[Client, list[Path]],
) -> None:
    client, files = plain
    few, shapes = (f"tests.userland.metrics:{name}" for name in ("FewRows", "RowsAsShape"))
    spec = ward_job(len(files), evaluation=evaluation(few, shapes, COUNTS))
    outcome = train(client, spec)
    assert outcome.status.metrics[f"test.{COUNTS}.rows"] == sum(TEST_ROWS)
    for event in outcome.of("MetricsMerged"):
        unmerged = event.payload["unmerged"]
        assert unmerged.keys() == {f"test.{few}", f"test.{shapes}"}
        assert unmerged[f"test.{few}"] == "ValueError"
        assert "at client 1, and float64" in unmerged[f"test.{shapes}"]
        assert f"test.{few} is not merged: ValueError" in event.sentence
    for name in (f"test.{few}.rows", f"test.{shapes}"):
        assert name not in outcome.status.metrics
    alone = train(client, ward_job(len(files), evaluation=evaluation(few)))
    reasons = [event.payload["reason"] for event in alone.of("MetricsMerged")]
    assert len(reasons) == 2 * 3, "three workers have tried in each round"
    assert all("ValueError: too many rows" in reason for reason in reasons)


@pytest.mark.parametrize("metric", [KEPT, "tests.userland.metrics:macro_f1"])
def test_nothing_follows_a_metric_that_has_no_value_over_all_rows(
    plain: tuple[Client, list[Path]], metric: str
) -> None:
    client, files = plain
    refused = client.submit(ward_job(len(files), evaluation=evaluation(metric, best=metric)))
    with pytest.raises(UserCodeError, match=r"write tests.userland.metrics:\w+.client_mean"):
        outcome_of(refused)
    followed = evaluation(metric, best=f"{metric}.client_mean", mode="max")
    outcome = train(client, ward_job(len(files), evaluation=followed))
    assert f"test.{metric}.client_mean" in outcome.status.metrics


def sites_of(folder: Path, *reports: str) -> LocalCluster:
    files = rows_at(folder, (7, 1))
    arguments = []
    for number, (file, report) in enumerate(zip(files, reports, strict=True)):
        text = FILE.format(number=number, report=report, metrics=f'"{COUNTS}", "{KEPT}"')
        file.with_name("site.toml").write_text(text)
        arguments.append(["--site", str(file.with_name("site.toml"))])
    return cluster_of(folder, arguments, allow=[], allow_code="none")


def test_sites_send_sums_by_their_file_and_a_site_that_reports_nothing_sends_none(
    tmp_path: Path,
) -> None:
    spec = ward_job(2, evaluation=evaluation(COUNTS, KEPT))
    with sites_of(tmp_path, "sums", "none") as cluster, cluster.client() as client:
        outcome = train(client, spec)
    (said, none) = sorted(
        (event.payload for event in outcome.of("ClientEvaluated") if event.payload["segment"] == 2),
        key=lambda payload: payload["client"],
    )
    assert said["summed"] == [f"test.{COUNTS}"]
    assert (none["summed"], none["own"], none["sums"], none["states"]) == ([], {}, {}, "")
    assert "report" in none["reason"]
    one = ClassCounts()
    file = tmp_path / "site-0" / "ward.safetensors"
    for output, target in batches_of(spec, outcome, file):
        one.update(output, target)
    assert outcome.status.metrics[f"test.{COUNTS}.rows"] == 7.0
    assert outcome.status.metrics[f"test.{COUNTS}.f1"] == one.compute()["f1"]
    assert f"test.{KEPT}" not in outcome.status.metrics
    audits = [(tmp_path / f"site-{number}" / "audit.jsonl").read_text() for number in (0, 1)]
    assert '"outcome": "measure_sums"' in audits[0] or '"outcome":"measure_sums"' in audits[0]
    assert "measure_sums" not in audits[1]
