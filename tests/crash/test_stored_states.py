"""Stored states that are gone or damaged: the run says so, and goes on from an earlier commit."""

from pathlib import Path

import pytest

from stratagem.common.errors import RunFailedError, WrongStateError
from tests.crash.jobs import ALL_REDUCE, FED_AVG, LOCAL, Job, job
from tests.crash.rig import Rig, await_status, outcome_of
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


@pytest.mark.parametrize(
    "strategy", [LOCAL, ALL_REDUCE, FED_AVG], ids=["Local", "AllReduce", "Fed"]
)
def test_a_run_whose_last_commit_is_gone_goes_on_from_an_earlier_one(
    rig: Rig, strategy: Job
) -> None:
    document = job(strategy, model="build_paced", pace_s=0.05)
    expected = rig.outcome({**document, **_unpaced(document)})
    with rig.running(document) as run:
        await_status(run, lambda s: len(s.commits) >= 3, "three commits")
        run.cancel()
        await_status(run, lambda s: s.phase.is_final, "it is stopped")
        last = run.status().commits[-1]
        Path(last.path).unlink()
        run.resume()
        with pytest.raises(RunFailedError) as error:
            run.result()
        text = str(error.value)
        assert f"commit {last.segment}: blob {last.digest} is not in the store; " in text
        assert f"stratagem resume {run.run_id} --from {last.segment - 1}" in text
        assert "TaskGroup" not in text
        _expect_no_groups(rig)

        with pytest.raises(WrongStateError, match=r"99 is no kept commit .*; kept are 0, 1, 2"):
            run.resume(99)
        run.resume(last.segment - 1)
        assert outcome_of(run).digests == expected.digests


def _expect_no_groups(rig: Rig) -> None:
    lines = rig.cluster.log_tail("coordinator").splitlines()
    assert not [line for line in lines if "unhandled errors in a TaskGroup" in line]


def _unpaced(document: Job) -> Job:
    return {"model": {**document["model"], "kwargs": {"pace_s": 0.0}}}
