"""Stored states that are gone or damaged: the run says so, and goes on from an earlier commit."""

import os
from pathlib import Path

import pytest

from stratagem.common.base.errors import IntegrityError, RunFailedError, WrongStateError
from tests.cluster.jobs import Gates
from tests.crash.jobs import ALL_REDUCE, FED_AVG, LOCAL, Job, gated
from tests.crash.rig import Rig, await_status, outcome_of
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.promise("A run whose state is gone or damaged says so and is resumed before it."),
]

CASES: dict[str, tuple[Job, tuple[str, ...]]] = {
    "Local": (LOCAL, ("batch-5",)),
    "AllReduce": (ALL_REDUCE, ("worker-1-batch-5",)),
    "Fed": (FED_AVG, ("client0-5", "client1-5", "client2-5")),
}
"""Strategies, and gates inside their third segment or round: three commits are there before."""


@pytest.mark.parametrize(
    ("strategy", "held_at"),
    [
        pytest.param(*CASES["Local"], marks=pytest.mark.soak),
        pytest.param(*CASES["AllReduce"], marks=pytest.mark.cluster),
        pytest.param(*CASES["Fed"], marks=pytest.mark.sweep),
    ],
    ids=CASES,
)
def test_a_run_whose_last_commit_is_gone_goes_on_from_an_earlier_one(
    rig: Rig, gates: Gates, strategy: Job, held_at: tuple[str, ...]
) -> None:
    document = gated(strategy, gates.folder)
    expected = rig.outcome(document)
    gates.close(*held_at)
    num_before = len(rig.cluster.log_tail("coordinator"))  # others' processes were killed
    with rig.running(document) as run:
        await_status(run, lambda s: len(s.commits) >= 3, "three commits")
        run.cancel()
        await_status(run, lambda s: s.phase.is_final, "it is stopped")
        gates.open()
        last = run.status().commits[-1]
        Path(last.path).unlink()
        run.resume()
        with pytest.raises(RunFailedError) as error:
            run.result()
        text = str(error.value)
        assert f"commit {last.segment}: blob {last.digest} is not in the store; " in text
        assert f"stratagem resume {run.run_id} --from {last.segment - 1}" in text
        assert "TaskGroup" not in text
        _expect_no_groups(rig, num_before)

        with pytest.raises(WrongStateError, match=r"99 is no kept commit .*; kept are 0, 1, 2"):
            run.resume(99)
        run.resume(last.segment - 1)
        assert outcome_of(run).digests == expected.digests


@pytest.mark.sweep
def test_a_state_that_rots_under_its_time_stamp_reaches_nobody(
    rig: Rig, gates: Gates, tmp_path: Path
) -> None:
    gates.close(*CASES["Local"][1])
    with rig.running(gated(LOCAL, gates.folder)) as run:
        await_status(run, lambda s: len(s.commits) >= 2, "two commits")
        run.cancel()
        last = await_status(run, lambda s: s.phase.is_final, "it is stopped").commits[-1]
        gates.open()
        run.download(tmp_path / "before.safetensors", str(last.segment))
        path = Path(last.path)
        before, content = path.stat(), bytearray(path.read_bytes())
        content[-1] ^= 1
        with path.open("r+b") as file:
            file.write(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(IntegrityError, match=f"blob {last.digest} is damaged"):
            run.download(tmp_path / "after.safetensors", str(last.segment))
        run.resume()
        with pytest.raises(RunFailedError, match=f"blob {last.digest} is damaged") as error:
            run.result()
        assert f"--from {last.segment - 1}" in str(error.value)
        run.resume(last.segment - 1)
        run.result()


def _expect_no_groups(rig: Rig, num_before: int) -> None:
    log = rig.cluster.log_tail("coordinator")[num_before:]
    before, group, after = log.partition("unhandled errors in a TaskGroup")
    assert not group, before[-2000:] + group + after[:6000]
