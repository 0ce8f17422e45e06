"""The calls that a server answers: how long they took, how many are open, why some were refused.

Plain numbers on the event loop, two additions per call. A method is one that the server has, an
error one of our tree: neither can be made up by a caller.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from stratagem.common.metrics.definition import Durations

BOUNDS_S: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)
_PACKAGE: Final = "/stratagem.v1."


class CallStats:
    """Of one server. `refused` counts by (method, gRPC code, error)."""

    def __init__(self) -> None:
        self.seconds: dict[str, Durations] = {}
        self.num_open: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str, str]] = Counter()

    def begin(self, method: str) -> float:
        """A call comes in; what `end` wants to know."""
        self.num_open[method] += 1
        return time.perf_counter()

    def end(self, method: str, began_s: float) -> None:
        """It has ended, in whatever way."""
        self.num_open[method] -= 1
        seconds = self.seconds.get(method)
        if seconds is None:
            seconds = self.seconds[method] = Durations(BOUNDS_S)
        seconds.add(time.perf_counter() - began_s)

    def refuse(self, method: str, code: str, error: str) -> None:
        """It was refused, or failed, with this status."""
        self.refused[method, code, error] += 1


def name_of(path: str) -> str:
    """Service/Method, of the path that gRPC calls a method by."""
    return path.removeprefix(_PACKAGE).lstrip("/")
