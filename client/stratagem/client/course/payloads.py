"""Reads values from the payloads of events: numbers that JSON has no form for, metrics, members.

Facts of a party below the root name its path; those of the root have "".
"""

import math
import signal
from collections.abc import Mapping
from typing import Any, Final

from stratagem.client.course.shapes import EventLike

ENDS: Final = frozenset({"RunCompleted", "StoppedEarly", "RunCancelled", "RunFailed"})
"""The facts that end a run."""


def number(value: Any) -> float:
    """Return a number of a payload; text such as "NaN" or "-Infinity" and null are read, too."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        return math.nan


def numbers(values: Any) -> dict[str, float]:
    """Return the metrics of a payload by name."""
    found = values if isinstance(values, Mapping) else {}
    return {str(name): number(value) for name, value in found.items()}


def party_of(event: EventLike) -> str:
    """Return the path of the party that the event is about; "" for the root."""
    return str(event.payload.get("party") or "")


def undone_from(event: EventLike) -> int | None:
    """Return the segment behind which this event undoes all that has happened, if it does."""
    if event.kind != "RunResumed":
        return None
    segment = event.payload.get("from_segment")
    return None if segment is None else int(segment)


def ended_by(status: Any) -> str:
    """Return how a process ended, as "SIGKILL" or "exit status 3"; "" when not observed."""
    if not isinstance(status, int):
        return ""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
