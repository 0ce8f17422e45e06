"""Sites whose workers are killed around the lines of their audit: the run ends with the same bits,
and the audit is whole and has a line for each update that has left."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.common.audit.audit_chain import CheckedAudit, check_lines
from tests.crash.failpoint_table import ONLY_AT_A_SITE
from tests.crash.jobs import FED_AVG, Job, crash_job
from tests.crash.rig import WORKER_TTL_S, Rig
from tests.patience import PATIENCE_S
from tests.repository import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(4 * PATIENCE_S)]

NUM_SITES = 2
FILE = """
site = "site-{number}"
[data.ward]
entrypoint = "tests.userland.data:classes"
kwargs = {{num_rows = {num_rows}}}
[[accept]]
data = ["ward"]
entrypoints = ["tests.userland.*:*"]
metrics = ["accuracy"]
"""


@dataclass
class SiteRig:
    rig: Rig
    folder: Path

    def audit(self, number: int) -> Path:
        return self.folder / f"site-{number}" / "audit.jsonl"

    def checked(self, number: int) -> CheckedAudit:
        with self.audit(number).open("rb") as lines:
            return check_lines(lines)

    def lines(self, number: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit(number).read_text().splitlines()]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteRig]:
    folder = tmp_path_factory.mktemp("sites")
    arguments = {}
    for number in range(NUM_SITES):
        file = folder / f"site-{number}" / "site.toml"
        file.parent.mkdir()
        file.write_text(FILE.format(number=number, num_rows=20 + 7 * number))
        arguments[f"worker-{number}"] = ["--site", str(file)]
    cluster = LocalCluster(
        workers=NUM_SITES,
        threads=1,
        failpoints=True,
        import_path=(ROOT,),
        allow=[],
        allow_code="none",
        worker_arguments=arguments,
        environment={
            "STRATAGEM_COORDINATOR_WORKER_TTL_S": str(WORKER_TTL_S),
            "STRATAGEM_COORDINATOR_HEARTBEAT_INTERVAL_S": "1",
        },
    )
    with cluster, cluster.client() as client:
        yield SiteRig(Rig(cluster, client), folder)


def site_job() -> Job:
    strategy = {**FED_AVG, "num_clients": NUM_SITES}
    return {**crash_job(strategy), "data": {"worker_local": "ward"}}


CASES = [
    ("worker.audit.before_line", 0),
    ("worker.audit.before_line", 2),
    ("worker.audit.within_line", 0),
    ("worker.audit.within_line", 3),
    ("worker.audit.after_line", 0),
    ("worker.audit.after_line", 3),
]


def test_every_failpoint_of_the_audit_is_tried() -> None:
    assert {name for name, _ in CASES} == ONLY_AT_A_SITE


@pytest.mark.parametrize(
    ("failpoint", "num_passed"),
    [pytest.param(*case, marks=[pytest.mark.sweep] if case[1] else []) for case in CASES],
)
def test_a_crash_beside_a_line_changes_no_bits(
    sites: SiteRig, failpoint: str, num_passed: int
) -> None:
    rig, job = sites.rig, site_job()
    rig.settle()
    expected = rig.outcome(job)
    num_torn = sites.checked(1).num_torn
    num_before = len(sites.lines(1))
    with rig.armed("worker-1", failpoint, num_passed):
        outcome = rig.outcome(job)
    assert outcome == expected
    checked = sites.checked(1)
    assert not checked.is_torn
    assert checked.num_torn - num_torn == (failpoint == "worker.audit.within_line")
    rounds = [line for line in sites.lines(1)[num_before:] if line["kind"] == "round"]
    by_round: dict[int, set[str]] = {}
    for line in rounds:
        by_round.setdefault(line["round"], set()).add(line["update"])
    assert sorted(by_round) == list(range(1, max(by_round) + 1))
    assert all(len(updates) == 1 for updates in by_round.values())  # redone: the same update


def test_a_coordinator_that_dies_needs_no_second_update(sites: SiteRig) -> None:
    rig, job = sites.rig, site_job()
    rig.settle()
    expected = rig.outcome(job)
    num_before = len(sites.lines(0))
    with rig.armed("coordinator", "coordinator.round.pulled", 1):
        outcome = rig.outcome(job)
    assert outcome == expected
    assert not sites.checked(0).is_torn
    rounds = [line["round"] for line in sites.lines(0)[num_before:] if line["kind"] == "round"]
    assert rounds == sorted(set(rounds))
