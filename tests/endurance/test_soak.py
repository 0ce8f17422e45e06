"""A short soak of real processes: nothing grows once all has been used."""

import time
from collections.abc import Sequence

import pytest

from benchmarks.soak import Sample, measure, runs, soak, table, uploads
from stratagem.client import LocalCluster
from tests.repository import ROOT

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.promise("No process grows with the runs and the uploads that it has served."),
]

PROCESSES = ("coordinator", "worker-0", "worker-1")
UPLOAD_MB = 8.0
SOAK_S = 240.0
"""Of uploads, and again of runs, at most; a quick machine has done all of them in 15."""
MAX_GROWN_MB = 4 * UPLOAD_MB
"""Between the quarters lie 100 uploads: one of 25 kept would be more. What an allocator keeps moves
by more than one upload on a busy machine, when the disk is slow and more chunks wait for it."""


def grown(samples: Sequence[Sample], column: str) -> float:
    """How much more the least of the last quarter is than the most of the second quarter.

    A leak raises the least as well; a busy moment does not.
    """
    done = samples[-1].done
    early = [s.values[column] for s in samples if done / 4 <= s.done <= done / 2]
    late = [s.values[column] for s in samples if s.done >= 3 * done / 4]
    return min(late) - max(early)


def test_uploads_and_runs_leave_nothing_behind() -> None:
    cluster = LocalCluster(workers=2, threads=1, allow=("benchmarks.soak:*",), import_path=(ROOT,))
    with cluster, cluster.client() as client:
        fresh = measure(cluster)
        # Workers import what they need in their own time.
        soak(cluster, runs(client), 4, time.monotonic() + SOAK_S)
        sent = soak(cluster, uploads(client, UPLOAD_MB), 400, time.monotonic() + SOAK_S)
        ended = soak(cluster, runs(client), 80, time.monotonic() + SOAK_S)
        idle = measure(cluster)
    for what, samples in (("uploads", sent), ("runs", ended)):
        print(table(samples, what))
        assert samples[-1].done >= 40, f"too few {what} on this machine to tell anything"
        for process in PROCESSES:
            assert grown(samples, f"{process} MB") < MAX_GROWN_MB, (process, what)
            assert grown(samples, f"{process} fds") <= 4, (process, what)
            assert grown(samples, f"{process} threads") <= 2, (process, what)
    assert idle["spool MB on disk"] == 0.0
    # What a worker was doing stands in a file of its own, of one size, for the next of its name.
    assert idle["workers MB on disk"] == fresh["workers MB on disk"]
