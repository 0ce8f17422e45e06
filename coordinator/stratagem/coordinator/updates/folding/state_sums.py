"""Adds up the states of metrics of the user's own over clients, in the order given.

Counts are added in int64, other numbers in float64, so the sums are those of one loop over all
clients. Nothing here knows what a metric is; what is computed of the sums, a worker computes.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

States: TypeAlias = Mapping[tuple[str, str], np.ndarray]
"""Numbers of a client, int64 or float64, by metric and name of the state."""


class UnlikeStatesError(Exception):
    """The states of a client are not of the kind of those of the first one."""


class SumsSoFar:
    """The sums over the clients that were added, in that order."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str], np.ndarray] = {}
        self._first: int | None = None

    def add(self, client: int, own: States) -> None:
        """Add what a client has said.

        Raises UnlikeStatesError, with the client and the state that does not fit; the totals then
        are none of anything.
        """
        if self._first is None:
            self._first = client
            self.totals = {key: values.copy() for key, values in own.items()}
            return
        first = self._first
        if own.keys() != self.totals.keys():
            raise UnlikeStatesError(f"client {client} has other states than client {first}")
        for key, values in own.items():
            total = self.totals[key]
            if (values.dtype, values.shape) != (total.dtype, total.shape):
                said = f"{values.dtype} {values.shape}"
                text = f"state {key[1]} of {key[0]} is {said} at client {client}, and "
                raise UnlikeStatesError(f"{text}{total.dtype} {total.shape} at client {first}")
            self.totals[key] = _sum(client, key, total, values)


def _sum(client: int, key: tuple[str, str], total: np.ndarray, more: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # infinite sums are what a loop has, too
        summed = np.asarray(total + more)  # of single numbers numpy makes no array
    if summed.dtype == np.int64 and np.any(
        ((total < 0) == (more < 0)) & ((summed < 0) != (total < 0))
    ):
        raise UnlikeStatesError(
            f"state {key[1]} of {key[0]} is too large with that of client {client}"
        )
    return summed
