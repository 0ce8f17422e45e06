"""low_rank: a matrix M (n, m) as P Qᵀ of rank r, by one step of power iteration per payload.

PowerSGD (https://arxiv.org/abs/1905.13727): P = M Q, its columns made orthonormal, Q = Mᵀ P. Q is
kept and begins the next payload, so the subspace follows the gradient. Here each shard has a Q of
its own and sends both factors. Tensors of fewer than two dimensions, and matrices whose factors
would not be smaller, are sent as they are.

Products are sums of elementwise float32 products in one fixed order, not calls of a BLAS, whose
bits depend on threads and alignment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression.codec import (
    ByteArray,
    FloatArray,
    Layout,
    State,
    check_finite,
    from_bytes,
    joined,
    split,
    to_bytes,
)
from stratagem.common.numerics.counter_random import derive, name_seed, places, uniform

BASIS: Final = "basis/"
_MIN_RATIO: Final = 1e-6
"""A column that keeps less than this of its norm next to the others adds nothing but rounding."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The layout of one tensor: its state's name, and rows, columns and rank; rank 0 when sent as
    it is."""

    name: str
    num_rows: int
    num_columns: int
    rank: int

    @property
    def payload_bytes(self) -> int:
        whole, factors = self.num_rows * self.num_columns, self.num_rows + self.num_columns
        return 4 * (self.rank * factors if self.rank else whole)


class LowRank:
    """4 r (n + m) bytes for an (n, m) matrix: the columns of P, then those of Q."""

    def __init__(self, layout: Layout, *, rank: int, seed: int) -> None:
        self._layout, self._rank, self._seed = layout, rank, seed
        self._matrices = [_matrix(spec.name, spec.shape, rank) for spec in layout]
        self.bypassed = tuple(
            spec.name
            for spec, matrix in zip(layout, self._matrices, strict=True)
            if spec.numel and not matrix.rank
        )
        self.payload_bytes = sum(matrix.payload_bytes for matrix in self._matrices)

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
            left = orthonormal([(whole * column).sum(axis=1) for column in basis])
            right = np.stack([(whole * column[:, None]).sum(axis=0) for column in left])
            parts += [to_bytes(left), to_bytes(right)]
            after[matrix.name] = right.reshape(-1)
        return joined(parts), after

    def decode(self, payload: ByteArray, key: int) -> list[FloatArray]:
        del key
        parts = split(payload, [matrix.payload_bytes for matrix in self._matrices])
        return [
            _product(matrix, from_bytes(part, "<f4").astype(np.float32))
            for matrix, part in zip(self._matrices, parts, strict=True)
        ]

    def part(self, places: range) -> LowRank:
        cut = self._layout[places.start : places.stop]
        return LowRank(cut, rank=self._rank, seed=self._seed)

    def _start(self, matrix: _Matrix, key: int = 0) -> FloatArray:
        """(rank, columns), values in [-1/2, 1/2)."""
        numbers = places(matrix.rank * matrix.num_columns)
        values = uniform(derive(self._seed, name_seed(matrix.name), key), numbers)
        return (values - np.float32(0.5)).reshape(matrix.rank, matrix.num_columns)

    def _revived(self, matrix: _Matrix, basis: FloatArray, key: int) -> FloatArray:
        """Columns that a gradient of zeros has left empty would stay so: they are drawn again."""
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
    """(r, n): the columns made orthonormal in order (Gram and Schmidt, twice, in float64); what
    depends on those before it becomes zeros."""
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


def _product(matrix: _Matrix, values: FloatArray) -> FloatArray:
    """Σ p_k q_kᵀ in order of k; flat."""
    if not matrix.rank:
        return values
    left = values[: matrix.rank * matrix.num_rows].reshape(matrix.rank, -1)
    right = values[matrix.rank * matrix.num_rows :].reshape(matrix.rank, -1)
    total: FloatArray = left[0][:, None] * right[0]
    for p, q in zip(left[1:], right[1:], strict=True):
        total += p[:, None] * q
    return total.reshape(-1)
