"""A coordinator that reads a long journal lives meanwhile, and keeps no state that nobody needs."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.common.base.ids import RunId
from stratagem.common.rpc.health_probe import health_of
from stratagem.coordinator.store.journal import Journal, Record
from stratagem.coordinator.store.lead import Holder
from tests.coordinator.core.jobs import LOCAL as ONE_WORKER
from tests.coordinator.core.jobs import job_text
from tests.coordinator.core.simulation import Simulation, start
from tests.crash.hands import hands
from tests.crash.jobs import JOBS, LOCAL, crash_job
from tests.crash.rig import outcome_of, until
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("a coordinator with a long journal answers, and keeps no old states"),
]

NUM_RUNS = 1000


def test_states_that_took_each_others_place_are_gone_soon_after() -> None:
    with LocalCluster(workers=1, threads=1, import_path=(ROOT,)) as cluster:
        blobs = cluster.folder / "coordinator" / "blobs"
        with cluster.client() as client:
            run = client.submit(crash_job(LOCAL, every=1) | {"retention": 1})
            assert len(outcome_of(run).digests) == 13
            until(lambda: len(list(blobs.glob("??/*"))) == 1, "the last one is left")
            assert run.download(cluster.folder / "final.safetensors").exists()
            outcome_of(client.submit(JOBS["Scaffold"] | {"retention": 1}))
            count = 1 + 1 + 3  # its last one, and what each of its three clients keeps
            until(lambda: len(list(blobs.glob("??/*"))) == count, "the newest ones are left")


def test_probes_find_a_coordinator_alive_that_reads_and_a_killed_one_has_not_read_for_nothing(
    tmp_path: Path,
) -> None:
    ended = start(job_text(ONE_WORKER), "a")
    ended.run()
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "journal.sqlite"
    num_facts = _write(path, ended)
    with hands(tmp_path, "--health-port", "0") as started:
        first = started.coordinator("first")
        until(lambda: "health_port=" in first.log_file.read_text(), "probes are served")
        health = f"127.0.0.1:{first.log_file.read_text().partition('health_port=')[2].split()[0]}"
        until(lambda: _num_summaries(path) > 0, "some runs are summed up")
        answers = health_of(health), health_of(health, service="live")
        first.kill()
        said = first.log_file.read_text()
        summed_up = _num_summaries(path)
        second = started.coordinator("second")
        assert second.address
        replayed = second.log_file.read_text()
    if "journal replayed" not in said:  # else the machine was too fast to be killed in between
        assert answers == ("NOT_SERVING", "SERVING")
        assert 0 < summed_up < NUM_RUNS
    assert f"summaries={summed_up}" in replayed
    assert f"facts={num_facts}" not in replayed
    assert _num_summaries(path) == NUM_RUNS


def _write(path: Path, ended: Simulation) -> int:
    """Many runs that a version without summaries has left; how many facts they are."""
    of_one = [fact for fact in ended.journal if fact[0]]
    journal = Journal.open(path)
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
    for number in range(NUM_RUNS):
        records = [
            Record(RunId(f"run-{number}"), seq, kind, 1, payload, time_s, 0.0)
            for seq, (_, kind, payload, time_s) in enumerate(of_one)
        ]
        journal.append(lead.term, records)
    journal.release(lead.term)
    journal.close()
    return NUM_RUNS * len(of_one)


def _num_summaries(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT count(*) FROM summary").fetchone()[0])
