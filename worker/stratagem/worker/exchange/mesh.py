"""Carries partial sums from member to member over a link: the direct exchange.

One named thread per exchange issues everything. What it moves and adds was prepared by
`schedule`; here is only the order in time: receives are posted ahead, the next pieces are sent
while one is being added, and nothing waits for the end of a piece before it must.
Any failed wait cuts the link, so that the peers fail at once and not at their deadlines.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stratagem.worker.exchange.layout import Layout
from stratagem.worker.exchange.plan import Party, Step
from stratagem.worker.exchange.schedule import (
    Cut,
    Piece,
    Transfer,
    cut_pieces,
    num_tags,
    prepare,
)
from stratagem.worker.mesh.link import ExchangeError, Link, Work

WINDOW = 4
"""Pieces under way at once."""
MAX_TAG = 2**31 - 1
ABANDON_S = 0.2
"""After a cut, a wait that has not ended by then never will: when a connection ends while gloo
writes to it, the transfer under way may be told nothing."""


@dataclass(slots=True)
class _Run:
    """One step under way; owned by the thread."""

    pieces: tuple[Piece, ...]
    first_tag: int
    divisor: float | None
    receives: list[list[Work]] = field(default_factory=list)
    """Phase 1, by piece."""
    sends: list[list[Work]] = field(default_factory=list)
    """Phase 1, by piece."""
    rest: list[Work] = field(default_factory=list)
    """Phase 2."""


class MeshTransport:
    """A `Transport` among the members of a link, which it owns."""

    def __init__(self, link: Link, layout: Layout, party: Party, *, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._link, self._party = link, party
        self._cuts: tuple[Cut, ...] = cut_pieces(layout, link.size)
        self._num_tags = max(1, num_tags(self._cuts, party))
        self._window = 1 if link.in_order else WINDOW
        self._prepared: dict[int, tuple[Piece, ...]] = {}
        self._changed = threading.Condition()
        self._run: _Run | None = None  # guarded by _changed, as all below
        self._num_launched = 0  # buckets
        self._error = ""
        self._is_closed = False
        self._is_waiting = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._main, name="exchange", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._link.name

    def begin(
        self, number: int, step: Step, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        if step.num_live not in self._prepared:
            self._prepared[step.num_live] = prepare(
                self._cuts, self._party, step, sets, self._window
            )
        turn = number % (MAX_TAG // self._num_tags)
        with self._changed:
            self._run = _Run(self._prepared[step.num_live], turn * self._num_tags, divisor)
            self._num_launched = 0
            self._changed.notify_all()

    def launch(self, bucket: int) -> None:
        with self._changed:
            self._num_launched = bucket + 1
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._run is None or self._error)
            if self._error:
                raise ExchangeError(self._error)

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
            # A thread that is left in its wait raises as soon as that ends: it never again
            # touches the buckets, which belong to the next membership now.
            self._changed.wait_for(lambda: self._has_ended or self._is_waiting)
        self._run = None  # its works hold the group
        self._prepared.clear()
        self._link.close()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._error = self._error or reason
            self._changed.notify_all()
        self._link.cut()

    def _main(self) -> None:
        try:
            self._serve()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _serve(self) -> None:
        while (run := self._next_run()) is not None:
            try:
                self._reduce(run)
            except ExchangeError as error:
                # Only the words are kept: a traceback would keep works, and with them the group.
                self._fail(str(error))
                return
            except BaseException as error:  # a defect of ours must not leave finish waiting
                self._fail(f"the exchange thread ended: {error!r}")
                raise
            with self._changed:
                self._run = None
                self._changed.notify_all()

    def _next_run(self) -> _Run | None:
        with self._changed:
            self._changed.wait_for(lambda: self._run or self._is_closed or self._error)
            return None if self._is_closed or self._error else self._run

    def _reduce(self, run: _Run) -> None:
        for index, piece in enumerate(run.pieces):
            self._send_ready(run, index)
            self._wait(run.receives[index])
            if piece.adds_in_place:
                self._wait(run.sends[index])
            for addition in piece.additions:
                addition.run()
            if run.divisor is not None and not piece.is_extras:
                piece.total.div_(run.divisor)  # while it is warm, and once for all members
            if self._link.in_order:
                run.rest += self._post(run, piece.send_sums, piece.receive_sums)
            else:
                run.rest += self._post(run, piece.send_sums, ())
        for works in run.sends:
            self._wait(works)
        self._wait(run.rest)

    def _send_ready(self, run: _Run, index: int) -> None:
        """Sends piece `index` as soon as its bucket was launched, and those behind it that may
        be under way too and are ready by then."""
        last = min(index + self._window, len(run.pieces))
        if not self._link.in_order:
            while len(run.receives) < last:
                ahead = run.pieces[len(run.receives)]
                run.receives.append(self._post(run, (), ahead.receive_partials))
        num_launched = self._await_launch(run.pieces[index].bucket)
        while len(run.sends) < last and run.pieces[len(run.sends)].bucket < num_launched:
            piece = run.pieces[len(run.sends)]
            if self._link.in_order:
                works = self._post(run, piece.send_partials, piece.receive_partials)
                run.receives.append(works)
                run.sends.append([])
            else:
                run.sends.append(self._post(run, piece.send_partials, ()))
                # Sums can be received over the partial sums: a member sends a sum only after it
                # has received all of ours for it.
                run.rest += self._post(run, (), piece.receive_sums)

    def _await_launch(self, bucket: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._num_launched > bucket or self._error)
            if self._error:
                raise ExchangeError(self._error)
            return self._num_launched

    def _post(
        self, run: _Run, sends: Sequence[Transfer], receives: Sequence[Transfer]
    ) -> list[Work]:
        """Issues transfers. Of two members the lower one sends first, so that a link which goes
        by order finds a receive for every send."""
        rank, link, works = self._link.rank, self._link, []
        for peer in range(link.size):
            out = [t for t in sends if t.peer == peer]
            back = [t for t in receives if t.peer == peer]
            for is_send in (True, False) if rank < peer else (False, True):
                for t in out if is_send else back:
                    issue = link.send if is_send else link.recv
                    works.append(issue(peer, run.first_tag + t.tag, t.tensor))
        return works

    def _wait(self, works: list[Work]) -> None:
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
