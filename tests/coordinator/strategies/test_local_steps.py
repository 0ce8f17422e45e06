"""Replicas that take local steps: where their segments end, and what a loss of a member costs."""

from typing import Any

import pytest

from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import LoseWorker
from stratagem.coordinator.core.effects import RunSegment
from stratagem.coordinator.core.facts import SegmentCommitted
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.strategies.scheduling.segment_schedule import schedule_of
from tests.coordinator.core.jobs import DATA_PARALLEL, job_text
from tests.coordinator.core.simulation import RUN, member, start

pytestmark = pytest.mark.core

ROWS = {"train": 100, "test": 20}


def strategy(local_steps: int) -> dict[str, Any]:
    return {**DATA_PARALLEL, "options": {"local_steps": local_steps}}


@pytest.mark.parametrize(
    ("local_steps", "sections", "ends"),
    [
        # An epoch of 10 steps is committed where the replicas are joined next.
        (4, {"epochs": 2}, (12, 20)),
        (10, {"epochs": 2}, (10, 20)),
        (50, {"epochs": 2}, (20,)),
        (4, {"epochs": None, "steps": 10, "checkpoint": {"every": "8 steps"}}, (8, 10)),
        (
            4,
            {
                "epochs": None,
                "steps": 20,
                "checkpoint": {"every": "12 steps"},
                "evaluation": {"split": "test", "every": "8 steps"},
            },
            (8, 12, 16, 20),
        ),
        (3, {"epochs": None, "steps": 7, "evaluation": {"split": "test"}}, (3, 6, 7)),
    ],
)
def test_segments_end_where_replicas_are_joined(
    local_steps: int, sections: dict[str, Any], ends: tuple[int, ...]
) -> None:
    job = JobSpec.from_json(job_text(strategy(local_steps), **sections))
    assert schedule_of(job, ROWS).ends() == ends


def test_a_lost_member_returns_all_replicas_to_the_last_commit() -> None:
    each_whole = {**DATA_PARALLEL, "options": {"local_steps": 5, "upload_every": 1}}
    job = job_text(each_whole, epochs=None, steps=20, checkpoint={"every": "5 steps"})
    simulation = start(job, "a", "b")
    for _ in range(4):
        simulation.tell(simulation.queue.popleft())
    (segment,) = [e for e in pending(simulation.state) if isinstance(e, RunSegment)]
    assert segment.parts == ((member("a"),), (member("b"),))
    committed = segment.base.segment
    simulation.queue.clear()
    simulation.tell(LoseWorker(member("b"), "gone"))
    (again,) = [e for e in pending(simulation.state) if isinstance(e, RunSegment)]
    assert (again.segment, again.base.segment) == (committed + 1, committed)
    assert again.lineage > segment.lineage
    assert again.parts == ((member("a"),),)
    simulation.crash()
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    steps = [fact.step for fact in simulation.facts(SegmentCommitted)]
    assert steps == [5, 10, 15, 20]
