"""What merging a metric over clients means: one loop over the clients, in order of their numbers.

Each client's object sees its own batches; its states are added to those of the clients before it,
whole numbers as such and others in float64. The value is what one more object computes of the sums.
Clients without rows add nothing. Knows no engine and no coordinator.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, as_tensor

Rows = Iterable[tuple[Tensor, Tensor]]
"""(output, target) of each batch of a client."""


def merged(make: Callable[[], Any], names: Sequence[str], clients: Sequence[Rows]) -> Any:
    """Return the value of the metric over all clients. names: of its states."""
    totals: dict[str, Any] = {}
    for batches in clients:
        metric = make()
        for output, target in batches:
            metric.update(output, target)
        for name in names:
            state = np.asarray(getattr(metric, name))
            wide = state.astype(np.float64 if state.dtype.kind == "f" else np.int64)
            totals[name] = wide if name not in totals else totals[name] + wide
    result = make()
    for name in names:
        own, total = getattr(result, name), as_tensor(totals[name])
        setattr(result, name, total.to(own.dtype) if isinstance(own, Tensor) else total.item())
    return result.compute()
