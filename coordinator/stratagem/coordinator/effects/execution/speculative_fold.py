"""Folds of rounds that begin while the last updates are being synced and journaled.

A fold reads what the disk has, durable or not, and writes a state under its own digest, which no
fact names before the round has closed. So one that begins early and turns out to be another than
the one that is due has cost time and nothing else. Runs on the event loop; callers pass the fold.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from stratagem.common.base.exception_text import told
from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.core.effects import AggregateRound, Effect
from stratagem.coordinator.core.facts import UpdateReceived
from stratagem.coordinator.updates.spool_upload import SpoolEntry

Folded = tuple[Digest, tuple[Digest, ...], tuple[Manifest, int]]
"""The next state, the slots of a server optimizer, and the header of the state's file: what it is
made of, and where its data start."""

Fold = Callable[[AggregateRound, list[SpoolEntry], threading.Event], Folded]
"""Made to run in a thread; ends early when the event is set."""

Foresee = Callable[[RunId, list[UpdateReceived]], frozenset[Effect]]
"""Returns the effects that are due once these facts are journaled."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Round:
    """The updates of one round as far as they have arrived."""

    round_num: int
    entries: dict[int, SpoolEntry] = field(default_factory=dict)
    """Updates by client: checked and in their files, not all of them durable."""
    reported: dict[int, UpdateReceived] = field(default_factory=dict)
    """Facts by client that are about to be journaled."""


@dataclass(slots=True)
class Begun:
    """A fold under way."""

    effect: AggregateRound
    task: asyncio.Task[Folded]
    cancelled: threading.Event


class FoldsAhead:
    """The folds that have begun before their rounds closed: at most one for each party of
    each run.
    """

    def __init__(self, foresee: Foresee) -> None:
        self._foresee = foresee
        self._rounds: dict[tuple[RunId, Party], _Round] = {}
        self._begun: dict[tuple[RunId, Party], Begun] = {}

    def see(self, run_id: RunId, received: UpdateReceived, entry: SpoolEntry, fold: Fold) -> None:
        """Note an update that is whole and will be reported; begin the fold if that closes its
        round.
        """
        key = (run_id, received.party)
        known = self._rounds.get(key)
        if known is None or known.round_num != received.round_num:
            known = self._rounds[key] = _Round(received.round_num)
        known.entries[received.client] = entry
        known.reported[received.client] = received
        for effect in self._foresee(run_id, list(known.reported.values())):
            if isinstance(effect, AggregateRound) and effect.party == received.party:
                self._begin(key, effect, known.entries, fold)

    @contextmanager
    def reporting(self, run_id: RunId, received: UpdateReceived) -> Iterator[None]:
        """A block that reports an update; afterwards the state knows it, or never will."""
        try:
            yield
        finally:
            known = self._rounds.get((run_id, received.party))
            if known is not None and known.round_num == received.round_num:
                known.reported.pop(received.client, None)

    def take(self, effect: AggregateRound) -> Begun | None:
        """Return the fold of exactly that effect, for one taker; another one of its party is
        stopped.
        """
        key = (effect.run_id, effect.party)
        self._rounds.pop(key, None)
        begun = self._begun.pop(key, None)
        if begun is None or begun.effect == effect:
            return begun
        begun.cancelled.set()
        return None

    def forget(self, run_id: RunId) -> None:
        """Stop the folds of a run that has ended."""
        for key in [each for each in self._rounds if each[0] == run_id]:
            del self._rounds[key]
        for key in [each for each in self._begun if each[0] == run_id]:
            self._begun.pop(key).cancelled.set()

    def _begin(
        self,
        key: tuple[RunId, Party],
        effect: AggregateRound,
        entries: dict[int, SpoolEntry],
        fold: Fold,
    ) -> None:
        before = self._begun.get(key)
        if before is not None:
            if before.effect == effect:
                return
            before.cancelled.set()
            del self._begun[key]
        found = []
        for accepted in effect.accepted:
            entry = entries.get(accepted.client)
            if entry is None or entry.digest != accepted.digest or accepted.staleness:
                return
            found.append(entry)
        cancelled = threading.Event()
        task = asyncio.create_task(asyncio.to_thread(fold, effect, found, cancelled))
        task.add_done_callback(_note)
        self._begun[key] = Begun(effect, task, cancelled)


def _note(task: asyncio.Task[Folded]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:  # no task may be left to see it
        log.info("fold ahead of its round failed", reason=told(error))
