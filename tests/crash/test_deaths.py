"""Jobs that end their process fail with the reason; processes that are killed fail no job."""

import os
import signal

import pytest

from stratagem.common.base.errors import RunFailedError
from tests.crash.jobs import ALL_REDUCE, FED_AVG, LOCAL, PACED, Job, crash_job
from tests.crash.rig import Rig, await_step, outcome_of
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.promise("A job that ends its process fails with how it ended and its last words."),
]

PRINTED = "had printed: this batch is the last one"


@pytest.mark.parametrize(
    ("strategy", "work"),
    [
        pytest.param(LOCAL, "segment 1", marks=pytest.mark.cluster),
        pytest.param(ALL_REDUCE, "segment 1", marks=pytest.mark.soak),
        pytest.param(FED_AVG, "round 1: 0 of 3 updates; ", marks=pytest.mark.sweep),
    ],
    ids=["Local", "AllReduce", "Fed"],
)
def test_a_job_that_exits_fails_after_three_with_its_last_words(
    rig: Rig, strategy: Job, work: str
) -> None:
    document = crash_job(strategy, model="acting_models:deadly", at_batch=2)
    with rig.running(document) as run, pytest.raises(RunFailedError) as error:
        run.result()
    text = str(error.value)
    assert work in text
    assert "has ended 3 worker processes" in text
    assert "; the last one, worker-" in text
    assert f"ended with exit status 11 and {PRINTED}" in text


@pytest.mark.sweep
def test_a_fault_in_native_code_is_named_with_its_place(rig: Rig) -> None:
    document = crash_job(LOCAL, model="acting_models:deadly", at_batch=2, signum=signal.SIGSEGV)
    with rig.running(document) as run, pytest.raises(RunFailedError) as error:
        run.result()
    text = str(error.value)
    assert (
        f"ended by SIGSEGV and {PRINTED} | Fatal Python error: Segmentation fault | File " in text
    )
    assert "Segmentation fault | File " in text
    assert (
        "tests/userland/acting_models.py"
        in text.partition("Segmentation fault | ")[2].partition(" | ")[0]
    )
    assert "ctypes" in text


@pytest.mark.soak  # it is tried for half a minute
def test_a_job_that_kills_its_process_is_not_tried_for_ever(rig: Rig) -> None:
    document = crash_job(LOCAL, model="acting_models:deadly", at_batch=2, signum=signal.SIGKILL)
    with rig.running(document) as run, pytest.raises(RunFailedError) as error:
        run.result()
    assert f"ended by SIGKILL and {PRINTED}" in str(error.value)


@pytest.mark.sweep
def test_all_workers_killed_at_once_five_times_in_a_segment_fail_no_run(rig: Rig) -> None:
    document = crash_job(ALL_REDUCE, model=PACED, pace_s=0.2, every=12)
    expected = rig.outcome({**document, **_unpaced(document)})
    with rig.running(document) as run:
        for _ in range(5):
            await_step(run, 1)
            processes = rig.cluster.processes
            workers = [processes[name] for name in rig.cluster.worker_names]
            for worker in workers:
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)  # behind the supervisor's back
            for worker in workers:
                rig.cluster.wait_restarted(worker.name, worker.num_starts)
        assert outcome_of(run).digests == expected.digests


def _unpaced(document: Job) -> Job:
    return {"model": {**document["model"], "kwargs": {"pace_s": 0.0}}}
