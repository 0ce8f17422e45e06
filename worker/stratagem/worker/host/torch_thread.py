"""The one thread in which torch computes, and where the user's code runs.

Owns the thread and the order: jobs run one after another as they were handed in, and others see
whose job runs and whether it moves. Knows nothing of what a job is; a job reports its own outcome
and does not raise.
"""

import queue
import threading
from collections.abc import Callable

import torch

from stratagem.worker.host.thread_activity import Activity, per_thread

Job = Callable[[], None]


class TorchThread:
    """Runs jobs first in, first out, with a fixed number of torch threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[tuple[Job, object] | None] = queue.SimpleQueue()
        self._present: tuple[Job, object] | None = None
        self.activity = Activity()
        # A daemon, so that user code that never returns cannot keep a drained process alive.
        self._thread = threading.Thread(target=self._work, name="torch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job, owner: object = None) -> None:
        """Run the job after all that were submitted before it. owner: whose job it is, for those
        who look at the thread."""
        self._jobs.put((job, owner))

    @property
    def is_busy(self) -> bool:
        """Return whether a job runs now."""
        return self._present is not None

    @property
    def owner(self) -> object:
        """Return whose job runs now; None where nobody's does."""
        present = self._present
        return None if present is None else present[1]

    @property
    def ident(self) -> int:
        """Return the number of the thread among Python's; 0 before it has started."""
        return self._thread.ident or 0

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for the one that runs."""
        return self._jobs.qsize()

    def stop(self, timeout_s: float) -> bool:
        """End after the jobs handed in so far; False when they did not end in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        # The setting belongs to the calling thread, so it is made here and nowhere else.
        torch.set_num_threads(self._num_threads)
        per_thread.activity = self.activity
        while (present := self._jobs.get()) is not None:
            self._present = present
            self.activity.num_moves += 1
            present[0]()
            # A finished job must not keep its session's tensors alive.
            self._present = present = None
