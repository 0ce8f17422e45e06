"""The Prometheus metrics of a coordinator: their definitions, and the sources of their values.

A scrape takes references to values of the event loop and evaluates them in another thread: the
state is a frozen value. Metrics are served before the lead is taken, so that a waiting coordinator
can be observed. No run, worker or client has a separate series, because their number has no bound.
Counters are exposed as 0 from the first scrape on, with every value of their labels: a series that
appeared with its first event would show no increase.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

from stratagem.common.base.ids import RunId
from stratagem.common.numerics.verification import VERIFIER, Conclusion
from stratagem.common.observe.metrics import Metric, Readings, Values, one
from stratagem.common.observe.metrics_server import (
    SHARED,
    CallStats,
    Guard,
    ProcessStats,
    deployment_of,
    methods_of,
    metrics_served,
)
from stratagem.common.strategy.strategies import workers_used
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.effects import Effect
from stratagem.coordinator.core.facts import KINDS
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.core.strategy_calls import shown_status_of
from stratagem.coordinator.core.world import RunPhase, WorkerRecord
from stratagem.coordinator.runtime.settings import Settings
from stratagem.v1 import coordinator_pb2

RUNS: Final = Metric("stratagem_coordinator_runs", "gauge", "runs by phase", ("phase",))
NOT_RUNNING: Final = Metric(
    "stratagem_coordinator_run_not_running_max_seconds",
    "gauge",
    "for how long a run that has not ended has been found in another phase than RUNNING at every "
    "scrape: of the run for which that is longest, since this coordinator has the lead",
)
COMMITS: Final = Metric(
    "stratagem_coordinator_commits_total", "counter", "states committed since the start"
)
SEGMENTS: Final = Metric(
    "stratagem_coordinator_segments_total", "counter", "segments finished since the start"
)
VERIFICATIONS: Final = Metric(
    "stratagem_verifications_total",
    "counter",
    "segments that other workers have computed again since the start: verified, refuted_run (the "
    "run was wrong and has returned), refuted_verifier, refuted_job (the bits do not repeat), open "
    "(nobody could decide)",
    ("result",),
)
ROUNDS: Final = Metric(
    "stratagem_coordinator_rounds_total", "counter", "federated rounds closed since the start"
)
UPDATES: Final = Metric(
    "stratagem_coordinator_updates_total",
    "counter",
    "updates of federated clients since the start: received, rejected",
    ("outcome",),
)
REFUSED: Final = Metric(
    "stratagem_coordinator_updates_refused_total",
    "counter",
    "updates of federated clients that do not count, since the start: not_finite, not_finite_loss, "
    "layout (other names, shapes or types than the model), size, codec, num_samples, exception, "
    "memory, crashed, timeout, refused_by_site; late (the round was closed while the client "
    "trained or sent)",
    ("cause",),
)
FACTS: Final = Metric(
    "stratagem_coordinator_facts_total", "counter", "facts journaled since the start", ("kind",)
)
APPEND_SECONDS: Final = Metric(
    "stratagem_coordinator_journal_append_seconds",
    "histogram",
    "how long transactions of the journal took, to the disk and back",
)
LEASE_HELD: Final = Metric(
    "stratagem_coordinator_lease_held",
    "gauge",
    "1 while this coordinator leads, 0 while it waits, or may no longer lead",
)
LEASE_AGE: Final = Metric(
    "stratagem_coordinator_lease_age_seconds", "gauge", "since the lead was last renewed"
)
TERM: Final = Metric("stratagem_coordinator_term", "gauge", "number of the present lead")
COMMANDS: Final = Metric(
    "stratagem_coordinator_commands_waiting", "gauge", "commands that wait to be decided"
)
EFFECTS: Final = Metric(
    "stratagem_coordinator_effects",
    "gauge",
    "what runs need done: running, or waiting for compute slots",
    ("effect", "state"),
)
EFFECT_FAILURES: Final = Metric(
    "stratagem_coordinator_effect_failures_total",
    "counter",
    "attempts of effects that failed and are tried again",
    ("effect",),
)
PUSHES: Final = Metric(
    "stratagem_coordinator_pushes", "gauge", "states on their way to workers now"
)
SPOOL_BYTES: Final = Metric(
    "stratagem_coordinator_spool_bytes", "gauge", "updates in the spool, announced ones included"
)
SPOOL_LIMIT: Final = Metric(
    "stratagem_coordinator_spool_limit_bytes", "gauge", "what `--max-spool-bytes` allows"
)
DISK: Final = Metric(
    "stratagem_coordinator_disk_bytes",
    "gauge",
    "of the file system of `--data-dir`: free, total",
    ("kind",),
)
WORKERS: Final = Metric(
    "stratagem_coordinator_workers",
    "gauge",
    "registered workers as they are now: alive, draining; lost, until they are forgotten; "
    "quarantined, until they are released",
    ("state",),
)
WANTED: Final = Metric(
    "stratagem_coordinator_workers_wanted",
    "gauge",
    "workers that the runs which have not ended could use at once, each run by itself: what an "
    "autoscaler may start",
)
HEARTBEAT_AGE: Final = Metric(
    "stratagem_coordinator_heartbeat_age_max_seconds",
    "gauge",
    "silence of the worker alive that has been silent for longest",
)
HEARTBEAT_INTERVAL: Final = Metric(
    "stratagem_coordinator_heartbeat_interval_seconds",
    "gauge",
    "how often workers are told to beat; it follows their number",
)
HEARTBEAT_STREAMS: Final = Metric(
    "stratagem_coordinator_heartbeat_streams",
    "gauge",
    "standing calls over which workers beat; those of the version before make a call for each beat",
)
STREAMS: Final = Metric(
    "stratagem_relay_streams",
    "gauge",
    "streams that tunnelled workers keep open: parked, or live with a connection to the worker",
    ("state",),
)
RELAYED: Final = Metric(
    "stratagem_relay_bytes_total",
    "counter",
    "bytes carried to and from tunnelled workers since the start, TLS of the connections included",
)
METRICS: Final = (
    RUNS,
    NOT_RUNNING,
    COMMITS,
    SEGMENTS,
    VERIFICATIONS,
    ROUNDS,
    UPDATES,
    REFUSED,
    FACTS,
    APPEND_SECONDS,
    LEASE_HELD,
    LEASE_AGE,
    TERM,
    COMMANDS,
    EFFECTS,
    EFFECT_FAILURES,
    PUSHES,
    SPOOL_BYTES,
    SPOOL_LIMIT,
    DISK,
    WORKERS,
    WANTED,
    HEARTBEAT_AGE,
    HEARTBEAT_INTERVAL,
    HEARTBEAT_STREAMS,
    STREAMS,
    RELAYED,
    *SHARED,
)
_EFFECTS: Final = tuple(effect.__name__ for effect in Effect.__args__)
_CAUSES: Final = tuple(cause for cause in Cause if cause is not Cause.UNKNOWN)
_COUNTED: Final = (
    (COMMITS, "SegmentCommitted"),
    (SEGMENTS, "SegmentFinished"),
    (ROUNDS, "RoundClosed"),
)
_RESULTS: Final = {
    "verified": "SegmentVerified",
    "refuted_run": f"SegmentRefuted {Conclusion.RUN}",
    "refuted_verifier": f"SegmentRefuted {Conclusion.VERIFIER}",
    "refuted_job": f"SegmentRefuted {Conclusion.JOB}",
    "open": f"SegmentRefuted {Conclusion.OPEN}",
}
"""The key under which the facts of each result of a verification are counted."""


class CoordinatorMonitor:
    """The metrics of one coordinator process; `app` is set once the process leads."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        self.app: App | None = None
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        self.process = ProcessStats(settings, CallStats(methods_of(service)))
        self._settings, self._now = settings, now
        self._not_running: Mapping[RunId, float] = {}
        """The time since which each run has been found in another phase than RUNNING."""

    def served(self, host: str) -> AbstractAsyncContextManager[str]:
        """Return a context manager that serves the metrics on `--metrics-port`, if it is set."""
        return metrics_served(
            self.sample,
            self.process.lag,
            host,
            self._settings.metrics_port,
            guard=Guard.of(self._settings),
            deployment=deployment_of(self._settings),
            allow_insecure_network=self._settings.allow_insecure_network,
        )

    def sample(self) -> Callable[[], Readings]:
        """Take the readings that need the event loop, and return a function that yields all
        readings in any thread. Call it on the event loop."""
        app = self.app
        held = list(_waiting() if app is None else _held(app))
        return lambda: self._readings(app, held)

    def _readings(
        self, app: App | None, held: list[tuple[Metric, Values]]
    ) -> Iterator[tuple[Metric, Values]]:
        """Yield the readings of all metrics; may be called in any thread."""
        yield from held
        if app is not None:
            phases = _phases(app.loop.state)
            yield RUNS, _runs(phases, app.loop.state)
            yield NOT_RUNNING, one(self._longest_not_running_s(phases))
            yield WORKERS, _workers(app.loop.state)
            yield WANTED, one(_wanted(phases, app.loop.state))
            yield SPOOL_BYTES, one(app.spool.used_bytes)
            yield APPEND_SECONDS, one(app.loop.append_seconds)
        yield SPOOL_LIMIT, one(self._settings.max_spool_bytes)
        yield DISK, self._disk()
        yield from self.process.readings()

    def _longest_not_running_s(self, phases: Mapping[RunId, RunPhase]) -> float:
        now_s, before = self._now(), self._not_running
        self._not_running = {
            run_id: before.get(run_id, now_s)
            for run_id, phase in phases.items()
            if phase is not RunPhase.RUNNING and not phase.is_terminal
        }
        return max((now_s - since_s for since_s in self._not_running.values()), default=0.0)

    def _disk(self) -> Values:
        folder = self._settings.data_dir.absolute()
        while not folder.exists() and folder != folder.parent:  # it is made when the lead is taken
            folder = folder.parent
        try:
            disk = os.statvfs(folder)
        except OSError:
            return {}
        unit = disk.f_frsize
        return {("free",): disk.f_bavail * unit, ("total",): disk.f_blocks * unit}


def _held(app: App) -> Iterator[tuple[Metric, Values]]:
    """Yield the readings that may be taken only on the event loop."""
    loop, supervisor = app.loop, app.supervisor
    yield LEASE_HELD, one(float(app.entrance.is_open))
    yield LEASE_AGE, one(time.monotonic() - loop.renewed_s)
    yield TERM, one(loop.term)
    yield COMMANDS, one(loop.num_waiting)
    running, waiting = supervisor.by_kind()
    yield EFFECTS, _labelled(running, "running") | _labelled(waiting, "waiting")
    yield PUSHES, one(len(app.env.transfers.pushes))
    yield HEARTBEAT_AGE, one(app.leases.longest_silence_s())
    yield HEARTBEAT_INTERVAL, one(app.leases.pace.interval_s)
    yield HEARTBEAT_STREAMS, one(app.heartbeats.num_open)
    yield from _relayed(app.relay.counts(), app.relay.num_bytes)
    yield from _counted(Counter(loop.facts), supervisor.num_failures, app.env.runs.refused)


def _waiting() -> Iterator[tuple[Metric, Values]]:
    """Yield the readings of a process without the lead: all counters are zero."""
    yield LEASE_HELD, one(0.0)
    yield from _relayed(Counter(), 0)
    yield from _counted(Counter(), Counter(), Counter())


def _relayed(streams: Mapping[str, int], num_bytes: int) -> Iterator[tuple[Metric, Values]]:
    yield STREAMS, {(state,): streams.get(state, 0) for state in ("parked", "live")}
    yield RELAYED, one(num_bytes)


def _counted(
    facts: Counter[str], failures: Counter[str], refused: Counter[Cause]
) -> Iterator[tuple[Metric, Values]]:
    yield FACTS, {(kind,): facts[kind] for kind in KINDS}
    for metric, kind in _COUNTED:
        yield metric, one(facts[kind] - facts[f"{kind} {VERIFIER}"])
    yield VERIFICATIONS, {(result,): facts[key] for result, key in _RESULTS.items()}
    yield (
        UPDATES,
        {
            ("received",): facts["UpdateReceived"],
            ("rejected",): facts["UpdateRejected"],
        },
    )
    yield REFUSED, {(cause.value,): refused[cause] for cause in _CAUSES}
    yield EFFECT_FAILURES, {(kind,): failures[kind] for kind in _EFFECTS}


def _labelled(counts: Mapping[str, int], state: str) -> dict[tuple[str, ...], float]:
    return {(kind, state): counts.get(kind, 0) for kind in _EFFECTS}


def _phases(state: CoordinatorState) -> Mapping[RunId, RunPhase]:
    world = world_of(state)
    return {
        run_id: run.ended or shown_status_of(run, world).phase for run_id, run in state.runs.items()
    }


def _runs(phases: Mapping[RunId, RunPhase], state: CoordinatorState) -> Values:
    """Return the number of runs per phase, 0 for phases without runs."""
    counts = Counter(phases.values()) + Counter(state.ended.phases)
    return {(phase.value,): counts[phase] for phase in RunPhase}


def _wanted(phases: Mapping[RunId, RunPhase], state: CoordinatorState) -> int:
    """Return the number of workers for which runs that have not ended have work."""
    return sum(
        workers_used(state.runs[run_id].job.strategy)
        for run_id, phase in phases.items()
        if not phase.is_terminal
    )


_STATES: Final = ("alive", "draining", "lost", "quarantined")


def _workers(state: CoordinatorState) -> Values:
    counts = Counter(_state_of(each) for each in state.workers.values() if each.is_listed)
    return {(status,): counts[status] for status in _STATES}


def _state_of(worker: WorkerRecord) -> str:
    if worker.quarantine:
        return "quarantined"
    if not worker.is_alive:
        return "lost"
    return "draining" if worker.is_draining else "alive"
