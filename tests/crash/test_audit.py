"""Sites whose workers are killed around the lines of their audit: the run ends with the same bits,
and the audit is whole and has a line for each update that has left."""

from collections.abc import Iterator

import pytest

from tests.crash.failpoint_table import ONLY_AT_A_SITE
from tests.crash.jobs import FED_AVG, Job, crash_job
from tests.crash.site_rig import NUM_SITES, SiteRig, sites_in
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.timeout(4 * PATIENCE_S),
    pytest.mark.promise("The audit of a site is whole whenever its worker dies."),
]


def file_of(number: int) -> str:
    return f"""
entrypoint = "tests.userland.data:classes"
kwargs = {{num_rows = {20 + 7 * number}}}
---
metrics = ["accuracy"]
"""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteRig]:
    with sites_in(tmp_path_factory.mktemp("sites"), file_of) as made:
        yield made


def site_job() -> Job:
    strategy = {**FED_AVG, "num_clients": NUM_SITES}
    return {**crash_job(strategy), "data": {"worker_local": "ward"}}


CASES = [
    ("worker.audit.within_line", 3),
    ("worker.audit.before_line", 2),
    ("worker.audit.after_line", 0),
]


def test_every_failpoint_of_the_audit_is_tried() -> None:
    assert {name for name, _ in CASES} == ONLY_AT_A_SITE


@pytest.mark.parametrize(
    ("failpoint", "num_passed"),
    [
        pytest.param(*case, marks=pytest.mark.sweep if number else pytest.mark.cluster)
        for number, case in enumerate(CASES)
    ],
)
def test_a_crash_beside_a_line_changes_no_bits(
    sites: SiteRig, failpoint: str, num_passed: int
) -> None:
    rig, job = sites.rig, site_job()
    rig.settle()
    expected = rig.outcome(job)
    num_torn = sites.checked(1).num_torn
    num_before = len(sites.rounds(1))
    with rig.armed("worker-1", failpoint, num_passed):
        outcome = rig.outcome(job)
    assert outcome == expected
    checked = sites.checked(1)
    assert not checked.is_torn
    assert checked.num_torn - num_torn == (failpoint == "worker.audit.within_line")
    by_round: dict[int, set[str]] = {}
    for line in sites.rounds(1)[num_before:]:
        by_round.setdefault(line["round"], set()).add(line["update"])
    assert sorted(by_round) == list(range(1, max(by_round) + 1))
    assert all(len(updates) == 1 for updates in by_round.values())  # redone: the same update


@pytest.mark.sweep
def test_a_coordinator_that_dies_needs_no_second_update(sites: SiteRig) -> None:
    rig, job = sites.rig, site_job()
    rig.settle()
    expected = rig.outcome(job)
    num_before = len(sites.rounds(0))
    with rig.armed("coordinator", "coordinator.round.pulled", 1):
        outcome = rig.outcome(job)
    assert outcome == expected
    assert not sites.checked(0).is_torn
    rounds = [line["round"] for line in sites.rounds(0)[num_before:]]
    assert rounds == sorted(set(rounds))
