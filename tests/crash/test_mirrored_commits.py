"""A worker that dies while a commit is under way: those that are left train on, and the commit is
made of what they have."""

import pytest

from tests.cluster.jobs import Gates
from tests.crash.jobs import JOBS
from tests.crash.rig import Rig, outcome_of
from tests.crash.whole_runs import assert_nothing_was_trained_twice, outcome_of_held
from tests.jobs import user_data, user_model
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.promise("A commit is made of what is left when a worker dies within it."),
]


CASES = [
    ("Mirrors", "worker-0", "worker.snapshot.asked", 2),
    ("Full-mirrors", "worker-1", "worker.snapshot.asked", 0),
]


@pytest.mark.parametrize(("job", "process", "failpoint", "num_passed"), CASES)
def test_a_commit_goes_on_when_a_worker_dies(
    rig: Rig, gates: Gates, job: str, process: str, failpoint: str, num_passed: int
) -> None:
    spec = {**JOBS[job], "data": user_data("gated", folder=str(gates.folder))}
    expected = rig.outcome(spec)
    with rig.armed(process, failpoint, num_passed):
        outcome, run = outcome_of_held(rig, gates, spec, process)
    assert outcome == expected
    assert_nothing_was_trained_twice(run)


def test_a_step_that_is_done_again_has_the_running_statistics_once(rig: Rig) -> None:
    spec = {**JOBS["Full-mirrors"], "model": user_model("batch_norm_mlp"), "batch_size": 10}
    expected = rig.outcome(spec)
    with rig.armed("worker-2", "worker.step.before_apply", 5):
        outcome = rig.outcome(spec)
    assert outcome == expected


def test_two_neighbours_that_die_in_a_commit_take_all_back_to_the_one_before(rig: Rig) -> None:
    expected = rig.undisturbed("Mirrors")
    with (
        rig.armed("worker-0", "worker.snapshot.asked", 2),
        rig.armed("worker-1", "worker.snapshot.asked", 1),
        rig.running(JOBS["Mirrors"]) as run,
    ):
        outcome = outcome_of(run)
    assert outcome == expected
