"""Finds which run, party, segment and worker a request is about, for the log lines of its call.

Owns where requests of our services carry such ids. Bound to the task of the call, and so gone with
it; the values are the caller's, and are only ever shown.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor
from structlog.contextvars import bind_contextvars

_PLACES: Final = (
    ("run_id", ("run_id",)),
    ("run_id", ("session", "run_id")),
    ("party", ("party",)),
    ("party", ("session", "party")),
    ("segment", ("segment",)),
    ("worker_id", ("worker_id",)),
    ("term", ("fence", "term")),
    ("membership", ("fence", "membership")),
)
_MAX_CHARS: Final = 256


def bind_ids(message: Any) -> None:
    """Name in every later log line of this call what its request, or header, is about."""
    descriptor = getattr(message, "DESCRIPTOR", None)
    if descriptor is None:
        return
    ids = {key: read(message) for key, read in _readers(descriptor)}
    if ids:
        bind_contextvars(**ids)


@cache
def _readers(descriptor: Descriptor) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((key, _reader(path)) for key, path in _PLACES if _has(descriptor, path))


def _has(descriptor: Descriptor, path: tuple[str, ...]) -> bool:
    inside: Descriptor | None = descriptor
    for name in path:
        if inside is None or name not in inside.fields_by_name:
            return False
        inside = inside.fields_by_name[name].message_type
    return inside is None


def _reader(path: tuple[str, ...]) -> Callable[[Any], Any]:
    def read(message: Any) -> Any:
        for name in path:
            message = getattr(message, name)
        return message[:_MAX_CHARS] if isinstance(message, str) else message

    return read
