"""Run a reader: take orders of rows from its worker and answer with batches.

The reader makes the data set by calling the function that the job names, as the worker has done, so
the worker sends only numbers. The reader ends when its worker closes the connection.
"""

import ctypes
import inspect
import io
import json
import os
import signal
import socket
import sys
import traceback
from collections import OrderedDict
from contextlib import suppress
from typing import Any, Final

import torch

from stratagem.common.base.errors import InvalidInputError, StratagemError
from stratagem.worker.data.datasets import Dataset, map_tensors
from stratagem.worker.data.factory import made_data
from stratagem.worker.data.reader_batches import (
    Layout,
    ReaderSetup,
    WrittenSegments,
    error_text,
    order_of,
    setup_of,
)
from stratagem.worker.data.rows import ReadOrder, RowDataset
from stratagem.worker.user_code import watching
from stratagem.worker.user_code.entrypoints import user_code

# ---- Reader loop ----

_MAX_MADE: Final = 8
"""Maximum number of cached data sets, if each client has its own."""


def serve(fd: int) -> None:
    """Serve the worker at the other end of the socket until the worker closes it."""
    torch.set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with socket.socket(fileno=fd) as connection, suppress(ConnectionError):
        lines = connection.makefile("rb")
        first = lines.readline()
        if not first:
            return
        message = json.loads(first)
        sys.path[:] = message["sys_path"]
        reader = _Reader(connection, setup_of(message))
        with watching.installed(), watching.to(reader.tell):
            reader.prepare()
            for line in lines:
                reader.answer(json.loads(line))


class _Reader:
    """One reader: its data sets, its memory, and the connection to its worker."""

    def __init__(self, connection: socket.socket, setup: ReaderSetup) -> None:
        self._connection, self._setup = connection, setup
        self._segments = WrittenSegments()
        self._made: OrderedDict[tuple[tuple[str, int], ...], dict[str, Dataset]] = OrderedDict()

    def tell(self, level: str, text: str) -> None:
        """Send a line that the user's code has printed or logged to the worker."""
        self._send(json.dumps({"line": [level, text]}))

    def prepare(self) -> None:
        """Make the data set before the first order, unless each client has its own. Errors are
        ignored, since they will recur with an order."""
        function = self._setup.function
        with suppress(StratagemError):
            factory = self._setup.entrypoints.bind(function.entrypoint, function.kwargs, "data")
            if not {"client_id", "num_clients"} & inspect.signature(factory).parameters.keys():
                self._splits(())

    def answer(self, message: dict[str, Any]) -> None:
        """Execute one order and send the answer."""
        for number in message["freed"]:
            self._segments.free(number)
        ticket, order = message["ticket"], order_of(message)
        try:
            x, y = self._dataset(order).read(order)
            with user_code(f"handing over rows of data.{order.split}"):
                text, fds = self._packed(ticket, x, y)
        except StratagemError as error:
            text, fds = error_text(ticket, error), []
        try:
            self._send(text, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _packed(self, ticket: int, x: Any, y: Any) -> tuple[str, list[int]]:
        """Return a batch as a message, and the file of its segment if that is new."""
        layout, is_both = Layout(), y is x
        trees = [
            layout.describe(map_tensors(tree, lambda t: t))
            for tree in ((x,) if is_both else (x, y))
        ]
        message: dict[str, Any] = {"ticket": ticket, "trees": trees, "segment": None}
        fds = []
        if layout.size:
            segment, fd = self._segments.take(layout.size)
            layout.write(segment.memory)
            message |= {"segment": segment.number, "is_new": fd is not None}
            fds = [] if fd is None else [fd]
        return json.dumps(message), fds

    def _dataset(self, order: ReadOrder) -> RowDataset:
        dataset = self._splits(order.given).get(order.split)
        num_rows = len(dataset) if isinstance(dataset, RowDataset) else 0
        if not isinstance(dataset, RowDataset) or num_rows != order.num_rows:
            raise InvalidInputError.at(
                f"data.{order.split}",
                f"has {order.num_rows} rows in the worker and {num_rows} in its reader: "
                "data.entrypoint must give the same whenever it is called",
            )
        return dataset

    def _splits(self, given: tuple[tuple[str, int], ...]) -> dict[str, Dataset]:
        if given not in self._made:
            if len(self._made) >= _MAX_MADE:
                self._made.popitem(last=False)
            setup = self._setup
            self._made[given] = made_data(
                setup.function, setup.entrypoints, dict(given), setup.seed
            )
        self._made.move_to_end(given)
        return self._made[given]

    def _send(self, text: str, fds: list[int] | None = None) -> None:
        data = text.encode() + b"\n"
        sent = socket.send_fds(self._connection, [data], fds or [])
        self._connection.sendall(data[sent:])


# ---- Main program ----
#
# `python -m stratagem.worker.data.reader_loop FD PARENT` runs one reader over an inherited socket.

_PR_SET_PDEATHSIG: Final = 1
_OTHERS_SIGNALS: Final = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "XCPU")
"""Signals sent to all processes of a worker, which the worker itself handles. They are ignored by a
handler that does nothing, since programs started by the user's code do not inherit it."""


def _end_with(parent: int) -> None:
    """Let the kernel end this process with the thread that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(0)


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    for name in _OTHERS_SIGNALS:
        signal.signal(getattr(signal, f"SIG{name}"), lambda *_: None)

    try:
        serve(int(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # its data set need not be destroyed
