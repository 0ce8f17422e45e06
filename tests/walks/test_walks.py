"""How many files a reader enters who follows a job or a gradient through the product.

The bounds may fall and not rise. They have some room: which functions a process calls while it
waits depends on how long it waits.
"""

import pytest

from tests.crash.jobs import LOCAL, crash_job, federated, pipeline
from tests.jobs import document
from tests.walks.walk import Footprint, Walk, footprints_of, once, walk_of

pytestmark = [pytest.mark.sweep, pytest.mark.cluster]

STEP = ".train_step"
ALL_REDUCE = {
    "type": "DataParallel",
    "num_replicas": 2,
    "aggregation": {"method": "AllReduce"},
}
MAX_JOB = Walk(files=235, returns=790)
MAX_GRADIENT = Walk(files=42, returns=75)
MAX_ACTIVATION = Walk(files=52, returns=80)
MAX_UPDATE = Walk(files=180, returns=520)
"""Of the worker and of the coordinator together."""
MAX_COMMIT = Walk(files=75, returns=140)


def is_within(walk: Walk, most: Walk) -> bool:
    return most.files / 2 < walk.files <= most.files and walk.returns <= most.returns


def windows(job: dict[str, object], workers: int, window: str, number: int) -> list[Walk]:
    """The window of this number of each process that has one; the first have what is made once."""
    processes = footprints_of(job, workers, window, number)
    inside = [[each for each in process if each.is_inside] for process in processes]
    return [walk_of(each) for each in inside if each]


@pytest.mark.promise("a job passes through few files from the command to its first step")
def test_a_job_passes_through_few_files_up_to_its_first_step() -> None:
    marks = footprints_of(document(), 1, STEP, 3)
    walk = walk_of(once((each for process in marks for each in process), STEP))
    assert is_within(walk, MAX_JOB), walk


@pytest.mark.promise("a gradient, and an activation, pass through few files in a step")
@pytest.mark.parametrize(
    ("job", "most"),
    [
        (document(strategy=ALL_REDUCE), MAX_GRADIENT),
        (crash_job(pipeline(last="worker-1")), MAX_ACTIVATION),
    ],
    ids=["gradient", "activation"],
)
def test_what_workers_exchange_passes_through_few_files_in_a_step(
    job: dict[str, object], most: Walk
) -> None:
    walks = windows(job, 2, STEP, 4)
    assert len(walks) == 2
    assert all(is_within(walk, most) for walk in walks), walks


@pytest.mark.promise("a client's update passes through few files up to the next round")
def test_an_update_passes_through_few_files_up_to_the_next_round() -> None:
    job = crash_job(federated(num_clients=1, rounds=4))
    (at_worker,) = windows(job, 1, "Servicer.Execute..Servicer.Execute", 2)
    (at_coordinator,) = windows(job, 1, "train_client..train_client", 2)
    files = at_worker.files + at_coordinator.files
    walk = Walk(files, at_worker.returns + at_coordinator.returns)
    assert is_within(walk, MAX_UPDATE), (at_worker, at_coordinator)


@pytest.mark.promise("a commit passes through few files of the coordinator")
def test_a_commit_passes_through_few_files_up_to_the_next_segment() -> None:
    (walk,) = windows(crash_job(LOCAL), 1, "commit_segment..run_segment", 2)
    assert is_within(walk, MAX_COMMIT), walk


@pytest.mark.core
def test_a_file_that_was_left_and_is_entered_again_is_a_return() -> None:
    marks = [Footprint(float(at), False, file, "f") for at, file in enumerate("aabcbbaa")]
    assert walk_of(marks) == Walk(files=3, returns=2)
    assert walk_of([]) == Walk(0, 0)
