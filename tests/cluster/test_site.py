"""Sites that decide by their own files: what they take part in, and every byte that leaves them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.common.audit.audit_chain import check_lines
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import load_job
from stratagem.common.strategy import Federated
from tests.cluster.jobs import outcome_of, train
from tests.repository import ROOT

pytestmark = pytest.mark.cluster

EXAMPLE = ROOT / "examples" / "sites"
NUM_SITES = 3


def lines_of(folder: Path, ward: int) -> list[dict[str, Any]]:
    """The audit of a site, which is whole."""
    file = folder / f"site-{ward}" / "audit.jsonl"
    with file.open("rb") as lines:
        assert not check_lines(lines).is_torn
    return [json.loads(line) for line in file.read_text().splitlines()]


def site_files(folder: Path) -> list[Path]:
    """The example's file, once for each of three sites with rows of their own."""
    text = (EXAMPLE / "st-anna.toml").read_text()
    files = []
    for ward in range(NUM_SITES):
        file = folder / f"site-{ward}" / "site.toml"
        file.parent.mkdir()
        own = text.replace("ward = 0", f"ward = {ward}")
        file.write_text(own.replace('site = "st-anna"', f'site = "site-{ward}"'))
        files.append(file)
    return files


def cluster_of(folder: Path, files: list[Path], **more: Any) -> LocalCluster:
    return LocalCluster(
        workers=len(files),
        threads=1,
        data_dir=folder / "cluster",
        import_path=[ROOT],
        allow=[],
        allow_code="none",
        worker_arguments={
            f"worker-{number}": ["--site", str(file)] for number, file in enumerate(files)
        },
        **more,
    )


def test_three_sites_train_digits_and_write_down_what_left(tmp_path: Path) -> None:
    files = site_files(tmp_path)
    job = load_job(EXAMPLE / "digits.yaml")
    with cluster_of(tmp_path, files) as cluster, cluster.client() as client:
        outcome = train(client, job)
        run_id = outcome.run.run_id
        assert isinstance(job.strategy, Federated)
        longer = job.model_copy(update={"strategy": replace(job.strategy, rounds=41)})
        refused = client.submit(longer)
        with pytest.raises(UserCodeError, match=r"max_rounds: strategy.rounds 41 is more than 40"):
            outcome_of(refused)
    assert outcome.status.metrics["test.accuracy"] > 0.9
    assert len(outcome.of("UpdateReceived")) == 20 * NUM_SITES
    for ward in range(NUM_SITES):
        lines = lines_of(tmp_path, ward)
        rounds = [line for line in lines if line["kind"] == "round"]
        assert [line["round"] for line in rounds] == list(range(1, 21))
        assert {line["run"] for line in rounds} == {run_id}
        assert {line["rows"] for line in rounds} == {479}
        assert {line["rule"] for line in rounds} == {1}
        refusals = [line for line in lines if line["kind"] == "refusal"]
        assert refusals
        assert all("max_rounds" in line["reason"] for line in refusals)
