"""One reader as its worker sees it: a process, the connection to it, and the memory it writes to.

Nothing here waits. Must not know which orders are worth giving.
"""

import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from stratagem.worker.data.reader.batch_layout import rebuild
from stratagem.worker.data.reader.batch_memory import MappedSegments
from stratagem.worker.data.reader.reader_messages import ReaderSetup, order_text
from stratagem.worker.data.row_datasets import ReadOrder

_MODULE: Final = "stratagem.worker.data.reader"
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CHUNK_BYTES: Final = 1 << 16
_MAX_FDS: Final = 8
_PATIENCE_S: Final = 10.0
"""With a process that has closed its connection, which is the last that it does."""
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


class ReaderProcess:
    """A process that reads rows. Used by one thread."""

    def __init__(self, setup: ReaderSetup) -> None:
        """Starts the process; it makes its data set by itself. Raises OSError."""
        own, theirs = socket.socketpair()
        with theirs:
            try:
                fd = theirs.fileno()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, str(fd), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[fd],
                    env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
                )
            except BaseException:
                own.close()
                raise
        self._connection = own
        own.setblocking(False)
        self._unsent = bytearray(setup.text(sys.path).encode() + b"\n")
        self._received = bytearray()
        self._fds: deque[int] = deque()
        self._segments = MappedSegments()
        self._freed: list[int] = []
        self.is_dead = False

    def fileno(self) -> int:
        """Returns the descriptor to wait at."""
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while the process has not taken all that was said to it."""
        return bool(self._unsent)

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, ticket: int, order: ReadOrder) -> None:
        """Gives an order; they are answered one after the other."""
        freed = [self._freed.pop() for _ in range(len(self._freed))]
        self._unsent += order_text(ticket, order, freed).encode() + b"\n"
        self.send()

    def send(self) -> None:
        """Sends what the process takes at once."""
        try:
            while self._unsent and not self.is_dead:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # what it has said before may still be there
            self._unsent.clear()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields what has arrived; `is_dead` is set when there will be no more."""
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
            *lines, rest = self._received.split(b"\n")
            self._received = rest
            yield from map(json.loads, lines)

    def batch(self, message: dict[str, Any]) -> tuple[Any, Any]:
        """Returns (x, y) of an answer. The tensors are views of memory that is written again once
        none of them is left; an answer must be passed here before the next one is."""
        number, memory = message["segment"], _NOTHING
        if number is not None:
            memory = self._memory(number, is_new=message["is_new"])
        made = [rebuild(tree, memory) for tree in message["trees"]]
        return made[0], made[-1]

    def end(self) -> str:
        """Ends the process; returns how it has ended, if it had before."""
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
