"""What a rank measures of a step: each piece of work once, in the order in which it was done."""

from itertools import pairwise

import torch

from stratagem.common.history.stage_actions import NONE, StageReport
from stratagem.common.pipeline.schedules import Action, TaskKind
from stratagem.worker.host.clock_number import clock_number
from stratagem.worker.pipeline.build_stages import StageAssignment
from stratagem.worker.pipeline.timing.stage_times import StageTimes
from tests.worker.pipeline.support import Party, cut, deep_job

F, B, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT


def do(times: StageTimes, kind: TaskKind, stage: int, micro_batch: int) -> None:
    if kind is not W:
        with times.waiting(stage):
            pass
    with times.computing(Action(kind, stage, micro_batch)):
        pass


def test_a_report_has_each_piece_of_work_of_all_passes() -> None:
    times = StageTimes(torch.device("cpu"), 1, {1: (0,), 3: (2,)})
    times.begin()
    for count in (2, 0, 1):  # shards, one of which has no rows
        with times.working(count):
            for stage in (1, 3):
                for number in range(count):
                    do(times, F, stage, number)
                    do(times, B, stage, number)
    times.exchanged()
    with times.updating():
        pass
    told = times.actions()
    busy = {each.party: each.observed["busy_s"] for each in times.reports()}
    times.begin()
    do(times, W, 3, 9)  # of the next step

    parts = told()
    assert [part.party for part in parts] == ["actions/1", "actions/3"]
    reports = [StageReport.of(part.observed) for part in parts]
    keys = [[(each.kind, each.micro_batch) for each in report.actions] for report in reports]
    passed = [(kind, number) for number in range(3) for kind in ("forward", "backward")]
    assert keys == [[*passed, ("exchange", NONE), ("optimizer", NONE)], passed]
    assert [(each.rank, each.sources, each.clock) for each in reports] == [
        (1, [0], clock_number()),
        (1, [2], clock_number()),
    ]
    assert reports[0].began_s == reports[1].began_s > 0.0
    for stage, report in zip((1, 3), reports, strict=True):
        assert all(a.end_s <= b.begin_s for a, b in pairwise(report.actions))
        lasted = [each.end_s - each.begin_s for each in report.actions if each.micro_batch != NONE]
        assert abs(sum(lasted) - busy[f"stage/{stage}"]) <= len(lasted) * 2.0**-20


def test_every_rank_tells_what_its_schedule_has_it_do() -> None:
    placement = StageAssignment(
        cut([str(n) for n in range(8)], 4, 4), (0, 1), 3, schedule="zero_bubble"
    )
    party = Party(deep_job(), placement)
    reports = party.each(lambda runner: runner.train_step())
    for stage, report in enumerate(reports):
        (part,) = report.actions()
        its = StageReport.of(part.observed)
        assert (part.party, its.rank) == (f"actions/{stage}", stage)
        assert its.sources == ([0] if stage else [])
        done = sorted((each.kind, each.micro_batch) for each in its.actions)
        halves = [(kind, n) for kind in ("forward", "input", "weight") for n in range(3)]
        assert done == sorted([*halves, ("exchange", NONE), ("optimizer", NONE)])
