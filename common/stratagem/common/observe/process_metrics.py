"""The metrics that coordinator and worker have in common, under the same names.

Owns their definitions and where their values come from. What else Prometheus is told of a process
(CPU time, memory, open files) are the standard `process_*` metrics of its own library.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

from stratagem.common.base.protocol_version import PROTOCOL_VERSION
from stratagem.common.observe.call_metrics import CallStats
from stratagem.common.observe.certificate_expiry import EXPIRY, START, expiries
from stratagem.common.observe.event_loop_lag import LoopLag
from stratagem.common.observe.metric_definition import Metric, Values, one
from stratagem.common.observe.scrape_guard import MetricsSettings
from stratagem.common.tensors import traffic

BUILD_INFO: Final = Metric(
    "stratagem_build_info",
    "gauge",
    "1; the labels say which version runs, and which protocol it speaks",
    ("version", "protocol"),
)
RPC_SECONDS: Final = Metric(
    "stratagem_rpc_seconds", "histogram", "how long calls took, streams to their end", ("method",)
)
RPC_OPEN: Final = Metric("stratagem_rpc_open", "gauge", "calls under way", ("method",))
RPC_REFUSED: Final = Metric(
    "stratagem_rpc_refused_total",
    "counter",
    "calls refused or failed, by gRPC code and error; error `internal` is a defect of ours",
    ("method", "code", "error"),
)
LOOP_LAG: Final = Metric(
    "stratagem_event_loop_lag_seconds",
    "histogram",
    "how late the event loop was, looked at four times a second",
)
STREAM_BYTES: Final = Metric(
    "stratagem_stream_bytes_total",
    "counter",
    "tensor bytes over gRPC, or read on one machine: state, update, gradients, data, mesh",
    ("direction", "kind"),
)
SHARED: Final = (
    BUILD_INFO,
    RPC_SECONDS,
    RPC_OPEN,
    RPC_REFUSED,
    LOOP_LAG,
    STREAM_BYTES,
    EXPIRY,
    START,
)


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """Holds the metrics that every process counts, whether coordinator or worker."""

    settings: MetricsSettings
    calls: CallStats = field(default_factory=CallStats)
    lag: LoopLag = field(default_factory=LoopLag)

    def readings(self) -> Iterator[tuple[Metric, Values]]:
        """The present values of `SHARED`."""
        yield BUILD_INFO, {(version("stratagem"), PROTOCOL_VERSION): 1.0}
        yield (
            RPC_SECONDS,
            {(method,): histogram for method, histogram in list(self.calls.seconds.items())},
        )
        yield RPC_OPEN, {(method,): n for method, n in list(self.calls.num_open.items())}
        yield RPC_REFUSED, {key: n for key, n in list(self.calls.refused.items())}
        yield LOOP_LAG, one(self.lag.seconds)
        yield STREAM_BYTES, {key: n for key, n in traffic.stream_bytes().items()}
        yield from expiries(self.settings)
