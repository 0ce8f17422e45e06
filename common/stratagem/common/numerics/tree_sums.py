"""Sums of float64 numbers whose bits every device can give.

Numbers are added over the binary tree of neighbours: 0 with 1, 2 with 3, and so on until one is
left, a missing neighbour being 0. Any aligned power of two of them can be added alone, so a device
works on blocks; rounding errors grow with log2 n.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def tree_sum(values: NDArray[np.floating[Any]]) -> float:
    """values: (n,), widened to float64 before they are added; 0 for none, never -0."""
    total = values.astype(np.float64)
    while total.size > 1:
        pairs = total[: total.size - total.size % 2]
        above = pairs[0::2] + pairs[1::2]
        total = np.append(above, total[-1] + 0.0) if total.size % 2 else above
    return float(total[0]) + 0.0 if total.size else 0.0
