"""Export spans by OTLP over gRPC, as the standard OTEL_* variables say.

No other module needs OpenTelemetry's SDK, so only `tracing.start` imports this one.
"""

import os
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def provider_of(process: str, name: str) -> TracerProvider:
    """Make the tracer provider of this process. Its spans carry the process's kind (coordinator,
    worker or client) and name."""
    attributes = {SERVICE_VERSION: version("stratagem")}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes[SERVICE_NAME] = f"stratagem-{process}"
    if name:
        attributes[SERVICE_INSTANCE_ID] = name
    # Stopped by `tracing.stop`, which waits for a bounded time; at exit it would be 30 s.
    provider = TracerProvider(resource=Resource.create(dict(attributes)), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
