"""How many files a reader enters who follows a job or a gradient through the product.

The bounds may fall and not rise. They have some room: which functions a process calls while it
waits depends on how long it waits.
"""

import pytest

from tests.jobs import document
from tests.walks.walk import Footprint, Walk, footprints_of, once, walk_of

pytestmark = [pytest.mark.sweep, pytest.mark.cluster]

STEP = "Trainer.train_step"
MAX_JOB_FILES = 235
MAX_GRADIENT_FILES = 36
ALL_REDUCE = {
    "type": "DataParallel",
    "num_replicas": 2,
    "aggregation": {"method": "AllReduce"},
}


@pytest.mark.promise("a job passes through few files from the command to its first step")
def test_a_job_passes_through_few_files_up_to_its_first_step() -> None:
    marks = footprints_of(document(), 1, STEP, 3)
    walk = walk_of(once((each for process in marks for each in process), STEP))
    assert 100 < walk.files <= MAX_JOB_FILES, walk


@pytest.mark.promise("a gradient passes through few files in a step")
def test_a_gradient_passes_through_few_files_in_a_step() -> None:
    steps = [
        [each for each in process if each.is_inside]
        for process in footprints_of(document(strategy=ALL_REDUCE), 2, STEP, 4)
    ]
    walks = [walk_of(step) for step in steps if step]
    assert len(walks) == 2
    assert all(10 < walk.files <= MAX_GRADIENT_FILES for walk in walks), walks


@pytest.mark.core
def test_a_file_that_was_left_and_is_entered_again_is_a_return() -> None:
    marks = [Footprint(float(at), False, file, "f") for at, file in enumerate("aabcbbaa")]
    assert walk_of(marks) == Walk(files=3, returns=2)
    assert walk_of([]) == Walk(0, 0)
