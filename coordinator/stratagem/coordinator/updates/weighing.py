"""The fold rules other than the mean weighted by rows: SCAFFOLD, q-FedAvg, FedNova, and means of
regions. Each reads the updates window by window."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum, sqrt
from sys import float_info
from typing import Final, NamedTuple

import numpy as np

from stratagem.common.tensors.manifest import (
    CONTROL,
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
    dtype_named,
)
from stratagem.coordinator.updates.floats import Raw, Wide, storage, widen
from stratagem.coordinator.updates.fold import MOST_SAMPLES, WINDOW_ELEMENTS, FoldStoppedError
from stratagem.coordinator.updates.reading import (
    Source,
    StateReader,
    WholeSource,
    averaged_names,
    read_integers,
)
from stratagem.coordinator.updates.robust import Verdict, squared_lengths
from stratagem.coordinator.updates.upload import SpoolEntry

# ---- SCAFFOLD ----
#
# The fold of SCAFFOLD, option II (Karimireddy et al., 2020, arXiv:1910.06378), is
#
#     x <- Σ x_k / |S|              over the clients of the round, S
#     c <- c + Σ Δc_k / N           of the tensors `control/...`; N is the number of all clients
#
# in client order, in float64, rounded once. So c stays the mean of the tensors that all clients
# keep.

_WINDOW_ELEMENTS: Final = 1 << 18


class ControlledMean:
    """The fold rule of SCAFFOLD: the mean of the clients, and the next server control variate c.
    Memory is a few windows."""

    def __init__(
        self,
        rows: Sequence[float],
        num_clients: int,
        manifest: Manifest,
        base: StateReader,
        *,
        begins_anew: bool,
    ) -> None:
        """Make the rule. rows: the number of rows of each client of the round; integers are taken
        from the client with most rows. num_clients: the number of clients in the federation.
        begins_anew: reset c to zero."""
        self._largest, self._num_clients = rows.index(max(rows)), num_clients
        self._base, self._begins_anew = base, begins_anew
        self.window_elements = _WINDOW_ELEMENTS
        self._runs = runs_of(manifest, lambda spec: spec.name.startswith(CONTROL))

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        term = np.empty(out.size)
        out[:] = -0.0  # which adds nothing, not even a sign
        for source in sources:
            source.read(offset, raw)
            widen(dtype, raw, term)
            out += term
        for part, is_control in pieces(self._runs, dtype, offset, out.size):
            if not is_control:
                out[part] /= len(sources)
            elif self._begins_anew:
                out[part] = 0.0
            else:
                start = offset + part.start * raw.itemsize
                before = self._base.read(dtype, start, part.stop - part.start)
                out[part] = before + out[part] / self._num_clients

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        read_integers(sources, self._largest, offset, out)
        return ""


# ---- q-FedAvg ----
#
# q-FedAvg (Li et al., 2020, arXiv:1905.10497) weighs the change of each client by its loss.
#
# With L = 1 / lr, the change d = w - w_k and F, the loss of w over the client's rows, plus 1e-10,
# the paper moves the state w by -Σ δ / Σ h:
#
#     δ = F^q · L · d
#     h = q · F^(q-1) · ‖L · d‖² + L · F^q
#
# so the change of client k counts F_k^q · L / Σ h. Here numerator and denominator are divided by
# L and by the q-th power of the greatest F, so no power leaves the range of its type.

LOSS_FLOOR: Final = 1e-10
_LARGEST: Final = float_info.max


@dataclass(frozen=True, slots=True)
class Fairness:
    """Weighs the clients' changes by their losses (q-FedAvg), in one round."""

    q: float
    lr: float
    """The clients' learning rate; the paper's L is its inverse."""
    losses: Sequence[float]
    """The loss of each client before training, in client order; at least 0."""

    def verdict(
        self,
        sources: Sequence[Source],
        manifest: Manifest,
        base: StateReader,
        should_stop: Callable[[], None],
    ) -> Verdict:
        """Return the weight and the length of each update's change from `base`; each update is read
        once. Only trained parameters count: a loss has no gradient in buffers."""
        averaged = averaged_names(manifest)
        squares = squared_lengths(
            sources, manifest, base, should_stop, lambda spec: spec.name not in averaged
        ).tolist()
        shares = fair_shares(self.losses, squares, self.q, self.lr)
        return Verdict(tuple(shares), tuple(min(sqrt(square), _LARGEST) for square in squares))


def fair_shares(
    losses: Sequence[float], squared_lengths: Sequence[float], q: float, lr: float
) -> list[float]:
    """Return the q-FedAvg weight of each change; the weights sum to at most 1.

    losses: the loss of each client before training, at least 0. squared_lengths: the squared
    lengths of the changes.
    """
    raised = [loss + LOSS_FLOOR for loss in losses]
    greatest = max(raised)
    powers = [(loss / greatest) ** q for loss in raised]
    total = 0.0
    for loss, power, length in zip(raised, powers, squared_lengths, strict=True):
        slope = q * power / loss
        total += power + (slope * (length / lr) if slope else 0.0)  # 0 times infinite is no number
    return [power / total for power in powers]


# ---- FedNova ----
#
# FedNova (Wang et al., 2020, arXiv:2007.07481) weighs the change of each client by its number of
# steps.
#
# A client that takes more steps goes further, and pulls the mean toward its own optimum. So each
# change is divided by how far its steps have gone under a gradient of one, ‖a‖₁, and their mean
# by rows goes as far as the clients do on average:
#
#     x <- x + (Σ p_k ‖a_k‖₁) · Σ p_k (x_k - x) / ‖a_k‖₁       p_k = n_k / Σ n
#
# With the momentum ρ of SGD, τ steps make ‖a‖₁ = (τ - ρ(1 - ρ^τ)/(1 - ρ)) / (1 - ρ); with the
# term of FedProx and α = lr · μ below 1 it is (1 - (1 - α)^τ) / α; else τ.


def nova_factors(rows: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """Return the FedNova weight of each change. lengths: ‖a‖₁ of each client; clients that took no
    step get 0."""
    counted = [num if length else 0.0 for num, length in zip(rows, lengths, strict=True)]
    num_rows = fsum(counted)
    if not num_rows:
        return [0.0] * len(rows)
    shares = [num / num_rows for num in counted]
    mean = fsum(share * length for share, length in zip(shares, lengths, strict=True))
    pairs = zip(shares, lengths, strict=True)
    return [share * (mean / length) if length else 0.0 for share, length in pairs]


def length_of_steps(num_steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """Return ‖a‖₁, the distance that the steps go under a gradient of one. pull: lr · μ of FedProx,
    which has no momentum."""
    if momentum:
        lag = momentum * (1.0 - _power(momentum, num_steps)) / (1.0 - momentum)
        return (num_steps - lag) / (1.0 - momentum)
    if pull:
        return (1.0 - _power(1.0 - pull, num_steps)) / pull
    return float(num_steps)


def _power(base: float, exponent: int) -> float:
    """Return a power computed by multiplication only, so that all machines get the same bits."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result


# ---- Pieces of windows ----
#
# If the elements of a window are not all treated alike, the window is cut into pieces that are.

Run = tuple[int, int, bool]
"""A range of bytes: first byte, byte after the last, and True if the range is special."""


def runs_of(manifest: Manifest, is_special: Callable[[TensorSpec], bool]) -> list[Run]:
    """Divide the data into ranges of neighbouring tensors that are all special or all not."""
    runs = []
    for kind, group in groupby(manifest.stored(), is_special):
        specs = list(group)
        end = specs[-1].offset + specs[-1].size_bytes
        runs.append((specs[0].offset, end, kind))
    return runs


def pieces(
    runs: Sequence[Run], dtype: str, offset: int, num_elements: int
) -> list[tuple[slice, bool]]:
    """Cut a window into slices, with True for special data. offset: the offset of the window's
    first byte."""
    item_bytes = dtype_named(dtype).item_bytes
    end, parts = offset + num_elements * item_bytes, []
    for start, stop, kind in runs:
        first, last = max(start, offset), min(stop, end)
        if first < last:
            piece = slice((first - offset) // item_bytes, (last - offset) // item_bytes)
            parts.append((piece, kind))
    return parts


# ---- Scaled changes ----
#
# The state is moved by a multiple of each client's change, window by window:
#
#     x <- x + Σ factor_k · (x_k - x)       for every trained floating parameter, in float64
#
# The factors need not add up to one. So buffers (running statistics) and frozen parameters are
# averaged by weights of their own: a sum of changes could leave their range. Integers and bools
# are those of one client.


class Shares(NamedTuple):
    """The weights of the updates for changes and for means, in client order."""

    factors: Sequence[float]
    """The weight of each update's change, for trained parameters."""
    means: Sequence[float]
    """Each update's weight for buffers and frozen parameters; `divisor` divides their sum."""
    divisor: float
    largest: int
    """The index of the update from which integers and bools are taken."""


class ScaledChanges:
    """A fold rule that adds weighted changes to the state; memory is a few windows, whatever the
    number of updates."""

    def __init__(self, shares: Shares, manifest: Manifest, base: StateReader) -> None:
        self._shares, self._base = shares, base
        self.window_elements = _WINDOW_ELEMENTS
        averaged = averaged_names(manifest)
        self._runs = runs_of(manifest, lambda spec: spec.name not in averaged)

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        base, term = self._base.read(dtype, offset, out.size), np.empty(out.size)
        is_fixed = ~np.isfinite(base)  # what is infinite stays so: its change is no number
        parts = pieces(self._runs, dtype, offset, out.size)
        out[:] = -0.0  # which adds nothing, not even a sign
        for place, source in enumerate(sources):
            source.read(offset, raw)
            widen(dtype, raw, term)
            for part, is_trained in parts:
                values = term[part]
                if is_trained:
                    values -= base[part]
                    values[is_fixed[part]] = 0.0
                    values *= self._shares.factors[place]
                else:
                    values *= self._shares.means[place]
            out += term
        for part, is_trained in parts:
            if is_trained:
                out[part] += base[part]
            else:
                out[part] /= self._shares.divisor

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        read_integers(sources, self._shares.largest, offset, out)
        return ""


# ---- Regional mean ----
#
# The weighted mean can be a sum of regions: in each the updates in client order, then the regions
# in order of name, in float64, divided and rounded once. Each region's sum depends on its own
# updates alone, so it is the same wherever it is computed.


class RegionalMean:
    """A fold rule for the mean of updates, added up region by region; memory is two windows."""

    def __init__(self, regions: Sequence[Sequence[int]], weights: Sequence[float]) -> None:
        """Make the rule. regions: the indices of each region's updates. weights: the number of
        samples of each update.

        A single update, too, is multiplied by its weight and divided again, because its region does
        not know that it is the only one.
        """
        assert sorted(place for region in regions for place in region) == list(range(len(weights)))
        self.window_elements = WINDOW_ELEMENTS
        self._regions, self._factors = regions, [float(weight) for weight in weights]
        self._divisor = fsum(weights)
        self._largest = max(range(len(weights)), key=lambda place: (weights[place], -place))

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        sum_of_region, term = np.empty(out.size), np.empty(out.size)
        for number, region in enumerate(self._regions):
            parts = [(sources[place], self._factors[place]) for place in region]
            add_up(parts, dtype, offset, raw, sum_of_region if number else out, term)
            if number:
                out += sum_of_region
        out /= self._divisor

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        return MOST_SAMPLES if read_integers(sources, self._largest, offset, out) else ""


def add_up(
    parts: Sequence[tuple[Source, float]], dtype: str, offset: int, raw: Raw, out: Wide, term: Wide
) -> None:
    """Fill `out` with the weighted sum of one window of the updates, in the order given; `raw` and
    `term` are scratch."""
    for index, (source, weight) in enumerate(parts):
        target = term if index else out
        source.read(offset, raw)
        widen(dtype, raw, target)
        target *= weight
        if index:
            out += term


# ---- Sums of regions ----
#
# A region that is a federation of its own sends a sum, which enters the mean of the regions.
#
# A sum has the layout of the model with all floating tensors in float64: s = sum n_k w_k over the
# region's clients in their order. Integers and bools are those of its client with most rows, the
# first of equals. The mean is the same as that of RegionalMean over the same tree, to the bit.

SUM_DTYPE = "float64"


def sums_manifest(model: Manifest) -> Manifest:
    """Return the manifest of a region's sum: the model's, with floating tensors in float64."""
    named = [(spec.name, _dtype_of_sum(spec), spec.shape) for spec in model.tensors]
    aliases = {spec.name: spec.alias_of for spec in model.tensors if spec.alias_of is not None}
    return build_manifest(named, Purpose.UPDATE, aliases=aliases)


def _dtype_of_sum(spec: TensorSpec) -> str:
    return SUM_DTYPE if dtype_named(spec.dtype).is_floating else spec.dtype


def write_sum(
    entries: Sequence[SpoolEntry],
    weights: Sequence[float],
    model: Manifest,
    write: Callable[[memoryview], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Write the weighted sum of updates, given in client order, window by window.

    Raises IntegrityError if the disk has damaged an update, FoldStoppedError.
    """
    sources = [WholeSource(entry) for entry in entries]
    parts = list(zip(sources, weights, strict=True))
    largest = max(range(len(weights)), key=lambda place: (weights[place], -place))
    for spec in model.stored():
        item_bytes = dtype_named(spec.dtype).item_bytes
        end = spec.offset + spec.size_bytes
        for offset in range(spec.offset, end, WINDOW_ELEMENTS * item_bytes):
            if should_stop():
                raise FoldStoppedError("the sum of the region was stopped")
            num = min(WINDOW_ELEMENTS, (end - offset) // item_bytes)
            raw = np.empty(num, storage(spec.dtype))
            if dtype_named(spec.dtype).is_floating:
                total = np.empty(num)
                with np.errstate(over="ignore", invalid="ignore"):  # the spool looks for it
                    add_up(parts, spec.dtype, offset, raw, total, np.empty(num))
            else:
                total = raw
                read_integers(sources, largest, offset, raw)
            write(total.view(np.uint8).data)
    for source in sources:
        source.check()


class MeanOfSums:
    """A fold rule for the mean of the sums that regions send, in order of the regions."""

    def __init__(
        self,
        sums: Sequence[SpoolEntry],
        num_samples: Sequence[float],
        model: Manifest,
        integers_of: int,
    ) -> None:
        """Make the rule. num_samples: the number of samples of each region's clients. integers_of:
        the index of the sum from which integers are taken."""
        self.window_elements = WINDOW_ELEMENTS
        self._sources = [WholeSource(entry) for entry in sums]
        self._divisor, self._integers_of = fsum(num_samples), integers_of
        stored = zip(model.stored(), sums_manifest(model).stored(), strict=True)
        self._places = [(spec, other) for spec, other in stored if spec.size_bytes]
        self._offsets = [spec.offset for spec, _ in self._places]
        self._end = sum(other.size_bytes for _, other in self._places)

    def floats(
        self, _sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        place, part = self._place(offset), np.empty(out.size)
        for number, source in enumerate(self._sources):
            source.read(place, part if number else out)
            if number:
                out += part
        out /= self._divisor
        self._check_at(place + out.nbytes)

    def integers(self, _sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        place, differ = self._place(offset), False
        integers = [np.empty(out.size, storage(dtype)) for _ in self._sources]
        for source, values in zip(self._sources, integers, strict=True):
            source.read(place, values)
            differ |= not np.array_equal(values, integers[0])
        out[:] = integers[self._integers_of]
        self._check_at(place + out.nbytes)
        return MOST_SAMPLES if differ else ""

    def _place(self, offset: int) -> int:
        spec, other = self._places[bisect_right(self._offsets, offset) - 1]
        items = (offset - spec.offset) // dtype_named(spec.dtype).item_bytes
        return other.offset + items * dtype_named(other.dtype).item_bytes

    def _check_at(self, end: int) -> None:
        """Check the sums' checksums once they have been read completely."""
        if end == self._end:
            for source in self._sources:
                source.check()
