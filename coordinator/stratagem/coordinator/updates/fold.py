"""Compute the weighted mean of a round's updates, window by window.

For each element, the mean is the sum over clients, in the order given, of samples × value in
float64, divided by all samples and rounded once to the element's type; a single client's update is
taken unchanged. Updates of earlier rounds weigh less and are rebased first. Integers and bools are
those of the client of this round with most samples (the first of equals); disagreement is logged.
Memory is some windows, and the order of arrival cannot matter. A combination may replace the mean,
and a server optimizer takes the mean from here in float64.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple, Protocol

import numpy as np
import structlog

from stratagem.common.base.errors import InvalidInputError, StratagemError
from stratagem.common.base.ids import Digest
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest, TensorSpec, dtype_named
from stratagem.common.tensors.stream import CHUNK_BYTES, piece_bytes
from stratagem.coordinator.store.blobs import BlobStore, BlobWriter
from stratagem.coordinator.updates.finite_result import LATE, MEAN, FiniteResult, Rule
from stratagem.coordinator.updates.floats import Raw, Wide, narrow, storage, widen
from stratagem.coordinator.updates.reading import (
    Source,
    StateReader,
    UpdateDecoding,
    WholeSource,
    averaged_names,
    is_trained,
    open_state,
    read_integers,
)
from stratagem.coordinator.updates.server_optimizer import GlobalAverage, ServerStep
from stratagem.coordinator.updates.upload import SpoolEntry

# ---- Rebasing ----
#
# The changes of updates of earlier rounds are applied to the present state:
#
#     x_k <- (x_k - base_k) + x        in float64, for every trained floating parameter
#
# A whole model of an earlier round would pull the state back to where it was then; its change
# does not. Buffers (running statistics) and frozen parameters enter unchanged: a sum of changes
# could leave their range, for example with a variance below zero. An element that was not finite
# in the base of an update has no change and takes the number of the present state. Memory is some
# windows.


class Rebasing:
    """Rebases a fold's late updates: their changes are applied to the round's base instead."""

    def __init__(self, store: BlobStore, state: Digest, bases: Mapping[int, Digest]) -> None:
        """Open the round's base state, and the base states of its late updates. state: the digest
        of the former. bases: the digest of each late update's base state, keyed by the update's
        index."""
        with ExitStack() as files:
            opened = {
                digest: open_state(files, store, digest) for digest in {state, *bases.values()}
            }
            self._files = files.pop_all()
        self._state = opened[state][1]
        self._bases = {index: opened[digest][1] for index, digest in bases.items()}

    def is_late(self, index: int) -> bool:
        return index in self._bases

    def apply(self, index: int, dtype: str, offset: int, values: Wide, *, is_trained: bool) -> None:
        """Rebase one window of an update in place; offset: the offset of the window in the state.
        is_trained: add the update's change to the round's base; otherwise only replace numbers that
        are not finite."""
        if index not in self._bases:
            return
        if not is_trained:
            lost = ~np.isfinite(values)  # it was accepted because it has the bits of its base
        else:
            before = self._bases[index].read(dtype, offset, values.size)
            lost = ~np.isfinite(before)
            values -= before
        if not is_trained and not lost.any():
            return
        state = self._state.read(dtype, offset, values.size)
        if is_trained:
            values += state
        np.copyto(values, state, where=lost)

    def close(self) -> None:
        self._files.close()


# ---- Fold ----

WINDOW_ELEMENTS: Final = CHUNK_BYTES // 8
"""Elements per window of large states. Measured with two updates of 40 MB of float32, arithmetic
alone: 24 ms with 2^14, 16 ms with 2^17 and 2^18, 22 ms with 2^20: sums then leave the cache."""

_MAX_NAMES_LOGGED: Final = 8

_log = structlog.get_logger(__name__)


class FoldStoppedError(StratagemError):
    """The fold was stopped because it was asked to; nothing that it wrote is left."""


MOST_SAMPLES: Final = "the one with most samples"
"""The text, for the log, that names the client whose integers are taken if clients differ."""


class Combination(Protocol):
    """A rule that replaces the weighted mean in a fold. It reads the same window of every update,
    in client order, from an update's first window to its last."""

    window_elements: int

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the result for floating elements from an offset on; `raw` is scratch."""

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with the result for integers or bools. If updates differ, return the source of
        the result for the log, such as "the middle"; else ""."""


class Folded(NamedTuple):
    """The blobs that a fold has written: the next state, the slots of a server optimizer, and the
    average over rounds ("" if there is none)."""

    state: Digest
    slots: tuple[Digest, ...]
    average: Digest


@dataclass(frozen=True, slots=True)
class _Window:
    """A range of the state's data of one type; neighbouring floating tensors share windows."""

    dtype: str
    name: str
    """The name of the tensor; set only for integers and bools, whose windows cover one tensor."""
    offset: int
    size_bytes: int
    is_trained: bool
    """True if the window's elements are trained: a server optimizer moves them, the average over
    rounds includes them, and late updates are rebased."""


def fold_weighted_mean(  # noqa: PLR0913  (half have defaults that nearly every caller wants)
    entries: Sequence[SpoolEntry],
    weights: Sequence[float],
    manifest: Manifest,
    out: BlobWriter,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    server: ServerStep | None = None,
    average: GlobalAverage | None = None,
    rebasing: Rebasing | None = None,
    decoding: UpdateDecoding | None = None,
    combination: Combination | None = None,
    rule: Rule = MEAN,
    base: StateReader | None = None,
    numerics: int = CURRENT,
) -> Folded:
    """Write the weighted mean of `entries` as a blob of `manifest`, and commit it.

    With a server optimizer, write its result instead, and return the digests of its slots, too; and
    of the average over rounds. They are durable before the state is.

    `entries` and their `weights` (samples; fewer for late ones, of which `rebasing` has the bases)
    stand in client order. `decoding` reads coded updates; without it all must have the layout of
    the model. `combination` replaces the mean, and has weights of its own; `rule` names it for
    people. `base` is the state that the round began from. Raises DivergedError if a number becomes
    non-finite, IntegrityError if the disk has damaged an update, FoldStoppedError, UnavailableError
    if the disk is full; `out` is aborted then.
    """
    try:
        _check_arguments(entries, weights, manifest, decoding, combination)
        sources = [
            decoding.source(place, entry) if decoding else WholeSource(entry)
            for place, entry in enumerate(entries)
        ]
        num_elements = min(WINDOW_ELEMENTS, piece_bytes(manifest.total_bytes) // 8)
        if combination is not None:
            num_elements = min(num_elements, combination.window_elements)
        factors = mean_factors(weights, numerics)
        folder = _Folder(sources, weights, factors, server, rebasing, num_elements)
        folder.combination, folder.finite = combination, FiniteResult(manifest, rule, base)
        out.write(header_bytes(manifest))
        # One thread adds while the other one hashes and writes.
        with ThreadPoolExecutor(1, thread_name_prefix="fold-write") as pool:
            written: list[Future[None]] = []
            is_plain = server is None and average is None and rebasing is None
            windows = _windows(manifest, num_elements, is_plain=is_plain)
            for index, window in enumerate(windows):
                if should_stop():
                    raise FoldStoppedError("the fold was stopped")
                if len(written) > 1:  # the buffer that comes next is in use until then
                    written.pop(0).result()
                result = folder.fold(window, index % 2)
                written.append(pool.submit(out.write, result.view(np.uint8).data))
                if average is not None:
                    place = window.dtype, window.offset
                    average.take(*place, result, is_trained=window.is_trained)
                failpoint("coordinator.fold.after_window")
            for future in written:
                future.result()
        folder.finish()
        slots = server.commit() if server is not None else ()
        mean = average.commit() if average is not None else Digest("")
        return Folded(out.commit(), slots, mean)
    except BaseException:
        out.abort()
        if server is not None:
            server.abort()
        if average is not None:
            average.abort()
        raise
    finally:
        if rebasing is not None:
            rebasing.close()
        if decoding is not None:
            decoding.close()


def mean_factors(weights: Sequence[float], numerics: int) -> tuple[list[float], float]:
    """Return the factor of each update, and the divisor of their sum. A single update gets the
    factor 1, so that the mean equals the update to the bit."""
    if numerics >= 2 and len(weights) == 1:
        return [1.0], 1.0
    return [float(weight) for weight in weights], math.fsum(weights)


def _check_arguments(
    entries: Sequence[SpoolEntry],
    weights: Sequence[float],
    manifest: Manifest,
    decoding: UpdateDecoding | None,
    combination: Combination | None,
) -> None:
    counts = combination is not None or sum(weights) > 0
    if len(entries) != len(weights) or min(weights, default=0) < 0 or not counts:
        raise InvalidInputError.at(
            "weights", f"{list(weights)} are no numbers of samples of {len(entries)} updates"
        )
    for entry in entries:
        is_decoded = decoding is not None and entry.is_coded
        if not is_decoded and entry.data_bytes != manifest.total_bytes:
            raise InvalidInputError.at(
                "entries", f"{entry.path.name} is not laid out like the model"
            )


def _windows(manifest: Manifest, num_elements: int, *, is_plain: bool) -> Iterator[_Window]:
    """Yield the windows of all data in order: cut at the window size, and where the type or
    treatment changes. is_plain: trained and other floating tensors are treated alike, so they may
    share a window."""
    averaged = averaged_names(manifest)

    def kind(spec: TensorSpec) -> tuple[str, str, bool]:
        name = "" if dtype_named(spec.dtype).is_floating else spec.name
        return spec.dtype, name, not is_plain and is_trained(spec, averaged)

    for (dtype, name, is_special), group in groupby(manifest.stored(), kind):
        specs = list(group)
        end = specs[-1].offset + specs[-1].size_bytes
        step = num_elements * dtype_named(dtype).item_bytes
        for offset in range(specs[0].offset, end, step):
            yield _Window(dtype, name, offset, min(step, end - offset), is_special)


class _Folder:
    """The state of one fold: buffers, readers, and the names of tensors in which clients differ."""

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        factors: tuple[list[float], float],
        server: ServerStep | None,
        rebasing: Rebasing | None,
        num_elements: int,
    ) -> None:
        """Allocate the buffers. num_elements: the number of elements of the largest window."""
        self.combination: Combination | None = None
        self.finite: FiniteResult | None = None
        self._server, self._rebasing = server, rebasing
        self._sources = sources
        self._factors, self._divisor = factors
        self._voters = [
            i for i in range(len(weights)) if rebasing is None or not rebasing.is_late(i)
        ]
        self._largest = max(self._voters, key=lambda i: (weights[i], -i), default=0)
        num_bytes = num_elements * 8
        self._raw = np.empty(num_bytes, np.uint8)
        self._results = (np.empty(num_bytes, np.uint8), np.empty(num_bytes, np.uint8))
        self._sum = np.empty(num_elements, np.float64)
        self._term = np.empty(num_elements, np.float64)
        self._disputed: dict[str, str] = {}
        """Where the values of a disputed integer tensor come from, keyed by tensor name."""

    def fold(self, window: _Window, slot: int) -> Raw:
        """Return the result for a window, in the buffer with index `slot`."""
        dtype = storage(window.dtype)
        raw = self._raw[: window.size_bytes].view(dtype)
        result = self._results[slot][: window.size_bytes].view(dtype)
        if dtype_named(window.dtype).is_floating:
            self._mean(window, raw, result)
        elif self.combination is None:
            place = self._largest, window.offset
            if read_integers(self._sources, *place, result, self._voters):
                self._disputed[window.name] = MOST_SAMPLES
        elif origin := self.combination.integers(
            self._sources, window.dtype, window.offset, result
        ):
            self._disputed[window.name] = origin
        return result

    def finish(self) -> None:
        """Check that the bytes read were those accepted; log tensors in which clients differ."""
        for source in self._sources:
            source.check()
        if self._disputed:
            names, origin = list(self._disputed), next(iter(self._disputed.values()))
            _log.warning(
                f"integer tensors differ between clients: taken from {origin}",
                num_tensors=len(names),
                tensors=names[:_MAX_NAMES_LOGGED],
            )

    def _mean(self, window: _Window, raw: Raw, result: Raw) -> None:
        total = self._sum[: raw.size]
        with np.errstate(over="ignore", invalid="ignore"):  # looked for below
            if self.combination is None:
                self._add(window, raw, total)
            else:
                self.combination.floats(self._sources, window.dtype, window.offset, raw, total)
            if window.is_trained and self._server is not None:
                self._server.apply(window.dtype, window.offset, total)
            narrow(window.dtype, total, result)
        assert self.finite is not None
        rule = LATE if window.is_trained and self._rebasing is not None else None
        if window.is_trained and self._server is not None:
            rule = self._server.rule
        self.finite.check(window.dtype, window.offset, result, rule=rule)

    def _add(self, window: _Window, raw: Raw, total: Wide) -> None:
        term = self._term[: raw.size]
        for index, source in enumerate(self._sources):
            source.read(window.offset, raw)
            target = term if index else total
            widen(window.dtype, raw, target)
            if self._rebasing is not None:
                place, is_special = (window.dtype, window.offset), window.is_trained
                self._rebasing.apply(index, *place, target, is_trained=is_special)
            target *= self._factors[index]
            if index:
                total += term
        total /= self._divisor
