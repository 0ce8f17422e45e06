"""What "correct" means for robust rules: each over whole vectors of plain numpy, from its paper.

Takes the floating elements of all updates as rows of float64, in client order, and those of the
state that they began from; returns one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

Rows = NDArray[np.float64]


def combined(rule: RobustRule, rows: Rows, base: Rows) -> Rows:
    """The row that a rule makes of the updates."""
    num = len(rows)
    in_order = np.sort(rows + 0.0, axis=0)
    match rule:
        case Median():
            return np.asarray(np.median(in_order, axis=0))
        case TrimmedMean(trim=trim):
            cut = int(round(trim * num, 9))
            return sum_of(in_order[cut : num - cut]) / (num - 2 * cut)
        case Krum(byzantine=f):
            return np.array(rows[krum_order(rows - base, f)[0]])
        case MultiKrum(byzantine=f, keep=keep):
            kept = sorted(krum_order(rows - base, f)[: keep or num - f])
            return sum_of(rows[kept]) / len(kept)
        case Bulyan(byzantine=f):
            return bulyan(rows, rows - base, f)
        case GeometricMedian(iterations=iterations):
            return geometric_median(rows, iterations)
        case NormBound(norm=norm):
            lengths = np.sqrt(((rows - base) ** 2).sum(axis=1))
            shares = np.minimum(1.0, norm / np.maximum(lengths, 1e-300))
            return np.asarray(base + sum_of(shares[:, None] * (rows - base)) / num)


def sum_of(rows: Rows) -> Rows:
    total = np.array(rows[0])
    for row in rows[1:]:
        total = total + row
    return total


def krum_order(changes: Rows, f: int) -> list[int]:
    """The places of the updates from the best Krum score on."""
    num = len(changes)
    scores = []
    for own in range(num):
        far = [((changes[own] - changes[k]) ** 2).sum() for k in range(num) if k != own]
        scores.append(sum(sorted(far)[: max(1, num - f - 2)]))
    return sorted(range(num), key=lambda own: (scores[own], own))


def bulyan(rows: Rows, changes: Rows, f: int) -> Rows:
    left, chosen = list(range(len(rows))), []
    for _ in range(len(rows) - 2 * f):
        chosen.append(left.pop(krum_order(changes[left], f)[0]))
    found = np.empty(rows.shape[1])
    for column, values in enumerate(np.sort(rows[chosen] + 0.0, axis=0).T):
        middle, kept = np.median(values), list(values)
        for _ in range(2 * f):
            kept.remove(max(kept, key=lambda value: (abs(value - middle), value)))
        found[column] = sum(kept) / len(kept)
    return found


def geometric_median(rows: Rows, iterations: int) -> Rows:
    far = np.sqrt(((rows[:, None] - rows[None]) ** 2).sum(axis=2))
    lengths = np.sort(far, axis=1)[:, len(rows) // 2]
    for _ in range(iterations + 1):
        inverse = 1.0 / np.maximum(lengths, 1e-12)
        middle = (inverse[:, None] * rows).sum(axis=0) / inverse.sum()
        lengths = np.sqrt(((rows - middle) ** 2).sum(axis=1))
    return np.asarray(middle)


def robust_state(
    rule: RobustRule, states: Sequence[Mapping[str, Tensor]], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state that a rule makes of those of clients, in float64; of integers the middle value."""
    floats = [name for name, tensor in base.items() if tensor.is_floating_point()]

    def row(state: Mapping[str, Tensor]) -> Rows:
        return np.concatenate([state[name].double().flatten().numpy() for name in floats])

    mean = torch.from_numpy(combined(rule, np.stack([row(state) for state in states]), row(base)))
    parts = mean.split([base[name].numel() for name in floats])
    found = {name: part.view(base[name].shape) for name, part in zip(floats, parts, strict=True)}
    for name in base.keys() - found.keys():
        values = torch.stack([state[name] for state in states]).sort(dim=0).values
        found[name] = values[(len(states) - 1) // 2]
    return {name: found[name] for name in base}
