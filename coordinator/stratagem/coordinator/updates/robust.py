"""Combine the updates of a round by robust rules, which a minority of false updates cannot control.

The change of an update is the vector, in float64, of its floating elements minus those of the state
that it began from. An element that is not finite in that state has not changed. In float32,
distances between different updates could come out as 0.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import groupby
from math import fsum
from typing import Final, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from stratagem.common.base.errors import DivergedError
from stratagem.common.strategy import (
    Bulyan,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    RobustRule,
    TrimmedMean,
)
from stratagem.common.tensors.manifest import Manifest, TensorSpec, dtype_named
from stratagem.coordinator.updates.floats import Raw, Wide, storage, widen
from stratagem.coordinator.updates.reading import Source, StateReader

# ---- Changes ----
#
# The inner products, lengths and distances of changes are computed over whole updates.

Matrix = NDArray[np.float64]

_ELEMENTS_IN_MEMORY: Final = 1 << 22
_BLOCK: Final = 1 << 16


def gram(
    sources: Sequence[Source],
    manifest: Manifest,
    base: StateReader,
    should_stop: Callable[[], None],
) -> Matrix:
    """Return the inner products of all pairs of changes, in order of the updates.

    Blocks are multiplied one after the other, with one linear algebra thread, so that equal updates
    give equal bits on equal machines. should_stop: raises if the work is to stop.
    """
    _limit_to_one_thread()
    total = np.zeros((len(sources), len(sources)))
    with np.errstate(over="ignore", invalid="ignore"):  # an update may be beyond all measure
        for block in _blocks(sources, manifest, base, should_stop):
            total += block @ block.T
    for source in sources:
        source.check()
    return total


def squared_lengths(
    sources: Sequence[Source],
    manifest: Manifest,
    base: StateReader,
    should_stop: Callable[[], None],
    is_counted: Callable[[TensorSpec], bool] = lambda _: True,
) -> Wide:
    """Return the squared length of each update's change, over tensors for which is_counted."""
    total = np.zeros(len(sources))
    with np.errstate(over="ignore", invalid="ignore"):
        for block in _blocks(sources, manifest, base, should_stop, is_counted):
            total += np.square(block, out=block).sum(axis=1)
    for source in sources:
        source.check()
    return total


def squared_distances(products: Matrix) -> Matrix:
    """Return the squared distances between updates, from the inner products of their changes;
    infinite if beyond the range of float64."""
    lengths = np.diag(products)
    with np.errstate(over="ignore", invalid="ignore"):
        distances = lengths[:, None] + lengths[None, :] - 2 * products
    distances = np.where(np.isnan(distances), np.inf, np.maximum(distances, 0.0))
    np.fill_diagonal(distances, 0.0)
    return distances


def _blocks(
    sources: Sequence[Source],
    manifest: Manifest,
    base: StateReader,
    should_stop: Callable[[], None],
    is_counted: Callable[[TensorSpec], bool] = lambda _: True,
) -> Iterator[Matrix]:
    """Yield blocks of changes: some elements, one row per update, until all elements are read."""
    num_elements = min(_BLOCK, max(1, _ELEMENTS_IN_MEMORY // len(sources)))
    block = np.empty((len(sources), num_elements))

    def kind(spec: TensorSpec) -> tuple[str, bool]:
        return spec.dtype, dtype_named(spec.dtype).is_floating and is_counted(spec)

    for (dtype, counts), group in groupby(manifest.stored(), kind):
        specs = list(group)
        item_bytes = dtype_named(dtype).item_bytes
        end = specs[-1].offset + specs[-1].size_bytes
        for offset in range(specs[0].offset, end, num_elements * item_bytes):
            should_stop()
            num = min(num_elements, (end - offset) // item_bytes)
            raw = np.empty(num, storage(dtype))
            if not counts:
                for source in sources:
                    source.read(offset, raw)  # all bytes are checked
                continue
            before, rows = base.read(dtype, offset, num), block[:, :num]
            for source, row in zip(sources, rows, strict=True):
                source.read(offset, raw)
                widen(dtype, raw, row)
                row -= before
            rows[:, ~np.isfinite(before)] = 0.0
            yield rows


@cache
def _limit_to_one_thread() -> None:
    """Limit linear algebra to one thread: results depend on the number of threads. Never lifted:
    nothing else here uses the library, and two folds would lift it for each other."""
    threadpool_limits(limits=1, user_api="blas")


# ---- Geometric median ----
#
# The geometric median (arXiv:1912.13445) is computed as weights of updates, by Weiszfeld's
# iteration:
#
#     d_k <- |x_k - sum a_j x_j|        a_k <- (1 / d_k) / sum (1 / d_j)
#
# Every iterate is a weighted mean, so its distances follow from inner products, and the updates
# are read once however many iterations there are. The first weights are 1 / (median distance to
# the other updates): starting from the mean, which one false update can put anywhere, an
# iteration removes only a constant factor of the distance.

_SHORTEST: Final = 1e-12
"""The least distance used as a divisor: an iterate may coincide with an update."""


def geometric_weights(products: Matrix, iterations: int) -> tuple[Wide, Wide]:
    """Return the updates' weights in the geometric median after some iterations, and their
    distances to the last iterate. products: inner products of the changes. Updates that are
    infinitely far from most others get weight 0."""
    to_others = _median_distances(products)
    is_near = np.isfinite(to_others)
    if not is_near.any():
        raise DivergedError("the distances between most updates are beyond the range of float64")
    weights = _inverse(to_others[is_near])
    among_near = products[np.ix_(is_near, is_near)]
    # Seen from the update in the midst of the others: what they have in common cancels out before
    # it costs digits.
    midst = int(np.argmax(weights))
    row = among_near[midst]
    among_near = among_near - row[:, None] - row[None, :] + row[midst]
    away = _distances_to(among_near, weights)
    for _ in range(iterations):
        weights = _inverse(away)
        away = _distances_to(among_near, weights)
    all_weights, lengths = np.zeros(len(products)), np.full(len(products), np.inf)
    all_weights[is_near], lengths[is_near] = weights, away
    return all_weights, lengths


def _median_distances(products: Matrix) -> Wide:
    in_order = np.sort(squared_distances(products), axis=1)
    middle: Wide = np.sqrt(in_order[:, len(products) // 2])
    return middle


def _inverse(lengths: Wide) -> Wide:
    inverse = 1.0 / np.maximum(lengths, _SHORTEST)
    return np.asarray(inverse / np.add.reduce(inverse))


def _distances_to(products: Matrix, weights: Wide) -> Wide:
    with_iterate = np.add.reduce(products * weights, axis=1)
    squared = np.diag(products) - 2 * with_iterate + np.add.reduce(with_iterate * weights)
    away: Wide = np.sqrt(np.maximum(squared, 0.0))
    return away


# ---- Krum ----
#
# Krum (arXiv:1703.02757) chooses updates by their distance to those around them.
#
# Among n updates of which f may be false, the score of one is the sum of its squared distances to
# the n - f - 2 nearest others; the lowest is the best, and of equal ones the first.


def krum_scores(distances: Matrix, num_false: int) -> Wide:
    """Return the Krum score of each update, from the squared distances between updates."""
    num_updates = len(distances)
    num_nearest = max(1, num_updates - num_false - 2)
    others = np.sort(distances, axis=1)[:, 1:]  # the first one is that to itself
    total = np.zeros(num_updates)
    for column in others[:, :num_nearest].T:
        total += column
    return total


def nearest(distances: Matrix, num_false: int, num_kept: int) -> list[int]:
    """Return the indices of the num_kept updates with the lowest Krum scores, ascending."""
    in_order = np.argsort(krum_scores(distances, num_false), kind="stable")
    return sorted(int(place) for place in in_order[:num_kept])


def nearest_one_by_one(distances: Matrix, num_false: int) -> list[int]:
    """Return the indices of the updates that Bulyan (arXiv:1802.07927) chooses, ascending. It picks
    the update with the lowest score among those left, until n - 2f are chosen."""
    remaining = list(range(len(distances)))
    chosen = []
    for _ in range(len(distances) - 2 * num_false):
        among_them = distances[np.ix_(remaining, remaining)]
        chosen.append(remaining.pop(int(np.argmin(krum_scores(among_them, num_false)))))
    return sorted(chosen)


# ---- Statistics of elements ----
#
# Each statistic reduces the values of an element. It takes rows of one length and returns
# float64; the order of the rows does not matter. Rows are overwritten.

Statistic = Callable[[list[Raw]], Wide]


def median(rows: list[Raw]) -> Wide:
    """Return the median of each column; of an even number of rows, the mean of the middle two."""
    low, high = (len(rows) - 1) // 2, len(rows) // 2
    sort_columns(rows, network(len(rows), frozenset({low, high})))
    return _middle(rows)


def lower_median(rows: list[Raw]) -> Raw:
    """Return the median of each column; of an even number of rows, the lower of the middle two."""
    low = (len(rows) - 1) // 2
    sort_columns(rows, network(len(rows), frozenset({low})))
    return rows[low]


def trimmed_mean(num_trimmed: int) -> Statistic:
    """Return a function for the mean of each column without the num_trimmed smallest and largest
    values; values are added from the smallest on."""

    def statistic(rows: list[Raw]) -> Wide:
        end = len(rows) - num_trimmed
        sort_columns(rows, network(len(rows), frozenset(range(num_trimmed, end))))
        return _sum(rows[num_trimmed:end]) / (end - num_trimmed)

    return statistic


def mean_around_median(num_left_out: int) -> Statistic:
    """Return a function for the mean of each column's values nearest to the median, without
    num_left_out others. Of two values that are equally near, the larger is left out first."""

    def statistic(rows: list[Raw]) -> Wide:
        num_kept = len(rows) - num_left_out
        sort_columns(rows, network(len(rows), frozenset(range(len(rows)))))
        rows = [row.astype(np.float64, copy=False) for row in rows]
        middle = _middle(rows)
        total = _sum(rows[:num_kept])
        # The nearest ones are neighbours in order: they begin one further as long as the next value
        # is nearer than the first.
        for start in range(num_left_out):
            is_nearer = middle - rows[start] > rows[start + num_kept] - middle
            later = _sum(rows[start + 1 : start + 1 + num_kept])
            np.copyto(total, later, where=is_nearer)
        return total / num_kept

    return statistic


def _middle(rows: list[Raw]) -> Wide:
    low, high = rows[(len(rows) - 1) // 2], rows[len(rows) // 2]
    middle: Wide = low.astype(np.float64)
    if high is not low:
        middle *= 0.5  # before they are added: the sum of two may be out of range
        middle += 0.5 * high.astype(np.float64)
    return middle


def _sum(rows: list[Raw]) -> Wide:
    total: Wide = rows[0].astype(np.float64)
    for row in rows[1:]:
        total += row
    return total


# ---- Combinations ----
#
# In place of the weighted mean, a fold takes a statistic of each element, or a weighted sum.
#
# It reads a window of every update in client order, so memory is as many windows as there are
# updates, and their order of arrival cannot matter. Of integers and bools both take the middle
# value, which no minority of updates can choose.

_MAX_WINDOW: Final = 1 << 18
_NARROW: Final = frozenset({"float32", "float16", "bfloat16"})
"""The types whose values float32 holds exactly; they are compared in float32."""


def window_of(num_updates: int) -> int:
    """Return the window size, in elements, at which memory has room for one window per update."""
    return min(_MAX_WINDOW, max(COLUMNS, _ELEMENTS_IN_MEMORY // num_updates))


def _middle_integers(sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
    """Fill `out` with lower medians of integers; return "the middle" if updates differ, or ""."""
    rows = [np.empty(out.size, storage(dtype)) for _ in sources]
    for source, row in zip(sources, rows, strict=True):
        source.read(offset, row)
    differ = any(not np.array_equal(row, rows[0]) for row in rows[1:])
    out[:] = lower_median(rows) if differ else rows[0]
    return "the middle" if differ else ""


class StatisticOfRows:
    """A fold rule that applies a statistic, such as the median, to each floating element."""

    integers = staticmethod(_middle_integers)

    def __init__(self, num_updates: int, statistic: Statistic) -> None:
        self.window_elements = window_of(num_updates)
        self._statistic = statistic

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        rows = np.empty((len(sources), out.size), np.float32 if dtype in _NARROW else np.float64)
        for source, row in zip(sources, rows, strict=True):
            source.read(offset, raw)
            widen(dtype, raw, row)
            row += 0.0  # gives all zeros one sign
        for start in range(0, out.size, COLUMNS):
            part = slice(start, start + COLUMNS)
            out[part] = self._statistic([row[part] for row in rows])


class WeightedSum:
    """A fold rule for the weighted mean of updates; for shortened updates the base state makes up
    the missing weight."""

    integers = staticmethod(_middle_integers)

    def __init__(self, weights: Sequence[float], base: StateReader | None = None) -> None:
        """Make the rule. weights: the weights of the updates, in client order; with `base`, the
        share of each change that is kept."""
        self.window_elements = window_of(len(weights))
        self._weights, self._base = weights, base
        self._divisor = fsum(weights) if base is None else float(len(weights))
        self._of_base = fsum(1.0 - weight for weight in weights)

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        term = np.empty(out.size)
        out[:] = -0.0  # which adds nothing, not even a sign
        for source, weight in zip(sources, self._weights, strict=True):
            source.read(offset, raw)
            if weight:
                widen(dtype, raw, term)
                term *= weight
                out += term
        if self._base is not None and self._of_base:
            out += self._of_base * self._base.read(dtype, offset, out.size)
        out /= self._divisor


# ---- Rules ----
#
# A robust rule of the job becomes the combination that replaces the weighted mean in a fold.


def places_read(rule: RobustRule, num_updates: int, weights: Sequence[float]) -> list[int]:
    """Return the indices of the updates that the fold must read: all except those of weight 0."""
    if not weights or isinstance(rule, NormBound):
        return list(range(num_updates))
    return [place for place, weight in enumerate(weights) if weight]


def combination(
    rule: RobustRule, weights: Sequence[float], base: StateReader
) -> StatisticOfRows | WeightedSum:
    """Return the fold rule for a robust rule. weights: the weights of the updates that are read, in
    client order."""
    num = len(weights)
    match rule:
        case Median():
            return StatisticOfRows(num, median)
        case TrimmedMean():
            return StatisticOfRows(num, trimmed_mean(rule.num_trimmed(num)))
        case Bulyan():
            return StatisticOfRows(num, mean_around_median(2 * rule.byzantine))
        case Krum() | MultiKrum() | GeometricMedian():
            return WeightedSum(weights)
        case NormBound():
            return WeightedSum(weights, base)
        case _:
            assert_never(rule)


# ---- Sorting network ----
#
# Many columns are sorted at once, by minima and maxima of whole rows.
#
# In Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, Algorithm M) the
# compared rows depend on their number alone. Each comparison is two numpy calls on rows that stay
# in the cache, 10 times as fast for 10 rows of 10 million float32 as numpy.sort. Comparisons that
# no wanted row depends on are left out. Zeros must all have one sign, as min and max may return
# either.

COLUMNS: Final = 8192
"""The number of columns sorted together: a row of them fits the first-level cache."""


class Comparator(NamedTuple):
    """Puts the smaller elements of two rows into the first row: a step of a sorting network."""

    first: int
    second: int
    is_min_wanted: bool
    is_max_wanted: bool


@lru_cache(64)
def network(num_rows: int, wanted: frozenset[int]) -> tuple[Comparator, ...]:
    """Return a sorting network that is correct for the wanted rows, counted from the smallest."""
    comparators, needed = [], set(wanted)
    for first, second in reversed(list(_merge_exchange(num_rows))):
        if first in needed or second in needed:
            comparators.append(Comparator(first, second, first in needed, second in needed))
            needed |= {first, second}
    return tuple(reversed(comparators))


def sort_columns(rows: list[Raw], comparators: Sequence[Comparator]) -> None:
    """Sort each column of equally long rows; the rows are overwritten and exchanged."""
    if not comparators:
        return
    spare = np.empty_like(rows[0])
    for first, second, is_min_wanted, is_max_wanted in comparators:
        low, high = rows[first], rows[second]
        if not is_max_wanted:
            np.minimum(low, high, out=low)
        elif not is_min_wanted:
            np.maximum(low, high, out=high)
        else:
            np.minimum(low, high, out=spare)
            np.maximum(low, high, out=high)
            rows[first], spare = spare, low


def _merge_exchange(num_rows: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, (num_rows - 1).bit_length() - 1)
    p = top if num_rows > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            for i in range(num_rows - d):
                if i & p == r:
                    yield i, i + d
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2


# ---- Verdict ----
#
# A verdict gives the weight of each update of a round, and the reason. It is made once and kept, so
# a fold that is repeated on any machine combines the same updates.

_LARGEST: Final = float(np.finfo(np.float64).max)


class Verdict(NamedTuple):
    """What a robust rule decides: each update's weight, and the reason for it, in client order."""

    weights: tuple[float, ...]
    """The weight of each update: 0 if left out; under a norm bound the kept share of its change."""
    scores: tuple[float, ...]
    """The reason for each weight: a Krum score, a distance, or a length."""


def judge(
    rule: RobustRule,
    sources: Sequence[Source],
    manifest: Manifest,
    base: StateReader,
    should_stop: Callable[[], None],
) -> Verdict:
    """Return the rule's verdict on updates that began from `base`; each update is read once."""
    if isinstance(rule, NormBound):
        lengths = np.sqrt(squared_lengths(sources, manifest, base, should_stop))
        return _verdict([_share(rule.norm, float(length)) for length in lengths], lengths.tolist())
    return verdict_on(rule, gram(sources, manifest, base, should_stop))


def verdict_on(rule: RobustRule, products: Matrix) -> Verdict:
    """Return the rule's verdict, given the inner products of the updates' changes."""
    distances = squared_distances(products)
    match rule:
        case Krum(byzantine=num_false):
            chosen = nearest(distances, num_false, 1)
        case MultiKrum(byzantine=num_false, keep=keep):
            chosen = nearest(distances, num_false, keep or len(distances) - num_false)
        case Bulyan(byzantine=num_false):
            chosen = nearest_one_by_one(distances, num_false)
        case GeometricMedian(iterations=iterations):
            weights, lengths = geometric_weights(products, iterations)
            return _verdict(weights.tolist(), lengths.tolist())
        case _:
            raise TypeError(f"{type(rule).__name__} compares no updates")
    chosen_ones = [1.0 if place in chosen else 0.0 for place in range(len(distances))]
    return _verdict(chosen_ones, krum_scores(distances, num_false).tolist())


def _share(bound: float, length: float) -> float:
    return 1.0 if length <= bound else bound / length


def _verdict(weights: Sequence[float], scores: Sequence[float]) -> Verdict:
    return Verdict(tuple(weights), tuple(min(score, _LARGEST) for score in scores))
