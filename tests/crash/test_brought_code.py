"""Jobs that bring their code along, on processes that are killed."""

from pathlib import Path

import pytest

from tests.crash.jobs import ALL_REDUCE, FED_AVG, Job, crash_job
from tests.crash.rig import Rig
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.promise("Code that a job brings is there again after any process has died."),
]

SOAK = pytest.mark.soak
MODEL = """
from torch import nn
import helper

def build():
    layers = [nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.4), helper.last()]
    return nn.Sequential(*layers)
"""
HELPER = """
from torch import nn

def last():
    return nn.Linear(16, 5)
"""


@pytest.mark.parametrize(
    ("strategy", "process", "failpoint"),
    [
        pytest.param(ALL_REDUCE, "worker-1", "worker.code.unpacked", marks=pytest.mark.sweep),
        pytest.param(ALL_REDUCE, "coordinator", "coordinator.segment.trained", marks=SOAK),
        pytest.param(FED_AVG, "worker-0", "worker.code.unpacked", marks=SOAK),
        pytest.param(FED_AVG, "coordinator", "coordinator.push.begun", marks=pytest.mark.sweep),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else value,
)
def test_a_crash_changes_no_bits_of_a_job_with_code(
    rig: Rig, tmp_path: Path, strategy: Job, process: str, failpoint: str
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    # No worker has unpacked it yet.
    case = f"{process} {failpoint} {strategy['type']}"
    (tmp_path / "helper.py").write_text(f"{HELPER}\nCASE = {case!r}\n")
    job = crash_job(strategy)
    expected = rig.outcome(job)
    brought = {**job, "model": {"entrypoint": "model:build"}, "code": str(tmp_path)}
    with rig.armed(process, failpoint):
        outcome = rig.outcome(brought)
    assert outcome == expected
