"""Times of several clocks on one axis: where one was, and how certain that is."""

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from stratagem.client.course.step_history import History, MeasuredStep, StepSeries, measured_step
from stratagem.common.history import Columns
from stratagem.common.history.recording import NONE, StageAction, StageReport, party_of_stage

HOP_S = 0.25
"""Between two workers, for as long as nothing else is said."""


def history_of(reports: Sequence[StageReport], step: int = 10) -> History:
    return History(
        StepSeries(
            *(name, party_of_stage(stage), 1),
            observed=True,
            columns=row(step, value),
            provisional=np.zeros(1, np.bool_),
        )
        for stage, report in enumerate(reports)
        for name, value in report.values.items()
    )


def row(step: int, value: float) -> Columns:
    values, one = np.array([value]), np.ones(1, np.int64)
    return Columns(np.array([step]), values, values, values, one, one - 1)


def played(
    offsets: Sequence[float], ranks: Sequence[int], count: int = 3, hop_s: float = HOP_S
) -> tuple[list[StageReport], dict[tuple[int, str, int], float]]:
    """What stages in a chain measure that have begun the step at these times, by rank, and the true
    times by stage, kind and micro-batch: all forwards, then all backwards, a second each."""
    ready = {(stage, "forward", n): 0.0 for stage in range(len(ranks)) for n in range(count)}
    free = [max(offset, 0.0) for offset in offsets]
    true: dict[tuple[int, str, int], float] = {}
    found: list[list[StageAction]] = [[] for _ in ranks]
    for kind, order in (("forward", 1), ("backward", -1)):
        for n in range(count):
            for stage in range(len(ranks))[::order]:
                rank = ranks[stage]
                begin = max(free[rank], ready.get((stage, kind, n), 0.0))
                true[stage, kind, n] = begin
                free[rank] = begin + 1.0
                its = begin - offsets[rank]
                found[stage].append(StageAction(kind, n, its, its + 1.0, 0.0))
                near = stage + order
                hop = hop_s if 0 <= near < len(ranks) and ranks[near] != rank else 0.0
                ready[near, kind, n] = begin + 1.0 + hop
    sources = [[stage - 1] if stage else [] for stage in range(len(ranks))]
    reports = [
        StageReport(rank, needs, actions)
        for rank, needs, actions in zip(ranks, sources, found, strict=True)
    ]
    return reports, true


def errors(measured: MeasuredStep, true: Mapping[tuple[int, str, int], float]) -> list[float]:
    first = min(true.values())
    return [
        abs(each.begin_s - (true[stage, each.kind, each.micro_batch] - first))
        for stage, actions in measured.actions.items()
        for each in actions
    ]


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3), (0, 1, 0, 1), (0, 0, 1)])
def test_clocks_of_machines_are_aligned_by_what_they_have_sent_each_other(
    ranks: tuple[int, ...],
) -> None:
    drawn = random.Random(7)
    for _ in range(20):
        offsets = [0.0, *(drawn.uniform(-1e3, 1e3) for _ in range(max(ranks)))]
        reports, true = played([min(0.0, each) for each in offsets], ranks)
        measured = measured_step(history_of(reports), len(ranks))
        assert measured is not None
        assert (measured.step, measured.is_whole) == (10, True)
        assert measured.error_s <= max(ranks) * HOP_S + 1e-5, "half of there and back, each"
        assert max(errors(measured, true)) <= measured.error_s + 1e-5
        begins = [each.begin_s for its in measured.actions.values() for each in its]
        assert min(begins) == 0.0


def test_workers_of_one_machine_have_one_clock() -> None:
    began = [0.0, -17.5, -3.0]
    reports, true = played(began, (0, 1, 2), hop_s=0.9)
    same = [
        StageReport(each.rank, each.sources, each.actions, 50.0 + began[each.rank], 1234)
        for each in reports
    ]
    measured = measured_step(history_of(same), 3)
    assert measured is not None
    assert measured.error_s == 0.0
    assert max(errors(measured, true)) <= 1e-5
    of_two = [*same[:2], StageReport(2, [1], reports[2].actions, 7e5, 99)]
    measured = measured_step(history_of(of_two), 3)
    assert measured is not None
    assert 0.0 < measured.error_s <= 0.9 + 1e-5, "the third is aligned by what it has received"
    assert max(errors(measured, true)) <= measured.error_s + 1e-5


def test_a_boundary_that_no_gradient_comes_back_over_bounds_from_one_side() -> None:
    (first, second), true = played([0.0, -30.0], (0, 1))
    only = [each for each in second.actions if each.kind == "forward"]
    measured = measured_step(history_of([first, StageReport(1, [0], only)]), 2)
    assert measured is not None
    assert max(errors(measured, true)) <= HOP_S + 1e-5
    assert math.isfinite(measured.error_s)
    alone = measured_step(history_of([first, StageReport(1, [], only)]), 2)
    assert alone is not None, "nothing is sent: each begins with the step"


def test_a_step_is_measured_once_all_stages_have_told_of_it() -> None:
    reports, _ = played([0.0, 0.0], (0, 1))
    assert measured_step(history_of(reports), 3) is None, "one stage has told nothing"
    assert measured_step({}, 2) is None
    older, newer = history_of(reports[:1], 10), history_of(reports, 20)
    mixed = History([*older.values(), *(each for each in newer.values() if "1" in each.party)])
    assert measured_step(mixed, 2) is None, "of two steps"
    some = [
        StageReport(each.rank, each.sources, [a for a in each.actions if a.micro_batch != 1])
        for each in reports
    ]
    measured = measured_step(history_of(some), 2)
    assert measured is not None
    assert not measured.is_whole
    once = StageAction("optimizer", NONE, 50.0, 51.0)
    told = StageReport(0, [], [*reports[0].actions, once])
    measured = measured_step(history_of([told, reports[1]]), 2)
    assert measured is not None
    assert measured.is_whole
    assert measured.actions[0][-1].kind == "optimizer"
