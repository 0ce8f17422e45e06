"""What a step function logs, as sums that are added up over shards together with the gradients.

A member without rows knows no names, so they travel, too, as numbers, with a checksum by which all
know that all shards have the same ones. Must not know how a step is computed.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from stratagem.common.base.errors import UserCodeError
from stratagem.worker.engine.objectives.losses import Logged, LossValue
from stratagem.worker.engine.objectives.step_function import MAX_LOGGED, MAX_NAME_CHARS

LoggedSums = Mapping[str, tuple[float, float]]
"""(Σ mean · weight, Σ weight) by name, in order of name."""

_CHARS: Final = 4
"""Characters to a float64: those of 2^21 shards add up exactly."""
_PER_NAME: Final = -(-MAX_NAME_CHARS // _CHARS)
_FIRST_NAME: Final = 2 + 2 * MAX_LOGGED
NUM_EXTRAS: Final = _FIRST_NAME + _PER_NAME * MAX_LOGGED
"""Float64 values that the sums of a shard are: how many shards log, checksums, sums, weights, and
the names."""


def added(sums: LoggedSums, more: LoggedSums) -> LoggedSums:
    """Returns the sums of both, where a name that one lacks is zero."""
    both = dict(sums)
    for name, (total, weight) in more.items():
        before, weight_before = both.get(name, (0.0, 0.0))
        both[name] = (before + total, weight_before + weight)
    return both


def sums_of(values: Sequence[LossValue]) -> LoggedSums:
    """Returns the sums over micro-batches, added up in order."""
    sums: LoggedSums = {}
    for value in values:
        sums = added(sums, {each.name: _sum(each) for each in value.log})
    return sums


def _sum(logged: Logged) -> tuple[float, float]:
    weight = logged.weight  # of nothing, the mean may be anything
    return (float(logged.mean) * weight if weight else 0.0, weight)


def means(sums: LoggedSums) -> dict[str, float]:
    """Returns the weighted means, of those that have any weight."""
    return {name: total / weight for name, (total, weight) in sums.items() if weight}


def packed(sums: LoggedSums) -> Tensor:
    """Returns the sums of a shard as `NUM_EXTRAS` float64 values; zeros where nothing is logged."""
    names, values = tuple(sums), [0.0] * NUM_EXTRAS
    if names:
        values[:2] = [1.0, _checksum(names)]
    for place, (name, (total, weight)) in enumerate(sums.items()):
        values[2 + 2 * place : 4 + 2 * place] = [total, weight]
        start = _FIRST_NAME + place * _PER_NAME
        values[start : start + _PER_NAME] = _code(name)
    return torch.tensor(values, dtype=torch.float64)


def unpacked(total: Tensor, own: Sequence[str] | None = None) -> LoggedSums:
    """Returns the sums over all shards, of the sum of what `packed` gave.

    own: the names that shards of this member have, if it has any. Raises UserCodeError unless all
    shards have the same names.
    """
    if isinstance(total, FakeTensor):
        return {}  # a step that is played for an estimate has no values
    count, checksums, *values = total.tolist()
    if not count:
        return {}
    codes = [value / count for value in values[2 * MAX_LOGGED :]]
    names = _decoded(codes) if own is None else tuple(own)
    if checksums != count * _checksum(names):
        here = ", ".join(own or ()) or "none"
        text = "the log of the step must have the same names in each micro-batch; on this worker "
        raise UserCodeError("ValueError", f"{text}they are {here}, and on others they differ")
    return {name: (values[2 * place], values[2 * place + 1]) for place, name in enumerate(names)}


def _code(name: str) -> list[float]:
    text = name.encode().ljust(_PER_NAME * _CHARS, b"\0")
    return [float(int.from_bytes(text[at : at + _CHARS])) for at in range(0, len(text), _CHARS)]


def _decoded(codes: Sequence[float]) -> tuple[str, ...]:
    texts = [
        b"".join(int(code).to_bytes(_CHARS) for code in codes[start : start + _PER_NAME])
        for start in range(0, len(codes), _PER_NAME)
    ]
    return tuple(name for text in texts if (name := text.rstrip(b"\0").decode(errors="replace")))


def _checksum(names: tuple[str, ...]) -> float:
    return float(zlib.crc32("\n".join(names).encode()))
