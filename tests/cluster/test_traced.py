"""One run is one trace over client, coordinator and worker, also when the coordinator is killed."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from stratagem.client.local.cluster import LocalCluster
from stratagem.common.observe import tracing
from tests.cluster.jobs import Gates, gates_in, wait_for
from tests.jobs import ALLOW, job, user_data
from tests.patience import PATIENCE_S
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("one run is one trace over three processes"),
]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What an OTLP collector is told."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[tuple[str, Span]] = []

    def Export(self, request: Any, context: Any) -> pb.ExportTraceServiceResponse:
        with self._changed:
            for resource in request.resource_spans:
                told = {each.key: each.value.string_value for each in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self._spans += [(told["service.name"], span) for span in scope.spans]
            self._changed.notify_all()
        return pb.ExportTraceServiceResponse()

    def spans(self) -> list[tuple[str, Span]]:
        with self._changed:
            return list(self._spans)

    def wait_for(self, name: str) -> None:
        """Until a span of that name has come in."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(span.name == name for _, span in self._spans), timeout=PATIENCE_S
            )


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0)


def attributes_of(span: Span) -> dict[str, Any]:
    return {
        each.key.removeprefix("stratagem."): each.value.string_value or each.value.int_value
        for each in span.attributes
    }


def test_a_run_is_one_trace_over_three_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as (collector, endpoint), gates_in(tmp_path) as gates:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with LocalCluster(
            workers=1,
            threads=1,
            data_dir=tmp_path / "cluster",
            import_path=[ROOT],
            allow=[ALLOW],
            environment=environment,
        ) as cluster:
            run_id = _train_through_a_crash(cluster, gates, collector)
    spans = collector.spans()
    own = [(service, span) for service, span in spans if _belongs(span, run_id)]
    assert len({span.trace_id for _, span in own}) == 1
    trace = {span.trace_id for _, span in own}.pop()
    services = {service for service, span in spans if span.trace_id == trace}
    assert services == {"stratagem-client", "stratagem-coordinator", "stratagem-worker"}
    _check_tree(
        {span.span_id: (service, span) for service, span in spans if span.trace_id == trace}
    )


def _train_through_a_crash(cluster: LocalCluster, gates: Gates, collector: Collector) -> str:
    assert tracing.start("client")
    try:
        with cluster.client() as client:
            gates.close("batch-4")
            run = client.submit(job(data=user_data("gated", folder=str(gates.folder)), steps=6))
            wait_for(run, "SegmentCommitted")
            gates.wait_reached("batch-4")
            collector.wait_for("CommitSegment")
            cluster.kill("coordinator")
            cluster.wait_restarted("coordinator", 1)
            gates.open()
            run.result()
            return run.run_id
    finally:
        tracing.stop()


def _belongs(span: Span, run_id: str) -> bool:
    return attributes_of(span).get("run_id") == run_id


def _check_tree(spans: dict[bytes, tuple[str, Span]]) -> None:
    (root,) = [span for _, span in spans.values() if not span.parent_span_id]
    assert root.name == "submit"
    names = {span.name for _, span in spans.values()}
    assert names >= {
        *("CoordinatorService/SubmitRun", "Build", "RunSegment", "CommitSegment"),
        *("WorkerService/Execute", "build", "train"),
    }
    # What was under way in the killed process was never sent; all else hangs together.
    lost = [
        span
        for _, span in spans.values()
        if span.parent_span_id and span.parent_span_id not in spans
    ]
    assert {span.name for span in lost} <= {"WorkerService/Execute", "WorkerService/SetState"}
    (submitted,) = [s for _, s in spans.values() if s.name == "CoordinatorService/SubmitRun"]
    assert submitted.parent_span_id == root.span_id
    effects = [span for _, span in spans.values() if span.name in ("RunSegment", "CommitSegment")]
    assert {span.parent_span_id for span in effects} == {submitted.span_id}
    assert {attributes_of(span)["term"] for span in effects} == {1, 2}
    for service, span in spans.values():
        if span.name == "train":
            assert service == "stratagem-worker"
            assert attributes_of(span)["segment"] >= 1
