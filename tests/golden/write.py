"""Writes the golden journal of a version: python -m tests.golden.write 0.2.0

Runs a small job of each strategy on a cluster of real processes, with what may happen to a run (a
lost worker, a stop and a resumption, an exception, a deletion), leaves two runs in their middle,
and writes the journal as SQL and what it replays to as JSON. Made once for each release, with its
code, and committed; what was written once is never written anew.
"""

import asyncio
import re
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from stratagem.client.local.cluster import LocalCluster
from stratagem.common.base.errors import RunFailedError, UserCodeError
from tests.crash.jobs import ALL_REDUCE, FED_AVG, JOBS, LOCAL, PACED, crash_job, federated
from tests.crash.rig import Rig, await_event, await_step
from tests.golden.replay import FOLDER, load, replay, summary_of
from tests.repository import ROOT

STRATEGIES = (
    *("Local", "AllReduce", "ParameterServer", "Coded", "Gossip", "Pipeline"),
    *("FedAvg", "FedYogi", "Silos", "Population"),
)


def main(version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        _make_history(data)
        with sqlite3.connect(data / "coordinator" / "journal.sqlite") as connection:
            sql = "\n".join(connection.iterdump())
        connection.close()
    target = FOLDER / f"{version}.sql"
    # The traceback of the exception names the places of this machine.
    target.write_text(re.sub(r'\\"/[^"]*?/(?=\w+/stratagem/)', r"\"/", sql) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(replay(load(target, Path(folder) / "journal.sqlite")))
    target.with_suffix(".json").write_text(summary_of(found))


def _make_history(data: Path) -> None:
    cluster = LocalCluster(workers=3, threads=1, import_path=(ROOT,), data_dir=data)
    with cluster, cluster.client() as client:
        rig = Rig(cluster, client)
        rig.settle()
        for name in STRATEGIES:
            client.submit(JOBS[name], f"golden-{name.lower()}").result()
        quorum = {**federated(num_clients=4), "options": {"quorum": 2, "round_deadline_s": 30.0}}
        client.submit(crash_job(quorum), "golden-quorum").result()
        paced = crash_job(ALL_REDUCE, model=PACED, pace_s=0.1)
        killed = client.submit(paced, "golden-killed")
        await_step(killed, 3)
        cluster.kill("worker-0")
        killed.result()
        rig.settle()
        resumed = client.submit(crash_job(LOCAL, model=PACED, pace_s=0.1), "golden-resumed")
        await_event(resumed, "SegmentCommitted")
        resumed.cancel()
        _ends_by(RunFailedError, resumed.result)
        resumed.resume()
        resumed.result()
        failed = client.submit(crash_job(LOCAL, model="nothing"), "golden-failed")
        _ends_by(UserCodeError, failed.result)
        deleted = client.submit(JOBS["Local"], "golden-deleted")
        deleted.result()
        deleted.delete()
        unfinished = crash_job(FED_AVG, model=PACED, pace_s=3.0)
        await_event(client.submit(unfinished, "golden-unfinished"), "ClientsAssigned")
        client.submit(crash_job(LOCAL, model=PACED, pace_s=3.0), "golden-waiting")


def _ends_by(error: type[Exception], wait: Callable[[], object]) -> None:
    try:
        wait()
    except error:
        return
    raise AssertionError("the run has completed")


if __name__ == "__main__":
    main(sys.argv[1])
