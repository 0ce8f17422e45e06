"""Carry partial sums from member to member over a link, in a separate thread.

One named thread per exchange issues all transfers, in a fixed order. The method determines how
partial sums become the sum: `direct` by default, `ring` or `native` where the job gave up equal
bits. Any failed wait cuts the link, so that the peers fail at once and not at their deadlines. On a
CUDA device the thread works on a separate stream, concurrently with backward.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stratagem.worker.exchange.layout import StepPlan
from stratagem.worker.mesh.link import ExchangeError, Link, PendingTransfer
from stratagem.worker.mesh.staging import SideStream

MAX_TAG = 2**31 - 1
ABANDON_S = 0.2
"""The time after a cut at which a wait is abandoned: when a connection ends while gloo writes to
it, the transfer may never be notified."""


class Turn(Protocol):
    """The current step as an exchange method sees it: its transfers, and how to wait for them."""

    @property
    def first_tag(self) -> int:
        """Return the first of the `num_tags` tags that are free in this step."""

    @property
    def divisor(self) -> float | None: ...

    def await_launch(self, bucket: int) -> int:
        """Block until the bucket is launched; return the number launched. Raises ExchangeError."""

    def wait(self, works: list[PendingTransfer]) -> None:
        """Wait for all transfers and empty the list. Raises ExchangeError."""


class Run(Protocol):
    """The interface of work that the thread does in one call."""

    def run(self, prepared: Any, turn: Turn) -> None:
        """Do all transfers, in a fixed order."""


class Method(Protocol):
    """An algorithm by which the members' partial sums become the sum."""

    @property
    def suffix(self) -> str:
        """Return the text added to the engine's name for display; empty for the default method."""

    @property
    def num_tags(self) -> int:
        """Return the number of tags that one step uses."""

    def prepare(self, step: StepPlan, sets: Sequence[Sequence[Tensor]]) -> Any:
        """Return the input of `run` for all steps with this many live shards. Allocates tensors,
        transfers nothing."""

    def run(self, prepared: Any, turn: Turn) -> None:
        """Exchange one step; afterwards set 0 holds the sums."""


@dataclass(frozen=True, slots=True)
class _Turn:
    method: Run
    prepared: Any
    first_tag: int
    divisor: float | None
    transport: "MeshTransport"

    def await_launch(self, bucket: int) -> int:
        return self.transport.await_launch(bucket)

    def wait(self, works: list[PendingTransfer]) -> None:
        self.transport.wait(works)


class MeshTransport:
    """A `ReductionTransport` among the members of a link, which it takes over."""

    def __init__(
        self,
        link: Link,
        method: Method,
        side: SideStream,
        *,
        deadline_s: float,
        num_further_tags: int = 0,
    ) -> None:
        """Start the thread. num_further_tags: the tags per step for `run_between`."""
        self.deadline_s = deadline_s
        self._link, self._method, self._side = link, method, side
        self._num_tags = max(1, method.num_tags + num_further_tags)
        self._first_tag = 0  # of the step that was begun last
        self._prepared: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._run: _Turn | None = None  # guarded by _changed, as all below
        self._num_launched = 0  # buckets
        self._mark: torch.cuda.Event | None = None
        """Event recorded after the last launched bucket on the device."""
        self._error = ""
        self._is_closed = False
        self._is_waiting = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._main, name="exchange", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return f"{self._link.name}{self._method.suffix}"

    def begin(
        self, number: int, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        if step.num_live not in self._prepared:
            self._prepared[step.num_live] = self._method.prepare(step, sets)
        prepared = self._prepared[step.num_live]
        self._first_tag = number % (MAX_TAG // self._num_tags) * self._num_tags
        with self._changed:
            self._run = _Turn(self._method, prepared, self._first_tag, divisor, self)
            self._num_launched = 0
            self._changed.notify_all()

    def launch(self, bucket: int) -> None:
        mark = self._side.mark()
        with self._changed:
            self._num_launched, self._mark = bucket + 1, mark
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._run is None or self._error)
            if self._error:
                raise ExchangeError(self._error)
        self._side.join()

    def run_between(self, method: Run, prepared: Any) -> None:
        """Run other work in the thread between `finish` and the next step, and block until it is
        done. It uses tags from the method's `num_tags` on. Raises ExchangeError."""
        mark = self._side.mark()
        first_tag = self._first_tag + self._method.num_tags
        with self._changed:
            self._run = _Turn(method, prepared, first_tag, None, self)
            self._num_launched, self._mark = 1, mark
            self._changed.notify_all()
        self.finish()

    def cut(self) -> None:
        self._fail("the exchange was cut")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            is_idle = self._run is None
            self._changed.notify_all()
        if not is_idle:
            self._fail("the exchange was closed")
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, ABANDON_S)
            # An abandoned thread raises as soon as its wait ends: it never again touches the
            # buckets, which now belong to the next membership.
            self._changed.wait_for(lambda: self._has_ended or self._is_waiting)
        self._side.join()  # the prepared tensors may be freed then
        self._run = None  # its transfers refer to the group
        self._prepared.clear()
        self._link.close()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._error = self._error or reason
            self._changed.notify_all()
        self._link.cut()

    def _main(self) -> None:
        try:
            with self._side.entered():
                self._serve()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _serve(self) -> None:
        while (run := self._next_run()) is not None:
            try:
                run.method.run(run.prepared, run)
            except ExchangeError as error:
                # Only the message is kept: a traceback would keep transfers and the group alive.
                self._fail(str(error))
                return
            except BaseException as error:  # a defect of ours must not leave finish waiting
                self._fail(f"the exchange thread ended: {error!r}")
                raise
            with self._changed:
                self._run = None
                self._changed.notify_all()

    def _next_run(self) -> _Turn | None:
        with self._changed:
            self._changed.wait_for(lambda: self._run or self._is_closed or self._error)
            return None if self._is_closed or self._error else self._run

    def await_launch(self, bucket: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._num_launched > bucket or self._error)
            if self._error:
                raise ExchangeError(self._error)
            self._side.follow(self._mark)
            return self._num_launched

    def wait(self, works: list[PendingTransfer]) -> None:
        for work in works:
            self._set_waiting(True)
            work.wait(self.deadline_s)
            self._set_waiting(False)
        works.clear()

    def _set_waiting(self, is_waiting: bool) -> None:
        with self._changed:
            self._is_waiting = is_waiting
            if self._error:
                raise ExchangeError(self._error)
