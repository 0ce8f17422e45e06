"""A cluster for runs that are verified while they train, on machines of which some compute wrongly.

Runs without work beside them are trained by worker-0, verified by worker-1, and worker-2 decides;
each of them can be held at a gate, such as `worker-1-batch-3` in the second segment.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratagem.client.sdk.blocking import RunHandle
from tests.cluster.jobs import Gates
from tests.crash.jobs import LOCAL, Job, gated
from tests.crash.rig import Outcome, Rig, cluster_with_failpoints, events_of, outcome_of
from tests.jobs import user_data
from tests.patience import PATIENCE_S
from tests.repository import ROOT

TRAINER, VERIFIER, THIRD = "worker-0", "worker-1", "worker-2"
NUM_WORKERS = 5
SIGNALS = {
    "killed": signal.SIGKILL,
    "frozen": signal.SIGSTOP,
    "drained": signal.SIGTERM,
    "lost": signal.SIGKILL,
}
ALWAYS = 1000 * "x"
"""More batches than any run takes."""
ONCE = "xx"
"""Those of a first segment."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """All that verification has said about a run, in order."""

    refuted: list[tuple[int, str]]
    """Segments, and who was wrong."""
    quarantined: set[str]
    marked: set[str]
    num_returns: int
    last: str
    """The reason of the completion."""


def verdicts_of(run: RunHandle) -> Verdicts:
    events = list(events_of(run))
    refuted = [event.payload for event in events if event.kind == "SegmentRefuted"]
    return Verdicts(
        [(each["segment"], each["conclusion"]) for each in refuted],
        {name for each in refuted for name in each["quarantined"]},
        {name for each in refuted for name in each["marked"]},
        sum(event.kind == "RunResumed" for event in events),
        next(event.payload["reason"] for event in events if event.kind == "RunCompleted"),
    )


@dataclass(slots=True)
class Bench:
    """The cluster, and the folder with the gates and flaws of one test."""

    rig: Rig
    gates: Gates
    parking: Gates

    @property
    def folder(self) -> Path:
        return self.gates.folder

    def verified(self, strategy: Job = LOCAL, *, on: str = "spare", **sections: Any) -> Job:
        data = user_data("flawed", folder=str(self.folder))
        sections = {"data": data, "verification": {"sample": 1.0, "on": on}, **sections}
        return gated(strategy, self.folder, **sections)

    def flaw(self, worker: str, batches: str = ALWAYS) -> None:
        """Have a worker compute some of the batches to come wrongly, those with an `x`."""
        (self.folder / f"{worker}.flawed").write_text(batches)

    def expected(self, job: Job) -> Outcome:
        """The outcome of a job that nobody verifies, on machines that compute rightly."""
        return self.rig.outcome({**job, "verification": None})

    def check(self, run: RunHandle, expected: Outcome) -> Verdicts:
        """Wait for the end of a run, with all that was expected; return what was said of it."""
        outcome = outcome_of(run)
        assert outcome.digests == expected.digests
        assert outcome.metrics == expected.metrics
        assert outcome.history == expected.history
        return verdicts_of(run)

    def settle(self) -> None:
        """Have all workers in their places, and none in quarantine."""
        self.parking.open()
        self.rig.settle()
        for worker in self.rig.client.workers():
            if worker.quarantine:
                self.rig.client.release_worker(worker.worker_id)

    def quarantined(self) -> set[str]:
        return {each.worker_id for each in self.rig.client.workers() if each.quarantine}

    # ---- faults ----

    def restart(self, process: str) -> None:
        """Kill a process, and wait until it is back."""
        cluster = self.rig.cluster
        num_starts = cluster.processes[process].num_starts
        cluster.kill(process)
        cluster.wait_restarted(process, num_starts, timeout_s=PATIENCE_S)

    @contextmanager
    def without(self, worker: str, how: str) -> Iterator[None]:
        """Inside the block all gates are open, but a worker that stood at one is killed, frozen,
        drained, or lost: it comes back after the block alone."""
        cluster = self.rig.cluster
        num_starts = cluster.processes[worker].num_starts
        if how == "lost":
            self.parking.close(worker)
        cluster.kill(worker, SIGNALS[how])
        self.gates.open()
        try:
            yield
        finally:
            self.parking.open()
            if how == "frozen":
                cluster.kill(worker, signal.SIGCONT)
            else:
                cluster.wait_restarted(worker, num_starts, timeout_s=PATIENCE_S)


@contextmanager
def verified_rig(parking: Gates, num_workers: int = NUM_WORKERS) -> Iterator[Rig]:
    """A cluster whose workers stay away while the gate of their name is closed."""
    programs = {
        "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
        "worker": [sys.executable, str(ROOT / "tests/cluster/parkable_worker.py")],
    }
    environment = {"TEST_PARKING": str(parking.folder)}
    cluster = cluster_with_failpoints(
        workers=num_workers, programs=programs, environment=environment
    )
    with cluster, cluster.client() as client:
        yield Rig(cluster, client)
