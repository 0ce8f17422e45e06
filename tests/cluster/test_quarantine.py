"""A worker that is quarantined by a strategy, and what it takes to give it work again."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from stratagem.client.course.views import Worker
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import ALLOWED, Outcome, assert_same_bits, data_parallel, train
from tests.crash.rig import until
from tests.jobs import ALLOW, job
from tests.reference.loops import sharded_loop
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("a quarantined worker gets no work until it is released, by no restart"),
]

SUSPECT: Final = "worker-0"
WHY: Final = "segment 2 was computed again, with other bits"
STRATEGY: Final = f"""
from dataclasses import replace

from stratagem.coordinator.core.facts import WorkerQuarantined
from stratagem.coordinator.strategies.synchronous.party import SegmentRules
from stratagem.coordinator.strategies.synchronous.strategy import synchronous

PLAIN = synchronous(lambda job: SegmentRules(2, 1))


def decide(job, value, world, now_s):
    suspect = world.workers.get({SUSPECT!r})
    is_found = value.committed is not None and value.committed.segment == 2
    if is_found and suspect is not None and not suspect.quarantine:
        return WorkerQuarantined(worker_id={SUSPECT!r}, reason={WHY!r})
    return PLAIN.decide(job, value, world, now_s)


STRATEGY = replace(PLAIN, decide=decide)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Of two workers, whose coordinator has a strategy that finds fault with one of them."""
    site = tmp_path / "site"
    metadata = site / "wary-1.dist-info"
    metadata.mkdir(parents=True)
    (site / "wary.py").write_text(STRATEGY)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wary\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[stratagem.strategies]\nWary = wary:STRATEGY\n")
    coordinator = [sys.executable, "-m", "stratagem.coordinator"]
    with LocalCluster(
        workers=2,
        threads=1,
        data_dir=tmp_path / "cluster",
        import_path=[ROOT],
        allow=[ALLOW],
        programs={
            "coordinator": ["/usr/bin/env", f"PYTHONPATH={site}", *coordinator],
            "worker": [sys.executable, "-m", "stratagem.worker"],
        },
    ) as cluster:
        yield cluster


def members_of(outcome: Outcome) -> list[list[str]]:
    """The members of each membership."""
    formed = [event.payload["members"] for event in outcome.of("MembersFormed")]
    return [sorted(each["worker_id"] for each in members) for members in formed]


def suspect_of(client: Client) -> Worker:
    (found,) = (each for each in client.workers() if each.worker_id == SUSPECT)
    return found


def test_work_goes_on_elsewhere_until_the_release(cluster: LocalCluster) -> None:
    plain = job(strategy=data_parallel(2))
    expected = sharded_loop(plain, ALLOWED, 2).state
    with cluster.client() as client:
        until(lambda: len(client.workers()) == 2, "both are registered")
        wary = job(strategy={"type": "Custom", "coordinator": "Wary", "config": None})
        outcome = train(client, wary)
        assert_same_bits(outcome.state, expected)
        assert members_of(outcome)[-2:] == [["worker-0", "worker-1"], ["worker-1"]]
        assert f"{SUSPECT} left" in outcome.of("MembersFormed")[-1].payload["reason"]
        assert (suspect_of(client).quarantine, suspect_of(client).is_alive) == (WHY, True)

        before = suspect_of(client).incarnation
        cluster.kill("coordinator")
        cluster.kill(SUSPECT)
        cluster.wait_restarted("coordinator", 1)
        until(lambda: suspect_of(client).incarnation != before, "it is registered again")
        assert (suspect_of(client).quarantine, suspect_of(client).is_alive) == (WHY, True)
        outcome = train(client, plain)
        assert_same_bits(outcome.state, expected)
        assert members_of(outcome) == [["worker-1"]]

        client.release_worker(SUSPECT)
        assert suspect_of(client).quarantine == ""
        outcome = train(client, plain)
        assert_same_bits(outcome.state, expected)
        assert members_of(outcome) == [["worker-0", "worker-1"]]
