"""Traces: off costs nothing, on they cross a call and outlive a process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.observe import tracing
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import bind, make_server
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1 import worker_pb2_grpc

IMPORTED = """
import stratagem.coordinator.process.main, sys
from stratagem.client.cli.main import assemble
assemble()
from stratagem.common.observe import tracing
assert tracing.start("coordinator") is False
with tracing.span("nothing", run_id="r"):
    assert tracing.traceparent() == "" and tracing.outgoing() == ()
tracing.stop()
assert not [name for name in sys.modules if name.startswith(("opentelemetry", "prometheus"))]
"""


@pytest.fixture(name="spans")
def _spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    on = tracing._Tracing(provider.get_tracer("test"), None)
    monkeypatch.setattr(tracing, "_tracing", on)
    yield exporter
    provider.shutdown()


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.remembered = ""

    async def CloseSession(self, request: Any, context: Any) -> pb.CloseSessionResponse:
        self.remembered = tracing.traceparent()
        if request.run_id == "gone":
            raise NotFoundError("no such run")
        return pb.CloseSessionResponse()

    async def Describe(self, request: Any, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse(worker_id="w")


def parent_and_child(
    exporter: InMemorySpanExporter, *names: str
) -> tuple[ReadableSpan, ReadableSpan]:
    found = {span.name: span for span in exporter.get_finished_spans()}
    outer, inner = (found[name] for name in names)
    of_outer, of_inner = outer.get_span_context(), inner.get_span_context()
    assert of_outer is not None
    assert of_inner is not None
    assert inner.parent is not None
    assert inner.parent.span_id == of_outer.span_id
    assert of_inner.trace_id == of_outer.trace_id
    return outer, inner


def test_off_nothing_is_imported() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", IMPORTED], check=True, env=environment)


def test_what_cannot_be_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(InvalidInputError, match=r"'http/protobuf' is not spoken here"):
        tracing.start("worker")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    for variable, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as changed:
            changed.setenv(variable, value)
            assert not tracing.start("worker")


async def test_a_call_goes_on_with_the_trace_of_its_caller(spans: InMemorySpanExporter) -> None:
    servicer = Servicer()
    server = make_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.CloseSession(pb.CloseSessionRequest(run_id="untraced"))
        assert servicer.remembered == ""
        with tracing.span("submit", run_id="r-1", party=""):
            await stub.CloseSession(pb.CloseSessionRequest(run_id="r-1"))
            await stub.Describe(pb.DescribeRequest())  # one per beat: not traced
        assert len(spans.get_finished_spans()) == 2
        outer, _ = parent_and_child(spans, "submit", "WorkerService/CloseSession")
        assert dict(outer.attributes or {}) == {"stratagem.run_id": "r-1"}
        spans.clear()
        with tracing.span("refused"), pytest.raises(Exception, match="no such run"):
            await stub.CloseSession(pb.CloseSessionRequest(run_id="gone"))
        (served,) = (s for s in spans.get_finished_spans() if s.name.startswith("WorkerService"))
        assert not served.status.is_ok
        assert "no such run" in str(served.status.description)
    await server.stop(0)


def test_a_remembered_trace_is_gone_on_with(spans: InMemorySpanExporter) -> None:
    with tracing.span("submit"):
        remembered = tracing.traceparent()
    with tracing.span("RunSegment", remembered, segment=3, round=None):
        pass
    _, later = parent_and_child(spans, "submit", "RunSegment")
    assert dict(later.attributes or {}) == {"stratagem.segment": 3}
