"""What is said of a training that another one goes on from, before anything is submitted."""

from typing import Any

import pytest

from stratagem.client import Client
from stratagem.common.base.errors import InvalidInputError, WrongStateError
from tests.client.fake_coordinator import JOB, FakeCoordinator

LENGTH = "schedule: optimizer.schedule ({}) spans the whole training, which now has {}: "


def scheduled(schedule: Any) -> dict[str, Any]:
    return {**JOB, "optimizer": {"name": "sgd", "lr": 0.1, "schedule": schedule}}


@pytest.mark.parametrize(
    ("schedule", "changes", "said"),
    [
        ("cosine", ["epochs=40"], LENGTH.format("cosine", "epochs 40 in place of 1")),
        ("onecycle", ["epochs=40"], LENGTH.format("onecycle", "epochs 40 in place of 1")),
        (
            [{"name": "constant", "steps": 5}, "linear"],
            ["epochs=null", "steps=100"],
            LENGTH.format("linear", "steps 100 in place of none"),
        ),
        ({"name": "cosine", "steps": 20}, ["epochs=40"], ""),
        ({"name": "exponential", "gamma": 0.9}, ["epochs=40"], ""),
        ("cosine", ["epochs=40", "optimizer.schedule.steps=20"], ""),
        (None, ["epochs=40"], ""),
    ],
)
def test_a_schedule_that_reads_the_length_says_what_another_one_does_to_it(
    client: Client, schedule: Any, changes: list[str], said: str
) -> None:
    client.submit(scheduled(schedule), "first")
    note = client.resume_as("first", changes).note
    assert note.startswith(said)
    assert bool(note) == bool(said)
    if said:
        assert "at step 20 of the new curve" in note
        assert "optimizer.schedule keeps the old curve" in note


@pytest.mark.parametrize("before", [None, {"sample": 0.5, "on": "any"}])
@pytest.mark.parametrize("change", ["verification=null", "verification.sample=0.25"])
def test_how_much_is_verified_may_change_as_it_changes_no_bit(
    client: Client, before: Any, change: str
) -> None:
    first = {**JOB, "verification": before} if before else JOB
    client.submit(first, "first")
    assert client.resume_as("first", ["epochs=40", change]).run_id != "first"


def test_a_run_that_still_trains_is_named_with_what_can_be_done(
    client: Client, fake: FakeCoordinator
) -> None:
    fake.ending = "never"
    client.submit(JOB, "first")
    with pytest.raises(WrongStateError) as refused:
        client.resume_as("first", ["epochs=4"])
    assert str(refused.value) == (
        "run first is still training (RUNNING, step 20): stop it first (`stratagem stop first`, "
        "run.cancel()), or name the commit from which the new run continues (--from, "
        "from_segment=): 1, 2"
    )
    with pytest.raises(InvalidInputError, match=r"segment 9 is no kept commit .*; kept are 1, 2"):
        client.resume_as("first", ["epochs=4"], from_segment=9)
    assert len(client.runs()) == 1
