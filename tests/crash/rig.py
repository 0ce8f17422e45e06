"""A long-lived cluster of real processes, and what the crash tests do to it.

A run's `Outcome` is all that must not depend on crashes: the digest of every committed state, the
metrics that were journaled with it, and the step history but for what clocks say.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from stratagem.client.course.views import Event, Phase, RunStatus
from stratagem.client.local import supervisor
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.common.numerics.verification import VERIFIER
from tests.crash.jobs import JOBS, Job
from tests.patience import PATIENCE_S
from tests.repository import ROOT

WORKER_TTL_S = 15.0
"""Of the leases in the shared cluster: longer than a busy machine stands still."""
NUM_WORKERS = 3
KILLED_BY_FAILPOINT = 137
TAIL_CHARS = 8000
CLOCKED = {"train.cost_speedup", "train.wall_speedup"}
"""Metrics that a clock measured."""


def cluster_with_failpoints(**changes: Any) -> LocalCluster:
    environment = {
        "STRATAGEM_COORDINATOR_WORKER_TTL_S": str(WORKER_TTL_S),
        "STRATAGEM_COORDINATOR_HEARTBEAT_INTERVAL_S": "1",
        **changes.pop("environment", {}),
    }
    made: dict[str, Any] = {"workers": NUM_WORKERS, "threads": 1, "failpoints": True}
    made |= {"import_path": (ROOT,), "environment": environment, **changes}
    return LocalCluster(**made)


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that tests end one after the other are back at once, as if each end were rare."""
    monkeypatch.setattr(supervisor, "MAX_DELAY_S", 0.2)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What every run of one job must agree on, by party and segment."""

    digests: Mapping[tuple[str, int], str]
    metrics: Mapping[tuple[str, int], Mapping[str, float]]
    history: Mapping[str, bytes]
    """The rows of each series that is not observed."""
    refuted: tuple[int, ...] = ()
    """The segments of which another execution differed, in order."""
    whole: Mapping[int, str] = field(default_factory=dict, compare=False)
    """Digests of commits that were uploaded later as a whole. A crash adds some: a worker that
    comes back takes its replica over from one."""

    def check_whole(self, expected: "Outcome") -> None:
        """Check that the commits uploaded as a whole have the bits of an undisturbed run's."""
        assert expected.whole.items() <= self.whole.items()


@dataclass(slots=True)
class Rig:
    cluster: LocalCluster
    client: Client
    _undisturbed: dict[str, Outcome] = field(default_factory=dict)

    # ---- runs ----

    def undisturbed(self, name: str) -> Outcome:
        """The outcome of a job of JOBS when nothing happens to it."""
        if name not in self._undisturbed:
            self.settle()
            self._undisturbed[name] = self.outcome(JOBS[name])
        return self._undisturbed[name]

    def outcome(self, job: Job) -> Outcome:
        """Run a job to its end."""
        with self.running(job) as run:
            return outcome_of(run)

    @contextmanager
    def running(self, job: Job) -> Iterator[RunHandle]:
        """A submitted run; one that the block leaves unfinished is stopped."""
        run = self.client.submit(job)
        try:
            yield run
        finally:
            if not run.status().phase.is_final:
                run.cancel()

    # ---- faults ----

    @contextmanager
    def armed(self, process: str, failpoint: str, num_passed: int = 0) -> Iterator[None]:
        """The process dies at the failpoint inside the block, and is back at its end."""
        file = self.cluster.failpoint_file(process, failpoint)
        num_starts = self.cluster.processes[process].num_starts
        file.write_text(str(num_passed))
        try:
            yield
            self.cluster.wait_restarted(process, num_starts, timeout_s=PATIENCE_S)
            assert not file.exists(), f"{process} has passed {failpoint} too seldom"
            self.cluster.wait_ready()
            assert self.cluster.processes[process].last_exit == KILLED_BY_FAILPOINT
        finally:
            file.unlink(missing_ok=True)

    def settle(self) -> None:
        """Wait until every process serves and the coordinator knows all of them as they are now."""
        self.cluster.wait_ready()
        until(lambda: self.registered() == self.incarnations(), "all workers are registered")

    def incarnations(self) -> dict[str, str]:
        """What the workers call their present start."""
        return {name: self._fact(name, "incarnation") for name in self.cluster.worker_names}

    def registered(self) -> dict[str, str]:
        """The workers that the coordinator holds for alive."""
        workers = self.client.workers()
        return {each.worker_id: each.incarnation for each in workers if each.is_alive}

    def logs(self) -> list[tuple[str, str]]:
        """The end of every process's log, for a report of failure."""
        names = ["coordinator", *self.cluster.worker_names]
        return [(name, self.cluster.log_tail(name)[-TAIL_CHARS:]) for name in names]

    def _fact(self, process: str, name: str) -> str:
        facts = json.loads((self.cluster.folder / "ready" / process).read_text())
        return str(facts[name])


def outcome_of(run: RunHandle) -> Outcome:
    """Wait for the end of a run, which must be a completion."""
    events = list(events_of(run))
    digests, metrics = committed(events)
    whole = {
        event.payload["segment"]: event.payload["digest"]
        for event in events
        if event.kind == "CommitUploaded"
    }
    run.result()
    series = run.history(parties="*").items()
    exact = {name: each.columns.to_bytes() for name, each in series if not each.observed}
    refuted = tuple(e.payload["segment"] for e in events if e.kind == "SegmentRefuted")
    return Outcome(digests, metrics, exact, refuted, whole)


def committed(
    events: Iterable[Event],
) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], Mapping[str, float]]]:
    """Return the digests of the states of a run and what was measured of them, by party and
    segment; not of those that were computed again to verify others."""
    digests: dict[tuple[str, int], str] = {}
    metrics: dict[tuple[str, int], Mapping[str, float]] = {}
    for event in events:
        payload = event.payload
        if payload.get("party") == VERIFIER:
            continue
        match event.kind:
            case "ModelBuilt":
                digests[payload["party"], 0] = payload["digest"]
            case "SegmentCommitted":
                digests[payload["party"], payload["segment"]] = payload["digest"]
                if payload["average"]:
                    digests[f"{payload['party']} average", payload["segment"]] = payload["average"]
                metrics[payload["party"], payload["segment"]] = {
                    name: value for name, value in payload["metrics"].items() if name not in CLOCKED
                }
            case "Evaluated":
                metrics[payload["party"], payload["segment"]] = payload["metrics"]
            case "GenerationClosed":
                digests[payload["party"], payload["generation"]] = payload["digest"]
    return digests, metrics


def events_of(run: RunHandle) -> Iterator[Event]:
    """The journaled events of a run until its end."""
    return (item for item in run.watch() if isinstance(item, Event))


def await_event(
    run: RunHandle, kind: str, is_it: Callable[[Event], bool] = lambda _: True
) -> Event:
    """Watch a run until an event comes."""
    for event in events_of(run):
        if event.kind == kind and is_it(event):
            return event
    raise AssertionError(f"{run.run_id} ended without {kind}: {run.status().reason}")


def await_step(run: RunHandle, step: int) -> None:
    """Watch a run until it reports a step as applied; one that has ended meanwhile reports none."""
    for item in run.watch():
        if not isinstance(item, Event) and item.step >= step:
            return
    status = run.status()
    assert status.phase is Phase.COMPLETED, f"before step {step}: {status.reason}"
    assert status.step >= step


def await_status(run: RunHandle, is_it: Callable[[RunStatus], bool], what: str) -> RunStatus:
    """Look at a run's status until it is as described."""
    found: list[RunStatus] = []

    def look() -> bool:
        found.append(run.status())
        assert found[-1].phase is not Phase.FAILED, found[-1].reason
        return is_it(found[-1])

    until(look, what)
    return found[-1]


def until(is_so: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """For what no stream of events tells: ask again until it is so."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        pause.wait(0.05)
