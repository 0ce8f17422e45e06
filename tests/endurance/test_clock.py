"""The wall clock is for people and for certificates: no run depends on it, so it may jump."""

import ast
import re
from collections.abc import Mapping

import pytest

from tests.house.source import nodes, product_files
from tests.repository import ROOT

pytestmark = pytest.mark.core

CLOCK = re.compile(r"\b(?:time|datetime)\.\w+\(")
CLOCKS = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}

LOG_LINES = "the time of a log line"
RECORDINGS = "whose recordings are drawn in one time, with the error that is known"
EXPIRY = "certificates, tokens and keys are valid from one date to another"
MAY_READ: Mapping[str, str] = {
    "client/cli/queries.py": "when a report was made",
    "client/cli/verify.py": "when a certificate was made",
    "client/cli/identity.py": EXPIRY,
    "client/dashboard/app.py": "when a report was made",
    "client/dashboard/stream.py": "tells a page the time, by which it says how old things are",
    "client/sinks/mlflow.py": "MLflow asks when a value was logged",
    "client/sdk/run.py": "when a report was made",
    "client/sdk/doctor.py": "compares clocks, and says which one is wrong",
    "common/identity/certificates.py": EXPIRY,
    "common/identity/callers.py": EXPIRY,
    "common/identity/tls.py": EXPIRY,
    "common/rpc/probe.py": EXPIRY,
    "coordinator/app/app.py": LOG_LINES,
    "coordinator/store/bucket.py": EXPIRY,
    "coordinator/store/blobs.py": ("which copy of an object was used last, as the disk notes it"),
    "coordinator/effects/client_reports.py": LOG_LINES,
    "coordinator/runtime/loop.py": "when a fact was journaled",
    "coordinator/runtime/supervisor.py": (
        "since when what fails has failed, and when it is tried next, as a status shows it"
    ),
    "coordinator/service/workers.py": "compares clocks, and says which one is wrong",
    "coordinator/service/queries.py": "how old what is shown is",
    "coordinator/service/service.py": f"when a run was submitted; {RECORDINGS}",
    "worker/process/heartbeat.py": RECORDINGS,
    "coordinator/runtime/leases.py": RECORDINGS,
    "worker/federated/secure_secrets.py": EXPIRY,
    "worker/site/gate.py": "a site takes part at hours of its own, and dates its audit",
    "worker/plans/execution.py": LOG_LINES,
    "worker/plans/history.py": "when a step was done, as an observed series",
    "tools/doctor.py": f"compares clocks, and says which one is wrong; {EXPIRY}",
    "worker/service/service.py": "compares clocks, and says which one is wrong",
    "worker/session/context.py": LOG_LINES,
}


def test_nobody_else_reads_the_wall_clock() -> None:
    readers = set()
    for path in product_files():
        if not CLOCK.search(path.read_text()):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in CLOCKS and owner in ("time", "datetime", "datetime.datetime"):
                    readers.add(path.relative_to(ROOT).as_posix().partition("/stratagem/")[2])
    assert readers == set(MAY_READ), "is anything decided by it? leases and deadlines must not be"
