"""A step history that is read on as its run goes on is the one that is read at once."""

import numpy as np
import pytest

from stratagem.client.course.step_history import History, StepSeries
from stratagem.common.history import Columns, clipped, joined

STEPS = 203


def answer(until: int, certain: int, stride: int, from_step: int = 1) -> History:
    """What a coordinator answers that has so many steps, of which some may be done again."""
    found = []
    for name, every in (("train.loss", 1), ("train.seldom", 50)):
        step = np.arange(every, until + 1, every)
        value, ones = np.sin(step * 1.7), np.ones(len(step), np.int64)
        rows = Columns(step, value, value, value, ones, 0 * ones)
        parts = [
            clipped(joined([_part(rows, here)], stride), stride, from_step)
            for here in (step <= certain, step > certain)
        ]
        columns = joined(parts, stride)
        last = int(parts[0].step[-1]) if len(parts[0]) else 0
        if len(columns):
            series = StepSeries(name, "", stride, False, columns, columns.step > last)
            found.append(series)
    return History(found)


def _part(rows: Columns, here: np.ndarray) -> Columns:
    return Columns(*(column[here] for column in rows.arrays))


@pytest.mark.parametrize("seed", range(8))
def test_what_is_read_on_is_what_is_read_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stride, until, certain = int(2 ** rng.integers(0, 4)), 0, 0
    known = History(())
    while until < STEPS:
        until = min(STEPS, until + int(rng.integers(1, 40)))
        certain = int(rng.integers(certain, until + 1))
        if rng.random() < 0.2:
            stride *= 2  # the rows stand for more steps from now on
        from_step = known.next_step
        assert from_step <= certain + 1
        later = answer(until, certain, stride, from_step)
        known = known.continued(later) if from_step > 1 else later
        whole = answer(until, certain, stride)
        assert set(known) == set(whole)
        for name, series in whole.items():
            for column, wanted in zip(
                known[name].columns.arrays, series.columns.arrays, strict=True
            ):
                np.testing.assert_array_equal(column, wanted, err_msg=name)
            assert known[name].provisional.tolist() == series.provisional.tolist()
    assert known.next_step > 1
