"""Manage the readers of data sets: their orders, the batches read ahead, and the replacement of
dead ones.

A batch is the same whichever process reads it and however often, so nothing is lost with a reader:
another one gets its orders; if there is none, the worker reads the rows itself.
"""

import json
import os
import select
import socket
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from stratagem.common.base.errors import LimitError, StratagemError, UserCodeError
from stratagem.common.job import JobSpec
from stratagem.worker.data.factory import DataFunction
from stratagem.worker.data.reader_batches import (
    MappedSegments,
    ReaderSetup,
    error_of,
    order_text,
    rebuild,
)
from stratagem.worker.data.rows import ReadOrder, RowDataset
from stratagem.worker.user_code import watching
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Process of a reader ----
#
# The worker sees a reader as a process, the connection to it, and the memory that it writes.
# Nothing here waits.

_MODULE: Final = "stratagem.worker.data.reader_loop"
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CHUNK_BYTES: Final = 1 << 16
_MAX_FDS: Final = 8
_PATIENCE_S: Final = 10.0
"""Seconds to wait for the end of a process that has closed its connection."""
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


class ReaderProcess:
    """A process that reads rows. Used by one thread."""

    def __init__(self, setup: ReaderSetup) -> None:
        """Start the process, which makes its data set. Raises OSError."""
        connection, readers_end = socket.socketpair()
        with readers_end:
            try:
                fd = readers_end.fileno()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, str(fd), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[fd],
                    env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
                )
            except BaseException:
                connection.close()
                raise
        self._connection = connection
        connection.setblocking(False)
        self._unsent = bytearray(setup.text(sys.path).encode() + b"\n")
        self._received = bytearray()
        self._fds: deque[int] = deque()
        self._segments = MappedSegments()
        self._freed: list[int] = []
        self.is_dead = False

    def fileno(self) -> int:
        """Return the file descriptor of the connection, for waiting."""
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        """True if the process has not received all messages yet."""
        return bool(self._unsent)

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, ticket: int, order: ReadOrder) -> None:
        """Send an order; a process answers its orders in turn."""
        freed = [self._freed.pop() for _ in range(len(self._freed))]
        self._unsent += order_text(ticket, order, freed).encode() + b"\n"
        self.send()

    def send(self) -> None:
        """Send as much as possible without waiting."""
        try:
            while self._unsent and not self.is_dead:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # its earlier messages may still be readable
            self._unsent.clear()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived; set `is_dead` if no more will come."""
        while not self.is_dead:
            try:
                data, fds, _, _ = socket.recv_fds(
                    self._connection, _CHUNK_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError:
                data, fds = b"", []
            self._fds.extend(fds)
            self._received += data
            self.is_dead = not data
            *lines, incomplete = self._received.split(b"\n")
            self._received = incomplete
            yield from map(json.loads, lines)

    def batch(self, message: dict[str, Any]) -> tuple[Any, Any]:
        """Decode the answer to an order: (x, y). The tensors are views of memory that is reused
        once they are gone. Pass answers in order."""
        number, memory = message["segment"], _NOTHING
        if number is not None:
            memory = self._memory(number, is_new=message["is_new"])
        made = [rebuild(tree, memory) for tree in message["trees"]]
        return made[0], made[-1]

    def end(self) -> str:
        """End the process; return its exit status if it had ended before."""
        self._connection.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S if self.is_dead else 0)
        self.is_dead = True
        self._process.kill()
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _memory(self, number: int, *, is_new: bool) -> Tensor:
        if is_new:
            self._segments.map(number, self._fds.popleft())
        return self._segments.view(number, self._freed.append)


# ---- Pool of readers of one data set ----

PREFETCH: Final = 2
"""Default number of batches that are read ahead per reader."""
MAX_DEATHS: Final = 3
"""Maximum number of readers that may die while working on one order."""
_MAX_ROWS_NAMED: Final = 32


@dataclass(slots=True, eq=False)
class _Ticket:
    """An order (the description of a batch to read) that was given to a reader."""

    number: int
    order: ReadOrder
    outcome: tuple[Any, Any] | StratagemError | None = None
    num_deaths: int = 0


@dataclass(slots=True, eq=False)
class _Reader:
    process: ReaderProcess
    tickets: deque[_Ticket] = field(default_factory=deque)
    """The unanswered orders, oldest first."""


class ReaderPool:
    """Readers (processes that read rows) with equal data sets. Used by one thread."""

    def __init__(
        self,
        setup: ReaderSetup,
        num_readers: int,
        prefetch: int = PREFETCH,
        room_for: Callable[["ReaderPool"], int] | None = None,
    ) -> None:
        """Begin without processes. prefetch: batches that each reader reads ahead. room_for:
        returns how many processes this pool may have; called for each batch."""
        self._setup, self.num_readers = setup, num_readers
        self._max_ahead, self._room_for = num_readers * prefetch, room_for
        self._readers: list[_Reader] = []
        self._coming: Iterator[ReadOrder] = iter(())
        self._ahead: dict[ReadOrder, list[_Ticket]] = {}
        self._earlier: dict[ReadOrder, list[_Ticket]] = {}  # read ahead for an earlier expectation
        self._num_given = 0

    @property
    def pids(self) -> list[int]:
        """Return the ids of the running processes."""
        return [reader.process.pid for reader in self._readers]

    def start(self) -> None:
        """Start the missing processes, which make their data sets."""
        if len(self._readers) == self.num_readers:
            return
        number = self.num_readers if self._room_for is None else self._room_for(self)
        while len(self._readers) < number:
            self._readers.append(_Reader(self._process()))

    def shrink(self, number: int) -> None:
        """End all processes but `number` (at least one), which take over all orders."""
        while len(self._readers) > max(number, 1):
            ended = self._readers.pop()
            ended.process.end()
            for ticket in ended.tickets:
                self._hand(ticket)

    def expect(self, coming: Iterator[ReadOrder]) -> None:
        """Read these batches ahead, instead of those expected before."""
        self._receive(must_wait=False)
        self._earlier, self._ahead, self._coming = self._ahead, {}, coming
        self._read_ahead()
        self._earlier = {}

    def batch(self, dataset: RowDataset, order: ReadOrder) -> tuple[Any, Any]:
        """Return the batch (x, y) of an order, with the result and the errors of `dataset.read`."""
        ticket = _pop_ticket(self._ahead, order) or self._give(order)
        if ticket is None:
            return dataset.read(order)
        self._receive(must_wait=False)
        self._read_ahead()
        while ticket.outcome is None:
            self._receive(must_wait=True)
        if isinstance(ticket.outcome, StratagemError):
            raise ticket.outcome
        return ticket.outcome

    def stop(self) -> None:
        """End the processes; the next batch starts them again."""
        for reader in self._readers:
            reader.process.end()
        self._readers, self._ahead, self._coming = [], {}, iter(())

    def _process(self) -> ReaderProcess:
        try:
            return ReaderProcess(self._setup)
        except OSError as error:
            raise LimitError(f"data.readers: no process can be started: {error}") from error

    def _read_ahead(self) -> None:
        """Give the readers as many orders as they may read ahead."""
        num_ahead = sum(map(len, self._ahead.values()))
        while num_ahead < self._max_ahead:
            order = next(self._coming, None)
            if order is None:
                return
            ticket = _pop_ticket(self._earlier, order) or self._give(order)
            if ticket is None:
                return
            self._ahead.setdefault(order, []).append(ticket)
            num_ahead += 1

    def _give(self, order: ReadOrder) -> _Ticket | None:
        """Give an order to a reader; return its ticket, or None if there may be no reader."""
        self.start()
        if not self._readers:
            self._coming = iter(())  # nothing is read ahead until more is expected
            return None
        self._num_given += 1
        ticket = _Ticket(self._num_given, order)
        self._hand(ticket)
        return ticket

    def _hand(self, ticket: _Ticket) -> None:
        """Give an order to the reader with the fewest unanswered ones."""
        reader = min(self._readers, key=lambda candidate: len(candidate.tickets))
        reader.tickets.append(ticket)
        reader.process.order(ticket.number, ticket.order)

    def _receive(self, *, must_wait: bool) -> None:
        """Handle the messages that have arrived. must_wait: wait for at least one."""
        poll = select.poll()
        by_fd = {reader.process.fileno(): reader for reader in self._readers}
        for fd, reader in by_fd.items():
            out = select.POLLOUT if reader.process.has_unsent else 0
            poll.register(fd, select.POLLIN | out)
        for fd, _ in poll.poll(None if must_wait else 0):
            reader = by_fd[fd]
            reader.process.send()
            for message in reader.process.messages():
                self._take(reader, message)
            if reader.process.is_dead:
                self._replace(reader)

    def _take(self, reader: _Reader, message: dict[str, Any]) -> None:
        if "line" in message:
            watching.pass_on(*message["line"])
            return
        ticket = reader.tickets.popleft()
        assert ticket.number == message["ticket"]
        ticket.outcome = error_of(message) or reader.process.batch(message)

    def _replace(self, reader: _Reader) -> None:
        """Replace a process that has ended, and repeat its orders."""
        how, pid = reader.process.end(), reader.process.pid
        watching.pass_on("WARNING", f"reader {pid} ended ({how}); another takes its place")
        if reader.tickets:
            first = reader.tickets[0]
            first.num_deaths += 1
            if first.num_deaths == MAX_DEATHS:
                first.outcome = _fatal(first.order, how)
                reader.tickets.popleft()
        reader.process = self._process()
        for ticket in reader.tickets:
            reader.process.order(ticket.number, ticket.order)


def _pop_ticket(tickets: dict[ReadOrder, list[_Ticket]], order: ReadOrder) -> _Ticket | None:
    """Remove and return the first ticket of an order."""
    waiting = tickets.get(order)
    if not waiting:
        return None
    ticket = waiting.pop(0)
    if not waiting:
        del tickets[order]
    return ticket


def _fatal(order: ReadOrder, how: str) -> UserCodeError:
    numbers = [number % order.num_rows for number in order.numbers]
    rows = ", ".join(map(str, numbers[:_MAX_ROWS_NAMED]))
    more = f" and {len(numbers) - _MAX_ROWS_NAMED} more" if len(numbers) > _MAX_ROWS_NAMED else ""
    return UserCodeError(
        "ReaderEnded",
        f"{MAX_DEATHS} processes ended ({how}) while they read one of these rows of "
        f"data.{order.split}: {rows}{more}",
        activity=f"reading rows of data.{order.split}",
    )


# ---- All readers of a worker ----
#
# These are the readers of all runs of the worker, within the operator's limit.

_Key = tuple[str, str, int, int]


class WorkerReaders:
    """The pools of readers, keyed by run and data. Used by one thread."""

    def __init__(self, max_readers: int) -> None:
        self._max_readers = max_readers
        self._pools: OrderedDict[_Key, ReaderPool] = OrderedDict()

    def of(self, run_id: str, job: JobSpec, entrypoints: EntryPoints) -> ReaderPool | None:
        """Return the readers of a job, which all parts of its run on this worker share; None where
        the worker reads rows itself. They are started at their first use."""
        wanted = job.data.readers or 0
        number = min(wanted, self._max_readers)
        if not number:
            return None
        name, prefetch = job.data.entrypoint, job.data.prefetch or PREFETCH
        assert name is not None  # there are no readers otherwise
        function = DataFunction(name, job.data.kwargs, job.data.collate)
        setup = ReaderSetup(function, job.seed, entrypoints)
        key = (run_id, setup.text(()), number, prefetch)
        if key not in self._pools:
            if number < wanted:
                watching.pass_on(
                    "WARNING",
                    f"data.readers: the job asks for {wanted}, this worker allows {number} "
                    "(--max-readers)",
                )
            self._pools[key] = ReaderPool(setup, number, prefetch, self._room_for)
        return self._pools[key]

    def close(self, run_id: str) -> None:
        """End the readers of a run."""
        for key in [key for key in self._pools if key[0] == run_id]:
            self._pools.pop(key).stop()

    def _room_for(self, coming: ReaderPool) -> int:
        """Return the number of readers that a pool may have now.

        A pool that needs more takes them from the largest pool, but never the last one: pools take
        turns, so they would restart it all the time. The worker itself reads the rows of a pool
        without readers.
        """
        others = [pool for pool in self._pools.values() if pool is not coming]
        free = self._max_readers - sum(len(pool.pids) for pool in others)
        while free < coming.num_readers and others:
            largest = max(others, key=lambda pool: len(pool.pids))
            if len(largest.pids) <= max(free, 0) + 1:
                break
            largest.shrink(len(largest.pids) - 1)
            free += 1
        return max(min(free, coming.num_readers), len(coming.pids))
