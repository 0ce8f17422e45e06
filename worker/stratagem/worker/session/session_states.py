"""States of a session that others may fetch: snapshots of ended segments, and the live one.

Owns the frozen copies, ready to be streamed: contiguous CPU tensors with their manifest. Lives on
the event loop; the copies are made in the torch thread and never change afterwards, until that
thread takes the memory of the oldest snapshot back, of which the coordinator has asked all that it
will: it lets no segment begin while two are without a commit.
"""

import asyncio
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from stratagem.common.base.errors import NotFoundError, UnavailableError
from stratagem.common.tensors.local_files import MemoryCopy
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.torch_codec import manifest_of

NUM_SNAPSHOTS: Final = 2


@dataclass(frozen=True, slots=True)
class Frozen:
    """One state that no longer changes. The buffers are views of tensors kept by themselves."""

    manifest: Manifest
    buffers: Sequence[memoryview]
    name: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)
    """What no other state has; whoever has got this one can name it."""
    reusable: Mapping[str, Tensor] = field(default_factory=dict)
    """Its tensors, where a later snapshot may be copied into them when nobody needs this one."""
    copy: MemoryCopy | None = field(default=None, compare=False)
    """Open for who is near for as long as this state is here."""
    mirror: "Frozen | None" = None
    """The part that the member before this one has of the same state, where it is here, too."""

    def named(self, name: str) -> "Frozen":
        """Return this state or its mirror, whichever has the name. Raises NotFoundError."""
        for state in (self, self.mirror):
            if state is not None and state.name == name:
                return state
        raise NotFoundError(f"no snapshot {name[:40]!r} is here any more")

    def mirrored(self) -> "Frozen":
        """Return the mirror. Raises NotFoundError where there is none."""
        if self.mirror is None:
            raise NotFoundError("no mirror of the part of another member is here")
        return self.mirror


def freeze(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    purpose: Purpose = Purpose.STATE,
    weight: float = 0.0,
    *,
    is_reusable: bool = False,
    mirror: Frozen | None = None,
) -> Frozen:
    """Freeze tensors that the caller no longer changes, with their manifest.

    is_reusable: nobody else has them, so a later snapshot may be copied into them.
    """
    manifest, buffers = manifest_of(tensors, purpose, weight=weight, metadata=metadata)
    return Frozen(manifest, buffers, reusable=tensors if is_reusable else {}, mirror=mirror)


class StateStore:
    """The states of one session."""

    def __init__(self) -> None:
        self._snapshots: OrderedDict[int, Frozen] = OrderedDict()
        self._outputs: tuple[int, Frozen] | None = None
        self._live: tuple[int, Frozen] | None = None
        self._changed = asyncio.Event()
        self._num_readers: Counter[int] = Counter()
        """Of each snapshot that is being read, by its segment."""
        self._lock = threading.Lock()
        """Of the snapshots and their readers, which the torch thread asks for as well."""
        self._offered: set[str] = set()
        """Names of the snapshots of which a copy was offered, whose bytes count as sent."""

    def keep(self, segment: int, state: Frozen, num_kept: int = NUM_SNAPSHOTS) -> None:
        """Keep the snapshot at the end of a segment; only the newest ones are kept."""
        with self._lock:
            self._snapshots[segment] = state
            self._snapshots.move_to_end(segment)
            while len(self._snapshots) > num_kept:
                self._snapshots.popitem(last=False)
            held = self._snapshots.values()
            names = {each.name for state in held for each in (state, state.mirror) if each}
        self._offered &= names
        if state.copy is not None:
            self._offered.add(state.name)

    def note_offered(self, state: Frozen) -> None:
        """Note that whoever asked for a snapshot was offered a copy in place of a stream."""
        self._offered.add(state.name)

    def end_offer(self, state: Frozen) -> bool:
        """Return True where a copy of a snapshot was offered that is asked for as a stream now: it
        could not be read."""
        was_offered = state.name in self._offered
        self._offered.discard(state.name)
        return was_offered

    def drop_copies(self) -> None:
        """Close what was offered of snapshots: nobody reads it any more."""
        with self._lock:
            copies = [each.copy for each in self._snapshots.values()]
        for copy in copies:
            if copy is not None:
                copy.close()

    def has(self, segment: int) -> bool:
        return segment in self._snapshots

    @contextmanager
    def reading(self, segment: int) -> Iterator[Frozen]:
        """Is the time in which a snapshot is read: its memory is not used again meanwhile."""
        with self._lock:
            frozen = self._snapshots.get(segment)
            if frozen is None:
                held = ", ".join(map(str, self._snapshots)) or "none"
                raise NotFoundError(f"no snapshot of segment {segment} here; held: {held}")
            self._num_readers[segment] += 1
        try:
            yield frozen
        finally:
            self._end_reading(segment)

    @contextmanager
    def reading_base(self, name: str) -> Iterator[Frozen | None]:
        """Is the time in which a snapshot is compared with another one; None where no snapshot of
        this name is here any more."""
        with self._lock:
            found = [(n, each) for n, each in self._snapshots.items() if each.name == name]
            self._num_readers.update(segment for segment, _ in found)
        try:
            yield found[0][1] if found else None
        finally:
            for segment, _ in found:
                self._end_reading(segment)

    @contextmanager
    def glimpsing(self, name: str) -> Iterator[Frozen | None]:
        """Is a moment in which a snapshot is looked at, for which whoever wants its memory waits;
        None where no snapshot of this name is here any more."""
        with self._lock:
            yield next((each for each in self._snapshots.values() if each.name == name), None)

    def _end_reading(self, segment: int) -> None:
        with self._lock:
            self._num_readers -= Counter((segment,))  # and none is left of those that are 0

    def take_back(self, segment: int, num_kept: int = NUM_SNAPSHOTS) -> Mapping[str, Tensor]:
        """Drop the snapshot whose place that of this segment will take, and return its tensors to
        be written over; none while it is being read. Called in the torch thread."""
        with self._lock:
            oldest = segment if segment in self._snapshots else next(iter(self._snapshots), -1)
            is_due = oldest == segment or len(self._snapshots) >= num_kept
            if not is_due or self._num_readers[oldest]:
                return {}
            taken = self._snapshots.pop(oldest)
            mirrored = {} if taken.mirror is None else taken.mirror.reusable
            return {**taken.reusable, **mirrored}

    def keep_outputs(self, segment: int, outputs: Frozen) -> None:
        """Keep what the user's own metrics need of the batches evaluated at the end of a segment,
        instead of that of an earlier one."""
        self._outputs = (segment, outputs)

    def outputs(self, segment: int) -> Frozen:
        if self._outputs is None or self._outputs[0] != segment:
            raise NotFoundError(f"no outputs of segment {segment} here")
        return self._outputs[1]

    def set_live(self, membership: int, state: Frozen) -> None:
        """Set the state that members that heal at this membership may copy."""
        self._live = (membership, state)
        self._changed.set()
        self._changed = asyncio.Event()

    def drop_live(self) -> None:
        """Drop the live state: all members took part in a step, so none heals any more."""
        self._live = None

    async def live(self, membership: int, wait_s: float) -> Frozen:
        """Return the state to heal from at a membership; waits until it has been frozen.

        The caller's deadline and the members' own suspicion end the wait, or UnavailableError.
        """
        try:
            async with asyncio.timeout(wait_s):
                while self._live is None or self._live[0] < membership:
                    await self._changed.wait()
                return self._live[1]
        except TimeoutError:
            text = f"no state of membership {membership} to heal from within {wait_s:g} s"
            raise UnavailableError(text) from None
