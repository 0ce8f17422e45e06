"""Trace runs with OpenTelemetry: one trace per run, over client, coordinator and workers.

Tracing is off unless the standard variable OTEL_EXPORTER_OTLP_ENDPOINT (or its form for traces) is
set; then nothing of OpenTelemetry is imported, and a span costs the look-up of one variable. A
context travels as W3C `traceparent`, in the metadata of calls, and as text for later.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor import Descriptor
from structlog.contextvars import bind_contextvars

from stratagem.common.base.errors import InvalidInputError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

# ---- Tracing ----

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
KEY: Final = "traceparent"
STOP_TIMEOUT_S: Final = 2.0
_PREFIX: Final = "stratagem."
# These are called per step or beat, too often for a trace.
_UNTRACED: Final = (
    *("/GetGradients", "/ApplyGradients"),
    *("/Heartbeat", "/HeartbeatStream", "/Describe", "/Send"),
)


@dataclass(frozen=True, slots=True)
class _Tracing:
    tracer: "Tracer"
    provider: "TracerProvider | None"
    """Our tracer provider; None if the caller's program has its own."""


_tracing: _Tracing | None = None


def start(process: str, name: str = "") -> bool:
    """Start exporting spans if the environment asks for it; return whether it does. Raises
    InvalidInputError if a needed package is missing."""
    global _tracing
    if not _is_wanted(os.environ):
        return False
    protocol = next(
        (os.environ[variable] for variable in PROTOCOLS if variable in os.environ), "grpc"
    )
    if protocol != "grpc":
        raise InvalidInputError.at(PROTOCOLS[1], f"{protocol!r} is not spoken here; it is grpc")
    try:
        from stratagem.common.observe.otlp import provider_of
    except ImportError as error:
        raise InvalidInputError.at(
            ENDPOINTS[0], f"traces need OpenTelemetry ({error}): pip install 'stratagem[otel]'"
        ) from error
    provider = provider_of(process, name)
    _tracing = _Tracing(provider.get_tracer("stratagem"), provider)
    return True


def adopt() -> None:
    """Send our spans to the OpenTelemetry setup of the program that uses the SDK, if it has one."""
    global _tracing
    if _tracing is None and "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry import trace

        _tracing = _Tracing(trace.get_tracer("stratagem"), None)


def stop() -> None:
    """Flush the remaining spans, for a limited time, because the collector may be gone."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None and tracing.provider is not None:
        thread = threading.Thread(target=tracing.provider.shutdown, daemon=True)
        thread.start()
        thread.join(STOP_TIMEOUT_S)


def _is_wanted(environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(endpoint) for endpoint in ENDPOINTS)


@contextmanager
def span(
    name: str, parent: str = "", *, marks_errors: bool = True, **attributes: str | int | None
) -> Iterator[None]:
    """Context manager that opens a span, below `parent` (a traceparent) or else the current span.

    Attributes get the prefix `stratagem.`; None and "" are left out. marks_errors: an exception
    that leaves the block marks the span as failed.
    """
    if _tracing is None:
        yield
        return
    with _tracing.tracer.start_as_current_span(
        name,
        context=_context_of(parent),
        attributes=_named(attributes),
        record_exception=marks_errors,
        set_status_on_exception=marks_errors,
    ):
        yield


def note(**attributes: str | int | None) -> None:
    """Add attributes to the span that is current in this task."""
    if _tracing is not None:
        _current().set_attributes(_named(attributes))


def fail(reason: str) -> None:
    """Mark the current span as failed, with this reason."""
    if _tracing is not None:
        from opentelemetry.trace import Status, StatusCode

        _current().set_status(Status(StatusCode.ERROR, reason))


def traceparent() -> str:
    """Return the current span as a W3C traceparent, to be a later span's parent; "" if none."""
    if _tracing is None:
        return ""
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return carrier.get(KEY, "")


def outgoing() -> tuple[tuple[str, str], ...]:
    """Return the metadata that makes an outgoing call continue the current span's trace."""
    parent = traceparent()
    return ((KEY, parent),) if parent else ()


class Served:
    """Context manager for the span of a call that a server answers; a call without a parent gets no
    span. The span is current in the call's task, and the task ends with the call, so nothing needs
    to be restored."""

    __slots__ = ("_span",)

    def __init__(self, name: str, metadata: Iterable[tuple[str, Any]]) -> None:
        self._span: Span | None = None
        if _tracing is None or name.endswith(_UNTRACED):
            return
        parent = next((str(value) for key, value in metadata if key == KEY), "")
        if parent:
            from opentelemetry import context, trace

            made = _tracing.tracer.start_span(
                name, context=_context_of(parent), kind=trace.SpanKind.SERVER
            )
            context.attach(trace.set_span_in_context(made))
            self._span = made

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._span is None:
            return
        if isinstance(error, Exception):
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end()


def _named(attributes: Mapping[str, str | int | None]) -> dict[str, str | int]:
    given = {key: value for key, value in attributes.items() if value is not None and value != ""}
    return {_PREFIX + key: value for key, value in given.items()}


def _context_of(parent: str) -> Any:
    return _propagator().extract({KEY: parent}) if parent else None


def _current() -> "Span":
    from opentelemetry import trace

    return trace.get_current_span()


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


# ---- Identifiers of requests ----
#
# The log lines of a call name the run, party, segment and worker that its request is about. The
# identifiers are bound to the task of the call, and disappear with it. Their values are the
# caller's, and are only displayed.

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
    """Add the ids (run, party, ...) in a call's request or header to the call's later log lines."""
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
