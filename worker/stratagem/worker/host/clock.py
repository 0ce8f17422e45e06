"""The clocks, retries and torch thread of a worker process, shared by all its sessions."""

import os
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import torch

from stratagem.common.base.retry import Backoff
from stratagem.worker.host.stalls import Activity, per_thread

# ---- Clock number ----
#
# Processes compare this number to find out whether they read the same clock.

NO_NUMBER: Final = 0
"""The number of a clock that may be shared with no other process."""


@cache
def clock_number() -> int:
    """Return a number that is equal for processes whose `time.perf_counter` is the same clock. On
    Linux these are all in one boot and time namespace, also across containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        return NO_NUMBER
    return zlib.crc32(f"{boot} {namespace}".encode()) or 1


# ---- Offset to the coordinator's clock ----
#
# With the offset, times of different workers can be compared. The answer to a call has the
# coordinator's time, read between sending and receiving, in the middle if both ways took equally
# long. The error is at most half the round trip, so the call with the shortest one counts
# (Cristian, 1989). The offset is written on the event loop and read in the torch thread.

NUM_KEPT: Final = 16
"""Number of remembered readings; with older ones, a drift of the clocks would go unnoticed."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Seconds to add to this machine's time to get the coordinator's, and the error bound."""

    seconds: float = 0.0
    error_s: float = float("inf")


@dataclass(slots=True)
class CoordinatorClock:
    """An estimate of the offset to the coordinator's clock, from the latest readings."""

    _readings: deque[Offset] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    offset: Offset = Offset()
    """The best estimate; 0 before the first reading."""

    def note(self, sent_s: float, received_s: float, coordinator_s: float) -> None:
        """Add a reading: the local times of sending a call and receiving its answer, and the
        coordinator's time in the answer."""
        middle_s = (sent_s + received_s) / 2
        self._readings.append(Offset(coordinator_s - middle_s, (received_s - sent_s) / 2))
        self.offset = min(self._readings, key=lambda reading: reading.error_s)


# ---- Retries to the coordinator ----

FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0


def new_backoff() -> Backoff:
    """Make the backoff between attempts to reach a coordinator."""
    return Backoff(FIRST_RETRY_S, LAST_RETRY_S)


# ---- Torch thread ----
#
# torch computes and the user's code runs in this one thread. Jobs run one after another in the
# order of their submission, and other threads see the running job and its progress. A job reports
# its outcome and does not raise.

Job = Callable[[], None]


class TorchThread:
    """A thread that runs jobs in order, with a fixed number of torch threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[tuple[Job, object] | None] = queue.SimpleQueue()
        self._present: tuple[Job, object] | None = None
        self.activity = Activity()
        # It is a daemon, so that user code that never returns cannot keep a drained process alive.
        self._thread = threading.Thread(target=self._work, name="torch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job, owner: object = None) -> None:
        """Queue a job. owner: shown to observers while the job runs."""
        self._jobs.put((job, owner))

    @property
    def is_busy(self) -> bool:
        """True if a job is running."""
        return self._present is not None

    @property
    def owner(self) -> object:
        """The owner of the running job; None if there is none."""
        present = self._present
        return None if present is None else present[1]

    @property
    def ident(self) -> int:
        """Python's identifier of the thread; 0 before it has started."""
        return self._thread.ident or 0

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait for the running one."""
        return self._jobs.qsize()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after all queued jobs; return False if they do not end in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        # The setting is per thread, so it is made here.
        torch.set_num_threads(self._num_threads)
        per_thread.activity = self.activity
        while (present := self._jobs.get()) is not None:
            self._present = present
            self.activity.num_moves += 1
            present[0]()
            # A finished job must not keep the tensors of its session alive.
            self._present = present = None
