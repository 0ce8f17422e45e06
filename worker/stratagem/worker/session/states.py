"""Keep the states of a session that others may fetch: snapshots of ended segments, and the live
one.

The frozen copies are contiguous CPU tensors with their manifest, ready to be streamed. The store is
used on the event loop. The torch thread makes the copies, which never change afterwards, until that
thread takes back the memory of the oldest snapshot. By then the coordinator has requested
everything that it needs, as it lets no segment begin while two are without a commit.
"""

import asyncio
import hashlib
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from torch import Tensor

from stratagem.common.base.errors import NotFoundError, UnavailableError
from stratagem.common.observe.metrics import Durations
from stratagem.common.tensors.leaves import leaves_of, pieces_of
from stratagem.common.tensors.local_files import MemoryCopy
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.same_bytes import are_equal, cut, same_bytes
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.v1 import coordinator_pb2
from stratagem.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from stratagem.worker.engine import StepReport

# ---- States of a session ----

NUM_SNAPSHOTS: Final = 2


@dataclass(frozen=True, slots=True)
class Frozen:
    """An immutable state with its manifest. The buffers are views that keep its tensors alive."""

    manifest: Manifest
    buffers: Sequence[memoryview]
    name: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)
    """A unique name, by which its recipients can refer to it."""
    reusable: Mapping[str, Tensor] = field(default_factory=dict)
    """Its tensors, if a later snapshot may overwrite them once this one is not needed any more."""
    copy: MemoryCopy | None = field(default=None, compare=False)
    """A copy for readers on this machine, which exists as long as this state."""
    mirror: "Frozen | None" = None
    """The previous member's mirrored slice of the same state; None without a mirror."""

    def named(self, name: str) -> "Frozen":
        """Return this state or its mirror, by name. Raises NotFoundError for other names."""
        for state in (self, self.mirror):
            if state is not None and state.name == name:
                return state
        raise NotFoundError(f"no snapshot {name[:40]!r} is here any more")

    def mirrored(self) -> "Frozen":
        """Return the mirror. Raises NotFoundError if there is none."""
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
    """Make a Frozen state of tensors that the caller no longer changes.

    is_reusable: a later snapshot may overwrite the tensors, which nothing else shares.
    """
    manifest, buffers = manifest_of(tensors, purpose, weight=weight, metadata=metadata)
    return Frozen(manifest, buffers, reusable=tensors if is_reusable else {}, mirror=mirror)


class StateStore:
    """The snapshots and the live state that one session offers to others."""

    def __init__(self) -> None:
        self._snapshots: OrderedDict[int, Frozen] = OrderedDict()
        self._outputs: tuple[int, Frozen] | None = None
        self._live: tuple[int, Frozen] | None = None
        self._changed = asyncio.Event()
        self._num_readers: Counter[int] = Counter()
        """Number of readers of each snapshot, keyed by segment."""
        self._lock = threading.Lock()
        """Guards the snapshots and their readers, which the torch thread uses, too."""
        self._offered: set[str] = set()
        """Names of snapshots whose copy was offered; their bytes count as sent."""

    def keep(self, segment: int, state: Frozen, num_kept: int = NUM_SNAPSHOTS) -> None:
        """Keep the snapshot of a segment's end, and only the `num_kept` newest ones."""
        with self._lock:
            self._snapshots[segment] = state
            self._snapshots.move_to_end(segment)
            while len(self._snapshots) > num_kept:
                self._snapshots.popitem(last=False)
            held = self._snapshots.values()
            names = {frozen.name for state in held for frozen in (state, state.mirror) if frozen}
        self._offered &= names
        if state.copy is not None:
            self._offered.add(state.name)

    def note_offered(self, state: Frozen) -> None:
        """Note that a snapshot was offered as a copy instead of a stream."""
        self._offered.add(state.name)

    def end_offer(self, state: Frozen) -> bool:
        """Return whether a copy of this state was offered, and note that it could not be read: its
        bytes are now streamed."""
        was_offered = state.name in self._offered
        self._offered.discard(state.name)
        return was_offered

    def drop_copies(self) -> None:
        """Close the offered copies of snapshots, which nobody reads any more."""
        with self._lock:
            copies = [state.copy for state in self._snapshots.values()]
        for copy in copies:
            if copy is not None:
                copy.close()

    def has(self, segment: int) -> bool:
        return segment in self._snapshots

    @contextmanager
    def reading(self, segment: int) -> Iterator[Frozen]:
        """Context manager that provides a snapshot whose memory is not reused meanwhile."""
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
        """Context manager that provides a named snapshot for comparison; None if it is gone."""
        with self._lock:
            matches = [(n, state) for n, state in self._snapshots.items() if state.name == name]
            self._num_readers.update(segment for segment, _ in matches)
        try:
            yield matches[0][1] if matches else None
        finally:
            for segment, _ in matches:
                self._end_reading(segment)

    @contextmanager
    def glimpsing(self, name: str) -> Iterator[Frozen | None]:
        """Context manager that provides a named snapshot briefly, while reuse of its memory waits;
        None if it is gone."""
        with self._lock:
            yield next((state for state in self._snapshots.values() if state.name == name), None)

    def _end_reading(self, segment: int) -> None:
        with self._lock:
            self._num_readers -= Counter((segment,))  # which removes counts of 0

    def take_back(self, segment: int, num_kept: int = NUM_SNAPSHOTS) -> Mapping[str, Tensor]:
        """Drop the snapshot that this segment's will replace; return its tensors for overwriting,
        or none while it is being read. Called in the torch thread."""
        with self._lock:
            oldest = segment if segment in self._snapshots else next(iter(self._snapshots), -1)
            is_due = oldest == segment or len(self._snapshots) >= num_kept
            if not is_due or self._num_readers[oldest]:
                return {}
            state = self._snapshots.pop(oldest)
            mirrored = {} if state.mirror is None else state.mirror.reusable
            return {**state.reusable, **mirrored}

    def keep_outputs(self, segment: int, outputs: Frozen) -> None:
        """Keep the outputs of the evaluation after a segment, for the user's own metrics."""
        self._outputs = (segment, outputs)

    def outputs(self, segment: int) -> Frozen:
        if self._outputs is None or self._outputs[0] != segment:
            raise NotFoundError(f"no outputs of segment {segment} here")
        return self._outputs[1]

    def set_live(self, membership: int, state: Frozen) -> None:
        """Offer this state to members of this membership that are behind (healing)."""
        self._live = (membership, state)
        self._changed.set()
        self._changed = asyncio.Event()

    def drop_live(self) -> None:
        """Withdraw the offered state: after a step by all members, no member is behind."""
        self._live = None

    async def live(self, membership: int, wait_s: float) -> Frozen:
        """Wait for the state offered under a membership, and return it.

        Raises UnavailableError if there is none after wait_s; the caller's deadline may end the
        wait earlier.
        """
        try:
            async with asyncio.timeout(wait_s):
                while self._live is None or self._live[0] < membership:
                    await self._changed.wait()
                return self._live[1]
        except TimeoutError:
            text = f"no state of membership {membership} to heal from within {wait_s:g} s"
            raise UnavailableError(text) from None


# ---- Sent part of a state ----
#
# A caller gets the whole state, or only the tensors that differ from a snapshot it has.


@dataclass(frozen=True, slots=True)
class SentState:
    """A state's manifest, and the bytes to send: all but those that the receiver has (`same`)."""

    manifest: Manifest
    buffers: Sequence[memoryview]
    same: Sequence[pb.SameBytes] = ()

    @property
    def num_bytes(self) -> int:
        return self.manifest.total_bytes - sum(span.size for span in self.same)


def without_same(state: Frozen, base: Frozen) -> SentState:
    """Leave out what equals the base, a state that the receiver has. Run it in a thread."""
    same = same_bytes(state.manifest, state.buffers, base.manifest, base.buffers)
    sent = [
        pb.SameBytes(offset=span.offset, base_offset=span.base_offset, size=span.size)
        for span in same
    ]
    return SentState(state.manifest, list(cut(state.manifest, state.buffers, same)), sent)


# ---- Former slices ----
#
# When a state is divided anew, copies of the former slices are kept until all members are known to
# have their new ones: if the members change before that, those that are done have the slices that
# the others still need.

State = tuple[Mapping[str, Tensor], Mapping[str, str]]
"""A state: tensors and metadata."""


@dataclass(frozen=True, slots=True)
class KeptSlices:
    """Copies of a member's slices of the previous division of the state."""

    membership: int
    """The membership among whose members the state was divided before."""
    size: int
    """The number of slices in the previous division."""
    step: int
    """The step after which the slices were copied."""
    slices: Mapping[int, State]
    """The slices, keyed by number."""
    grad_norm: float
    is_finite: bool

    def said(self) -> coordinator_pb2.KeptSlices:
        """Return the description of these slices for the members' rendezvous."""
        return coordinator_pb2.KeptSlices(
            numbers=sorted(self.slices),
            size=self.size,
            membership=self.membership,
            step=self.step,
            grad_norm=self.grad_norm,
            is_finite=self.is_finite,
        )

    def given(self, numbers: Iterable[int]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return some of the slices, merged into one state."""
        parts = [self.slices[number] for number in numbers]
        tensors = {name: tensor for part, _ in parts for name, tensor in part.items()}
        metadata = {name: text for _, texts in parts for name, text in texts.items()}
        return tensors, metadata


# ---- Digests of unchanged leaves ----
#
# Parameters that do not train are the same in each commit, and so are their moments. Their bytes
# are compared with those of the snapshot whose leaves were hashed last, which takes a fifth of the
# time of SHA-256 where they are equal, and next to none where they are not. There is no other proof
# that a tensor has not changed: torch counts changes in place, but not those by `.data`, by views
# of the storage or by other libraries (decision 19). That snapshot is held for one block at a time:
# when its memory is needed for the next one it is dropped, and leaves are hashed again. Used by
# several threads.

_BLOCK_BYTES: Final = 2**20
_Glimpsing = Callable[[str], AbstractContextManager[Frozen | None]]
_Layout = list[tuple[object, ...]]


class KnownLeaves:
    """Digests of the leaves of the latest hashed snapshot of a session."""

    def __init__(self, glimpsing: _Glimpsing) -> None:
        """Begin without digests. glimpsing: gives brief access to the snapshot of a name, if it
        still exists."""
        self._glimpsing = glimpsing
        self._name, self._layout = "", _Layout()
        self._digests: dict[int, bytes] = {}

    def hasher(self, state: Frozen) -> "LeafHasher":
        """Return the hasher for a state, which then counts as the latest hashed snapshot."""
        stored = state.manifest.stored()
        layout: _Layout = [(spec.name, spec.dtype, spec.shape, spec.offset) for spec in stored]
        base, base_digests = self._name, self._digests if layout == self._layout else {}
        digests = base_digests if base == state.name else {}
        self._name, self._layout, self._digests = state.name, layout, digests
        return LeafHasher(state, lambda: self._glimpsing(base), base_digests, digests)


class LeafHasher:
    """Hashes the leaves of one snapshot; equal leaves of the latest one are not hashed again."""

    def __init__(
        self,
        state: Frozen,
        glimpsing: Callable[[], AbstractContextManager[Frozen | None]],
        known: dict[int, bytes],
        found: dict[int, bytes],
    ) -> None:
        """Cut the state into leaves. known: the previous snapshot's digests. found: gets this
        state's."""
        self._glimpsing, self._base_digests, self._new_digests = glimpsing, known, found
        self._leaves = leaves_of(state.manifest)

    def digest(self, number: int, pieces: Sequence[memoryview]) -> bytes:
        """Return the SHA-256 of leaf `number`, which consists of these pieces."""
        digest = self._base_digests.get(number)
        if digest is None or not self._is_same(number, pieces):
            digest = hashed(pieces)
        self._new_digests[number] = digest
        return digest

    def _is_same(self, number: int, pieces: Sequence[memoryview]) -> bool:
        before: Sequence[memoryview] = ()
        for index, piece in enumerate(pieces):
            for at in range(0, len(piece), _BLOCK_BYTES):
                with self._glimpsing() as base:
                    if base is None:  # its memory may now belong to the next snapshot
                        return False
                    if not before:
                        leaf = self._leaves[number]
                        before = list(pieces_of(leaf, base.manifest, base.buffers))
                    block = before[index][at : at + _BLOCK_BYTES]
                    if not are_equal(piece[at : at + _BLOCK_BYTES], block):
                        return False
        return True


def hashed(pieces: Sequence[memoryview]) -> bytes:
    """Return the SHA-256 of the pieces' concatenation."""
    sha256 = hashlib.sha256()
    for piece in pieces:
        sha256.update(piece)
    return sha256.digest()


# ---- Work statistics ----
#
# The torch thread updates the counts once per step. Only the metrics of the worker read them, when
# the worker is scraped.

DEFECT: Final = "defect"
"""The outcome of an execution that ended because of a bug in Stratagem."""
OUTCOMES: Final = (
    *(outcome.name for outcome in pb.ExecuteResult.DESCRIPTOR.oneofs_by_name["outcome"].fields),
    DEFECT,
)
STEP_BOUNDS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(slots=True)
class WorkStats:
    """Counts and durations of this worker's work, for metrics.

    ended: executions by outcome, see `ExecuteResult` in worker.proto. stalled_s: how long the torch
    thread has been at one activity, if that is reported as a stall.
    """

    step_seconds: Durations = field(default_factory=lambda: Durations(STEP_BOUNDS_S))
    snapshot_stall_seconds: Durations = field(default_factory=lambda: Durations(STEP_BOUNDS_S))
    num_steps: int = 0
    num_skipped_steps: int = 0
    num_rows: int = 0
    exchange_wait_s: float = 0.0
    stalled_s: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)

    def add_step(self, seconds: float, report: "StepReport") -> None:
        """Count one training step, with its duration and the numbers of its report."""
        self.num_steps += 1
        self.step_seconds.add(seconds)
        self.num_rows += report.num_rows
        self.num_skipped_steps += report.num_skipped
        self.exchange_wait_s += report.exchange_wait_s


class ClientSteps:
    """Measures the duration of each local step of a federated client, until the next one begins."""

    def __init__(self, stats: WorkStats) -> None:
        self._stats = stats
        self._began_s: float | None = None

    def begin_step(self) -> None:
        """Begin a step, which ends the previous one."""
        self._end_step()
        self._began_s = time.perf_counter()

    def end(self, num_rows: int) -> None:
        """End the last step. num_rows: the rows of all steps."""
        self._end_step()
        self._stats.num_rows += num_rows

    def _end_step(self) -> None:
        if self._began_s is None:
            return
        self._stats.num_steps += 1
        self._stats.step_seconds.add(time.perf_counter() - self._began_s)
        self._began_s = None
