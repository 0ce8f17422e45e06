"""A worker that dies while a commit is under way: those that are left train on, and the commit is
made of what they have."""

import pytest

from tests.crash.jobs import JOBS
from tests.crash.rig import Rig, outcome_of
from tests.crash.whole_runs import assert_nothing_was_trained_twice
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2 * PATIENCE_S)]


CASES = [
    ("worker-0", "worker.snapshot.asked", 2),
    ("worker-1", "worker.snapshot.asked", 0),
    ("worker-2", "worker.snapshot.asked", 3),
    ("worker-1", "worker.snapshot.taken", 2),
]


@pytest.mark.parametrize(("process", "failpoint", "num_passed"), CASES)
def test_a_commit_goes_on_when_a_worker_dies(
    rig: Rig, process: str, failpoint: str, num_passed: int
) -> None:
    expected = rig.undisturbed("Mirrors")
    with rig.armed(process, failpoint, num_passed), rig.running(JOBS["Mirrors"]) as run:
        outcome = outcome_of(run)
    assert outcome == expected
    assert_nothing_was_trained_twice(run)


def test_two_neighbours_that_die_in_a_commit_take_all_back_to_the_one_before(rig: Rig) -> None:
    expected = rig.undisturbed("Mirrors")
    with (
        rig.armed("worker-0", "worker.snapshot.asked", 2),
        rig.armed("worker-1", "worker.snapshot.asked", 1),
        rig.running(JOBS["Mirrors"]) as run,
    ):
        outcome = outcome_of(run)
    assert outcome == expected
