"""The readers of one data set: which of them reads what, how far ahead, and what if one dies.

A batch is the same whoever reads it and however often, so nothing is lost with a reader: another
takes its place and gets its orders; where there is none, the worker reads itself. Must not know
steps, shards and models.
"""

import select
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from stratagem.common.base.errors import LimitError, StratagemError, UserCodeError
from stratagem.worker.data.reader.reader_messages import ReaderSetup, error_of
from stratagem.worker.data.reader.reader_process import ReaderProcess
from stratagem.worker.data.row_datasets import ReadOrder, RowDataset
from stratagem.worker.user_code import output_capture

PREFETCH: Final = 2
"""Batches per reader, unless the job says otherwise."""
MAX_DEATHS: Final = 3
"""Of readers at one order: more are not tried."""
_MAX_ROWS_NAMED: Final = 32


@dataclass(slots=True, eq=False)
class _Ticket:
    """An order that was given."""

    number: int
    order: ReadOrder
    outcome: tuple[Any, Any] | StratagemError | None = None
    num_deaths: int = 0


@dataclass(slots=True, eq=False)
class _Reader:
    process: ReaderProcess
    tickets: deque[_Ticket] = field(default_factory=deque)
    """Those that are not answered, in order."""


class ReaderPool:
    """Some readers of equal data sets. Used by one thread."""

    def __init__(
        self,
        setup: ReaderSetup,
        num_readers: int,
        prefetch: int = PREFETCH,
        room_for: Callable[["ReaderPool"], int] | None = None,
    ) -> None:
        """prefetch: batches that each reader reads ahead. room_for: says how many processes this
        pool may have now, whenever a batch is wanted."""
        self._setup, self.num_readers = setup, num_readers
        self._max_ahead, self._room_for = num_readers * prefetch, room_for
        self._readers: list[_Reader] = []
        self._coming: Iterator[ReadOrder] = iter(())
        self._ahead: dict[ReadOrder, list[_Ticket]] = {}
        self._earlier: dict[ReadOrder, list[_Ticket]] = {}  # ahead of what was expected before
        self._num_given = 0

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [reader.process.pid for reader in self._readers]

    def start(self) -> None:
        """Starts the processes that do not run yet. They make their data sets by themselves."""
        if len(self._readers) == self.num_readers:
            return
        number = self.num_readers if self._room_for is None else self._room_for(self)
        while len(self._readers) < number:
            self._readers.append(_Reader(self._process()))

    def shrink(self, number: int) -> None:
        """Ends all processes but so many, at least one; these get the orders of the others."""
        while len(self._readers) > max(number, 1):
            ended = self._readers.pop()
            ended.process.end()
            for ticket in ended.tickets:
                self._hand(ticket)

    def expect(self, coming: Iterator[ReadOrder]) -> None:
        """Reads these batches ahead, instead of what was expected before."""
        self._receive(must_wait=False)
        self._earlier, self._ahead, self._coming = self._ahead, {}, coming
        self._read_ahead()
        self._earlier = {}

    def batch(self, dataset: RowDataset, order: ReadOrder) -> tuple[Any, Any]:
        """Returns (x, y) of an order, as `dataset.read` would; raises what that would raise."""
        ticket = _taken(self._ahead, order) or self._give(order)
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
        """Ends the processes. They are started again when a batch is wanted."""
        for reader in self._readers:
            reader.process.end()
        self._readers, self._ahead, self._coming = [], {}, iter(())

    def _process(self) -> ReaderProcess:
        try:
            return ReaderProcess(self._setup)
        except OSError as error:
            raise LimitError(f"data.readers: no process can be started: {error}") from error

    def _read_ahead(self) -> None:
        """Gives the readers as much to do as they may read ahead."""
        num_ahead = sum(map(len, self._ahead.values()))
        while num_ahead < self._max_ahead:
            order = next(self._coming, None)
            if order is None:
                return
            ticket = _taken(self._earlier, order) or self._give(order)
            if ticket is None:
                return
            self._ahead.setdefault(order, []).append(ticket)
            num_ahead += 1

    def _give(self, order: ReadOrder) -> _Ticket | None:
        """Gives an order to a reader; returns None where there is no room for one."""
        self.start()
        if not self._readers:
            self._coming = iter(())  # nothing is read ahead before more is expected
            return None
        self._num_given += 1
        ticket = _Ticket(self._num_given, order)
        self._hand(ticket)
        return ticket

    def _hand(self, ticket: _Ticket) -> None:
        """Gives an order to the reader that has the least to do."""
        reader = min(self._readers, key=lambda each: len(each.tickets))
        reader.tickets.append(ticket)
        reader.process.order(ticket.number, ticket.order)

    def _receive(self, *, must_wait: bool) -> None:
        """Takes what has arrived."""
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
            output_capture.pass_on(*message["line"])
            return
        ticket = reader.tickets.popleft()
        assert ticket.number == message["ticket"]
        ticket.outcome = error_of(message) or reader.process.batch(message)

    def _replace(self, reader: _Reader) -> None:
        """Puts another process in the place of one that has ended."""
        how, pid = reader.process.end(), reader.process.pid
        output_capture.pass_on("WARNING", f"reader {pid} ended ({how}); another takes its place")
        if reader.tickets:
            first = reader.tickets[0]
            first.num_deaths += 1
            if first.num_deaths == MAX_DEATHS:
                first.outcome = _fatal(first.order, how)
                reader.tickets.popleft()
        reader.process = self._process()
        for ticket in reader.tickets:
            reader.process.order(ticket.number, ticket.order)


def _taken(tickets: dict[ReadOrder, list[_Ticket]], order: ReadOrder) -> _Ticket | None:
    """Takes the first ticket of an order out of those."""
    found = tickets.get(order)
    if not found:
        return None
    ticket = found.pop(0)
    if not found:
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
