"""The calls that a server answers: how long they took, how many are open, why some were refused.

Plain numbers on the event loop, two additions per call. A method is one that the server has, an
error one of our tree: neither can be made up by a caller.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

from google.protobuf.descriptor import ServiceDescriptor

from stratagem.common.observe.metric_definition import Durations

BOUNDS_S: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)
DEFECT: Final = ("INTERNAL", "internal")
"""The gRPC code and the error of a call that failed inside."""
_PACKAGE: Final = "/stratagem.v1."


class CallStats:
    """Counts and times the calls of one server. `refused` counts by (method, gRPC code, error)."""

    def __init__(self, methods: Iterable[str] = ()) -> None:
        """methods: those that the server has. They are told as never called, and their defects as
        none, because a count that appears as 1 has not risen for its reader."""
        self.seconds = {method: Durations(BOUNDS_S) for method in methods}
        self.num_open = Counter[str](dict.fromkeys(self.seconds, 0))
        self.refused = Counter[tuple[str, str, str]]({(m, *DEFECT): 0 for m in self.seconds})

    def begin(self, method: str) -> float:
        """A call comes in; what `end` wants to know."""
        self.num_open[method] += 1
        return time.perf_counter()

    def end(self, method: str, began_s: float) -> None:
        """Note that a call has ended, successfully or not."""
        self.num_open[method] -= 1
        seconds = self.seconds.get(method)
        if seconds is None:
            seconds = self.seconds[method] = Durations(BOUNDS_S)
        seconds.add(time.perf_counter() - began_s)

    def refuse(self, method: str, code: str, error: str) -> None:
        """Note that a call was refused, or failed, with this status."""
        self.refused[method, code, error] += 1


def methods_of(*services: ServiceDescriptor) -> list[str]:
    """All methods of these services, as they are counted."""
    return [f"{service.name}/{method.name}" for service in services for method in service.methods]


def name_of(path: str) -> str:
    """Service/Method, of the path that gRPC calls a method by."""
    return path.removeprefix(_PACKAGE).lstrip("/")
