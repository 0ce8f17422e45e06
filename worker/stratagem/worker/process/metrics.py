"""The metrics that a worker exports to Prometheus: definitions, and sources of their values.

A scrape reads the values from the event loop; nothing here runs otherwise. `WorkStats`
(session/states.py) counts the work. There are no metrics of single sessions and runs (`stratagem
status` shows these), so the number of series does not grow with them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Final

import torch

from stratagem.common.base.text import split_address
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
from stratagem.common.tensors import stream
from stratagem.v1 import peer_pb2, worker_pb2
from stratagem.worker.process.heartbeat import Agent
from stratagem.worker.process.settings import WorkerSettings
from stratagem.worker.service.sessions import Sessions
from stratagem.worker.session.context import Host
from stratagem.worker.session.states import OUTCOMES

STEPS: Final = Metric(
    "stratagem_worker_steps_total",
    "counter",
    "training steps done, local steps of federated clients among them",
)
STEP_SECONDS: Final = Metric(
    "stratagem_worker_step_seconds", "histogram", "how long training steps took, exchange included"
)
SNAPSHOT_STALL: Final = Metric(
    "stratagem_worker_snapshot_stall_seconds",
    "histogram",
    "how long training stood still at the end of a segment while its state was copied to host "
    "memory; the commit is made of the copy beside the next segment",
)
SKIPPED: Final = Metric(
    "stratagem_worker_skipped_steps_total",
    "counter",
    "steps that were not finite and changed nothing (of nodes that gossip, each counts)",
)
ROWS: Final = Metric(
    "stratagem_worker_rows_total",
    "counter",
    "rows of the batches it took part in; each member of a party counts the whole batch",
)
EXCHANGE_WAIT: Final = Metric(
    "stratagem_worker_exchange_wait_seconds_total",
    "counter",
    "time in which the torch thread waited for other members' gradients or parameters "
    "(DataParallel, gossip)",
)
MESH_BYTES: Final = Metric(
    "stratagem_worker_mesh_bytes_total",
    "counter",
    "bytes between workers, by engine: gloo, nccl, grpc, store; shared memory sends none",
    ("direction", "engine"),
)
EXECUTIONS: Final = Metric(
    "stratagem_worker_executions",
    "gauge",
    "plans under way: active (run, or wait for the torch thread), parked (wait for their party or "
    "the coordinator)",
    ("state",),
)
ENDED: Final = Metric(
    "stratagem_worker_executions_total",
    "counter",
    "plans that have ended, by outcome: train, build, client_round, evaluate, measure, "
    "measure_sums, show, interrupted, error (the user's code), defect (ours)",
    ("outcome",),
)
SESSIONS: Final = Metric("stratagem_worker_sessions", "gauge", "sessions of runs held")
JOBS_WAITING: Final = Metric(
    "stratagem_worker_torch_queue", "gauge", "what waits for the torch thread"
)
STALL: Final = Metric(
    "stratagem_worker_torch_stall_seconds",
    "gauge",
    "for how long the torch thread has been at one thing, once that is reported "
    "(`--stall-report-s`); 0 before",
)
BLOB_BYTES: Final = Metric(
    "stratagem_worker_blob_memory_bytes", "gauge", "states and data of runs held in memory"
)
DEVICE_BYTES: Final = Metric(
    "stratagem_worker_device_memory_bytes",
    "gauge",
    "memory of the CUDA device: allocated (tensors), reserved (torch), free, total; none on CPU",
    ("kind",),
)
REGISTERED: Final = Metric(
    "stratagem_worker_registered", "gauge", "1 while the coordinator knows this worker"
)
HEARTBEAT_AGE: Final = Metric(
    "stratagem_worker_heartbeat_age_seconds",
    "gauge",
    "since the coordinator last answered a heartbeat",
)
CLOCK_OFFSET: Final = Metric(
    "stratagem_worker_clock_offset_seconds",
    "gauge",
    "what to add to this machine's clock to have the coordinator's",
)
METRICS: Final = (
    STEPS,
    STEP_SECONDS,
    SNAPSHOT_STALL,
    SKIPPED,
    ROWS,
    EXCHANGE_WAIT,
    MESH_BYTES,
    EXECUTIONS,
    ENDED,
    SESSIONS,
    JOBS_WAITING,
    STALL,
    BLOB_BYTES,
    DEVICE_BYTES,
    REGISTERED,
    HEARTBEAT_AGE,
    CLOCK_OFFSET,
    *SHARED,
)


def process_stats(settings: WorkerSettings) -> ProcessStats:
    """Make the statistics of a process that serves WorkerService and PeerService."""
    worker = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
    peer = peer_pb2.DESCRIPTOR.services_by_name["PeerService"]
    return ProcessStats(settings, CallStats(methods_of(worker, peer)))


class WorkerMonitor:
    """The metrics of one worker process; `agent` is None until the heartbeats' Agent exists."""

    def __init__(self, process: ProcessStats, host: Host, sessions: Sessions) -> None:
        self.agent: Agent | None = None
        self._process, self._host, self._sessions = process, host, sessions

    def served(self, settings: WorkerSettings) -> AbstractAsyncContextManager[str]:
        """Return a context manager that serves the metrics on `--metrics-port`, if it is set."""
        name, _ = split_address(settings.listen)
        return metrics_served(
            self.sample,
            self._process.lag,
            name,
            settings.metrics_port,
            guard=Guard.of(settings),
            deployment=deployment_of(settings),
            allow_insecure_network=settings.allow_insecure_network,
        )

    def sample(self) -> Callable[[], Readings]:
        """Read the values that belong to the event loop, on which this must run; return a function
        that reads the rest in any thread."""
        num_active, num_parked = self._sessions.num_executions()
        held: list[tuple[Metric, Values]] = [
            (EXECUTIONS, {("active",): num_active, ("parked",): num_parked}),
            (SESSIONS, one(self._sessions.num_sessions)),
            (BLOB_BYTES, one(self._host.blobs.memory_bytes)),
        ]
        agent = self.agent
        held.append((REGISTERED, one(agent is not None and agent.is_registered.is_set())))
        if agent is not None:
            held.append((HEARTBEAT_AGE, one(time.monotonic() - agent.heard_s)))
        return lambda: self._readings(held)

    def _readings(self, held: list[tuple[Metric, Values]]) -> Iterator[tuple[Metric, Values]]:
        """Yield all metrics with their values. May run in any thread."""
        stats = self._host.stats
        yield from held
        yield STEPS, one(stats.num_steps)
        yield STEP_SECONDS, one(stats.step_seconds)
        yield SNAPSHOT_STALL, one(stats.snapshot_stall_seconds)
        yield SKIPPED, one(stats.num_skipped_steps)
        yield ROWS, one(stats.num_rows)
        yield EXCHANGE_WAIT, one(stats.exchange_wait_s)
        yield MESH_BYTES, {key: n for key, n in stream.engine_bytes().items()}
        yield ENDED, {(outcome,): stats.ended[outcome] for outcome in OUTCOMES}
        yield JOBS_WAITING, one(self._host.thread.num_waiting)
        yield STALL, one(stats.stalled_s)
        yield DEVICE_BYTES, _device_bytes(self._host.device)
        yield CLOCK_OFFSET, one(self._host.clock.offset.seconds)
        yield from self._process.readings()


def _device_bytes(device: torch.device) -> Values:
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        ("allocated",): torch.cuda.memory_allocated(device),
        ("reserved",): torch.cuda.memory_reserved(device),
        ("free",): free,
        ("total",): total,
    }
