"""Workers that torchrun starts: they find their place, and leave when their run has ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client, RunHandle
from tests.cluster.jobs import ALLOWED, assert_same_bits, data_parallel, gates_in, outcome_of
from tests.crash.rig import until
from tests.jobs import ALLOW, job, user_data
from tests.patience import PATIENCE_S
from tests.reference.loops import sharded_loop
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.launch,
    pytest.mark.promise("Workers that torchrun starts, moves and ends train with the same bits."),
]


@contextmanager
def torchrun(
    coordinator: str, run: RunHandle, log: Path, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with two workers for a run."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(*options, "-m", "stratagem.worker", "--rendezvous", "torchrun", "--threads", "1"),
        *("--coordinator", coordinator, "--for-run", run.run_id, "--allow", ALLOW),
        *("--import-path", str(ROOT)),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)


def workers_of(client: Client) -> dict[str, bool]:
    return {each.worker_id: each.is_alive for each in client.workers()}


def test_workers_of_torchrun_train_one_run_and_leave(tmp_path: Path) -> None:
    log = tmp_path / "torchrun.log"
    spec = job(strategy=data_parallel(2))
    with LocalCluster(workers=0) as cluster, cluster.client() as client:
        run = client.submit(spec)
        with torchrun(cluster.address, run, log) as process:
            outcome = outcome_of(run)
            assert process.wait(PATIENCE_S) == 0, log.read_text()
        until(lambda: True not in workers_of(client).values(), "none is taken for alive")
        said = cluster.log_tail("coordinator")
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)
    assert said.count(f"drained after the end of run {run.run_id}") == 2


def test_a_preempted_worker_is_started_again_and_the_bits_stay(tmp_path: Path) -> None:
    log = tmp_path / "torchrun.log"
    spec = job(strategy=data_parallel(2), data=user_data("gated", folder=str(tmp_path)))
    with (
        gates_in(tmp_path) as gates,
        LocalCluster(workers=0) as cluster,
        cluster.client() as client,
    ):
        # After step 7, the first to begin with one who is to leave, the other goes on alone.
        gates.close("batch-6", "batch-8")
        run = client.submit(spec)
        with torchrun(cluster.address, run, log, "--max-restarts", "1") as process:
            gates.wait_reached("batch-6")
            # One alone trains, too, while the other one still starts, and would die of the signal.
            until(lambda: log.read_text().count("registered  ") >= 2, "both are here")
            worker_of_rank(process.pid, 1).send_signal(signal.SIGUSR1)
            until(lambda: log.read_text().count("draining") >= 1, "it has heard that it is to go")
            gates.open("batch-6")
            until(lambda: log.read_text().count("draining") >= 2, "torchrun has ended the other")
            gates.open()
            outcome = outcome_of(run)
            assert process.wait(PATIENCE_S) == 0, log.read_text()
        formed = [event.payload["members"] for event in outcome.of("MembersFormed")]
        starts = [{member["worker_id"][-4:-1] for member in members} for members in formed]
        assert starts[0] == {"-0-"}
        assert starts[-1] == {"-1-"}, "all are started again, under other names"
        assert "exitcode: 75" in log.read_text()
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)


def worker_of_rank(torchrun: int, rank: int) -> psutil.Process:
    """The worker that torchrun, a process, has started in this place."""
    children = psutil.Process(torchrun).children(recursive=True)
    (worker,) = [child for child in children if child.environ().get("RANK") == str(rank)]
    return worker
