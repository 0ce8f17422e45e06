"""Choose the schedule that the ranks of a pipeline follow; "auto" is decided by measurement.

The module proves that a schedule ends before anything is computed by it.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog
import torch

from stratagem.common.pipeline.schedules import Schedule, TaskKind, choose, has_eager, suited
from stratagem.common.pipeline.simulation import check
from stratagem.common.strategy.choices import AUTO
from stratagem.worker.pipeline.messages import Address, Message
from stratagem.worker.pipeline.rank_pass import StageChannel

# ---- Choice of a schedule ----

log = structlog.get_logger(__name__)


class Schedules:
    """The schedules of a pipeline per number of micro-batches; equal on all ranks."""

    def __init__(
        self, asked: str, lane: StageChannel, device: torch.device, *, is_pipelined: bool
    ) -> None:
        """Choose the schedule, unless it is to be measured. asked: a schedule's name, or "auto".
        is_pipelined: a step has several micro-batches."""
        self._asked, self._lane = asked, lane
        self.name = "1f1b" if asked == AUTO else asked
        """The name of the schedule in use."""
        is_open = asked == AUTO and is_pipelined and has_eager(lane.rank_of)
        self.meter = Meter(device) if is_open else None
        """Measures steps until "auto" is decided; None otherwise."""
        self._made: dict[int, Schedule] = {}

    def __str__(self) -> str:
        return f"{self.name} (auto)" if self._asked == AUTO else self.name

    def of(self, num_micro_batches: int) -> Schedule:
        """Return the action lists of all ranks for a step of `num_micro_batches`, after proving
        that they end."""
        if num_micro_batches not in self._made:
            lane = self._lane
            made = choose(self.name, lane.rank_of, num_micro_batches)
            check(made, lane.rank_of, num_micro_batches, lane.plan.dependencies())
            self._made[num_micro_batches] = made
        return self._made[num_micro_batches]

    @property
    def can_settle(self) -> bool:
        """True if "auto" can be decided, since a step of several micro-batches was measured."""
        return self.meter is not None and self.meter.num_micro_batches >= 2

    def settle(self, number: int) -> None:
        """Choose the schedule for "auto". number: the number of the pass that measures messages."""
        assert self.meter is not None
        hops = measure_hops(self._lane, number, self.meter)
        self.meter, self.name = None, suited(hops.hop_s, hops.compute_s)
        self._made.clear()
        log.info(
            "schedule chosen",
            schedule=self.name,
            hop_ms=round(1e3 * hops.hop_s, 3),
            compute_ms=round(1e3 * hops.compute_s, 3),
        )


# ---- Measurement of hops ----
#
# The ranks measure which order of work suits the pipeline's hops. In a training step every rank
# times what it computes. Then neighbouring ranks send a message as large as those of the step to
# and fro, over the transport that carries activations, and all ranks send all others what they
# found, so that all make the same choice. It changes the order of work and no bit.

NUM_PINGS: Final = 5
"""Number of measured round trips between two ranks, after one to warm up."""
MAX_PING_BYTES: Final = 1 << 24
_SHARE: Final = 2 * (NUM_PINGS + 1)
"""Control number of the message with a rank's measurements; lower ones are pings and answers."""


@dataclass(slots=True)
class Meter:
    """One rank's measurements of training steps: seconds computed and bytes sent."""

    device: torch.device
    seconds: dict[TaskKind, list[float]] = field(default_factory=dict)
    """Seconds of each micro-batch, without waiting and sending, keyed by kind of work."""
    largest_bytes: dict[int, int] = field(default_factory=dict)
    """Size of the largest message sent to each rank."""

    @contextmanager
    def time(self, kind: TaskKind) -> Iterator[None]:
        begun = self._now()
        yield
        self.seconds.setdefault(kind, []).append(self._now() - begun)

    def sent(self, rank: int, message: Message) -> None:
        size_bytes = sum(tensor.nbytes for tensor in message.tensors)
        self.largest_bytes[rank] = max(size_bytes, self.largest_bytes.get(rank, 0))

    @property
    def num_micro_batches(self) -> int:
        return len(self.seconds.get(TaskKind.BACKWARD, ()))

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward of the fastest micro-batch, without warm-up and noise."""
        return sum(min(seconds) for seconds in self.seconds.values())

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Hops:
    """The measured times on which all ranks agree."""

    hop_s: float
    """Median one-way time of a message between two neighbours, of the slowest pair."""
    compute_s: float
    """Seconds of forward and backward of one micro-batch on one rank, averaged over the ranks."""


def measure_hops(lane: StageChannel, pass_number: int, meter: Meter) -> Hops:
    """Measure message times in a separate pass; a collective call. Raises ExchangeError."""
    pairs = _pairs(lane)
    lane.transport.begin(pass_number, _awaited(lane, pass_number, pairs))
    hops_s = [_ping(lane, pass_number, pair, meter) for pair in pairs if lane.rank in pair]
    cost = {"hop_s": max(hops_s, default=0.0), "compute_s": meter.compute_s}
    others = [rank for rank in range(lane.size) if rank != lane.rank]
    for rank in others:
        lane.transport.send(_address(lane, pass_number, _SHARE, lane.rank, rank), Message((), cost))
    reports = {lane.rank: cost}
    for rank in others:
        address = _address(lane, pass_number, _SHARE, rank, lane.rank)
        reports[rank] = dict(lane.transport.recv(address, lane.timeout_s).words)
    lane.transport.end(lane.timeout_s)
    by_rank = [reports[rank] for rank in range(lane.size)]
    compute_s = sum(report["compute_s"] for report in by_rank) / lane.size
    return Hops(max(report["hop_s"] for report in by_rank), compute_s)


def _pairs(lane: StageChannel) -> list[tuple[int, int]]:
    """Return the pairs of ranks that exchange activations, in an order free of deadlocks."""
    ends = ((lane.rank_of[b.source], lane.rank_of[b.target]) for b in lane.plan.boundaries)
    return sorted({(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]})


def _ping(lane: StageChannel, pass_number: int, pair: tuple[int, int], meter: Meter) -> float:
    """Return a one-way message's median seconds; 0 on the higher rank. The lower sends first."""
    low, high = pair
    numbers = range(NUM_PINGS + 1)
    requests = [_address(lane, pass_number, 2 * i, low, high) for i in numbers]
    answers = [_address(lane, pass_number, 2 * i + 1, high, low) for i in numbers]
    if lane.rank == high:
        for request, answer in zip(requests, answers, strict=True):
            lane.transport.send(answer, lane.transport.recv(request, lane.timeout_s))
        return 0.0
    size_bytes = min(meter.largest_bytes.get(high, 0), MAX_PING_BYTES)
    payload = torch.zeros(size_bytes, dtype=torch.uint8)
    took_s = []
    for request, answer in zip(requests, answers, strict=True):
        begun = time.perf_counter()
        lane.transport.send(request, Message([payload]))
        lane.transport.recv(answer, lane.timeout_s)
        took_s.append((time.perf_counter() - begun) / 2)
    return statistics.median(took_s[1:])


def _awaited(
    lane: StageChannel, pass_number: int, pairs: list[tuple[int, int]]
) -> Iterator[Address]:
    for low, high in pairs:
        for i in range(NUM_PINGS + 1):
            if lane.rank == high:
                yield _address(lane, pass_number, 2 * i, low, high)
            if lane.rank == low:
                yield _address(lane, pass_number, 2 * i + 1, high, low)
    for rank in range(lane.size):
        if rank != lane.rank:
            yield _address(lane, pass_number, _SHARE, rank, lane.rank)


def _address(
    lane: StageChannel, pass_number: int, number: int, source: int, target: int
) -> Address:
    return lane.control(pass_number, 0, number, source, target)
