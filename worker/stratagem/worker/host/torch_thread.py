"""The one thread in which torch computes, and where the user's code runs.

Owns the thread and the order: jobs run one after another as they were handed in. Knows nothing of
what a job is; a job reports its own outcome and does not raise.
"""

import queue
import threading
from collections.abc import Callable

import torch

Job = Callable[[], None]


class TorchThread:
    """Runs jobs first in, first out, with a fixed number of torch threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A daemon, so that user code that never returns cannot keep a drained process alive.
        self._thread = threading.Thread(target=self._work, name="torch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run the job after all that were submitted before it."""
        self._jobs.put(job)

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
        while (job := self._jobs.get()) is not None:
            job()
            del job  # a finished job must not keep its session's tensors alive
