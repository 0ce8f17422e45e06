"""low_rank: a matrix M (n, m) as P Qᵀ of rank r, by one step of power iteration per payload.

PowerSGD (https://arxiv.org/abs/1905.13727): P = M Q, its columns made orthonormal, Q = Mᵀ P. Q is
kept and begins the next payload, so the subspace follows the gradient. Here each shard has a Q of
its own and sends both factors. Tensors of fewer than two dimensions, and matrices whose factors
would not be smaller, are sent as they are.

Products are sums of elementwise float32 products in one fixed order, not calls of a BLAS, whose
bits depend on threads and alignment.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression.codec import (
    ByteArray,
    Decode,
    FloatArray,
    Layout,
    OneByOne,
    Plain,
    Read,
    State,
    check_finite,
    joined,
    to_bytes,
)
from stratagem.common.numerics.keys import derive, name_seed, places, uniform

BASIS: Final = "basis/"
_MIN_RATIO: Final = 1e-6
"""The least share of a column's norm that must remain after making it orthogonal to earlier
columns; a smaller remainder is only rounding noise, and the column becomes zeros."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The coding of one tensor: its key in the state, rows, columns, rank (0 if sent uncoded)."""

    name: str
    num_rows: int
    num_columns: int
    rank: int

    @property
    def payload_bytes(self) -> int:
        whole, factors = self.num_rows * self.num_columns, self.num_rows + self.num_columns
        return 4 * (self.rank * factors if self.rank else whole)

    def decoder(self, read: Read) -> Decode:
        """Return the tensor's decoder, which adds products p_k q_kᵀ of factors in order of k."""
        if not self.rank:
            return Plain(self.num_rows * self.num_columns).decoder(read)

        def factor(start: int, stop: int) -> FloatArray:
            return read(4 * start, stop - start, "<f4").astype(np.float32)

        def product(k: int, rows: range, columns: range) -> FloatArray:
            p, q = k * self.num_rows, self.rank * self.num_rows + k * self.num_columns
            column = factor(p + rows.start, p + rows.stop)
            return column[:, None] * factor(q + columns.start, q + columns.stop)

        def window(start: int, stop: int) -> FloatArray:
            pieces = []
            for block in _blocks(start, stop, self.num_columns):
                total = product(0, *block)
                for k in range(1, self.rank):
                    total += product(k, *block)
                pieces.append(total.reshape(-1))
            return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

        return window


class LowRank(OneByOne):
    """PowerSGD codec: a matrix (n, m) is sent as two factors of rank r, 4 r (n + m) bytes."""

    def __init__(self, layout: Layout, *, rank: int, seed: int) -> None:
        self._rank, self._seed = rank, seed
        self._matrices = [_matrix(spec.name, spec.shape, rank) for spec in layout]
        self.bypassed = tuple(
            spec.name
            for spec, matrix in zip(layout, self._matrices, strict=True)
            if spec.numel and not matrix.rank
        )
        super().__init__(layout, self._matrices)

    def initial_state(self) -> State:
        return {
            matrix.name: self._start(matrix).reshape(-1) for matrix in self._matrices if matrix.rank
        }

    def encode(
        self, tensors: Sequence[FloatArray], state: State, key: int
    ) -> tuple[ByteArray, State]:
        check_finite(self._layout, tensors)
        parts: list[ByteArray] = []
        after: dict[str, FloatArray] = {}
        for matrix, tensor in zip(self._matrices, tensors, strict=True):
            if not matrix.rank:
                parts.append(to_bytes(tensor))
                continue
            whole = tensor.reshape(matrix.num_rows, matrix.num_columns)
            basis = self._revived(matrix, state[matrix.name].reshape(matrix.rank, -1), key)
            p = orthonormal([(whole * column).sum(axis=1) for column in basis])
            q = np.stack([(whole * column[:, None]).sum(axis=0) for column in p])
            parts += [to_bytes(p), to_bytes(q)]
            after[matrix.name] = q.reshape(-1)
        return joined(parts), after

    def part(self, places: range) -> "LowRank":
        cut = self._layout[places.start : places.stop]
        return LowRank(cut, rank=self._rank, seed=self._seed)

    def _start(self, matrix: _Matrix, key: int = 0) -> FloatArray:
        """Return a random initial factor Q of a matrix, (rank, columns), from [-1/2, 1/2)."""
        numbers = places(matrix.rank * matrix.num_columns)
        values = uniform(derive(self._seed, name_seed(matrix.name), key), numbers)
        return (values - np.float32(0.5)).reshape(matrix.rank, matrix.num_columns)

    def _revived(self, matrix: _Matrix, basis: FloatArray, key: int) -> FloatArray:
        """Replace rows of Q that a zero gradient made zero by random ones; otherwise they would
        stay zero."""
        if all(column.any() for column in basis):
            return basis
        fresh = self._start(matrix, key)
        return np.stack([old if old.any() else new for old, new in zip(basis, fresh, strict=True)])


def _matrix(name: str, shape: tuple[int, ...], rank: int) -> _Matrix:
    num_rows = shape[0] if len(shape) > 1 else 1
    num_columns = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    rank = min(rank, num_rows, num_columns)
    is_smaller = rank * (num_rows + num_columns) < num_rows * num_columns
    return _Matrix(f"{BASIS}{name}", num_rows, num_columns, rank if is_smaller else 0)


def orthonormal(columns: Sequence[FloatArray]) -> FloatArray:
    """Orthonormalize the columns in order (Gram-Schmidt, twice, in float64) and return (r, n);
    columns that depend on earlier ones become zeros."""
    done: list[NDArray[np.float64]] = []
    for column in columns:
        rest = column.astype(np.float64)
        before = _norm(rest)
        for _ in range(2):
            for other in done:
                rest = rest - other * np.add.reduce(rest * other)
        after = _norm(rest)
        done.append(rest / after if after > _MIN_RATIO * before else np.zeros_like(rest))
    return np.stack(done).astype(np.float32)


def _norm(values: NDArray[np.float64]) -> float:
    return math.sqrt(np.add.reduce(values * values))


def _blocks(start: int, stop: int, num_columns: int) -> Iterator[tuple[range, range]]:
    """Yield (rows, columns) of rectangles that together cover the elements [start, stop) of a
    matrix: the rest of the first row, then whole rows, then the beginning of the last row."""
    while start < stop:
        row, first = divmod(start, num_columns)
        num_rows = 1 if first else max(1, (stop - start) // num_columns)
        num = min(num_columns - first, stop - start)
        yield range(row, row + num_rows), range(first, first + num)
        start += num_rows * num
