"""Rows of the step history: however its steps are cut, the same rows come out."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.history import (
    Columns,
    Recorder,
    Series,
    clipped,
    joined,
    shortened,
    stride_of,
)
from stratagem.common.history.columns import MAX_ROWS, coarsened, from_bytes

LOSS = Series("train.loss")
VALUES = st.lists(
    st.one_of(st.floats(width=32), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0])),
    min_size=1,
    max_size=200,
)


def recorded(values: list[float], stride: int, from_step: int = 0) -> Columns:
    recorder = Recorder(stride, from_step)
    for place, value in enumerate(values):
        recorder.add(from_step + place + 1, [(LOSS, value)])
    return recorder.end()[LOSS]


def by_hand(values: list[float], stride: int) -> list[tuple[float, ...]]:
    """The rows as the definition has them, one bucket after the other."""
    rows: list[tuple[float, ...]] = []
    for start in range(0, len(values), stride):
        bucket = values[start : start + stride]
        finite = [value for value in bucket if math.isfinite(value)]
        said = (finite[-1], min(finite), max(finite)) if finite else (math.nan,) * 3
        rows.append((start + len(bucket), *said, len(finite), len(bucket) - len(finite)))
    return rows


def cuts_of(num_steps: int, num_cuts: int, seed: int) -> list[int]:
    within = random.Random(seed).sample(range(1, num_steps), num_cuts)
    return [0, *sorted(within), num_steps]


def test_a_stride_is_the_smallest_power_of_two_that_leaves_2048_rows() -> None:
    assert [stride_of(num) for num in (0, 1, 2048, 2049, 4096, 4097, 30_000)] == [
        1, 1, 1, 2, 2, 4, 16,
    ]  # fmt: skip
    for num_steps in (30_000, 10**9, 2**53):
        stride = stride_of(num_steps)
        assert math.ceil(num_steps / stride) <= MAX_ROWS < math.ceil(num_steps / (stride // 2))


@settings(max_examples=40)
@given(VALUES, st.sampled_from([1, 2, 4, 16, 64]))
def test_rows_are_what_their_definition_says(values: list[float], stride: int) -> None:
    rows = recorded(values, stride)
    np.testing.assert_array_equal(
        np.array(by_hand(values, stride), np.float64).T, np.array(rows.arrays, np.float64)
    )


@settings(max_examples=40)
@given(VALUES, st.integers(0, 5), st.data())
def test_parts_may_be_merged_in_any_grouping(
    values: list[float], power: int, data: st.DataObject
) -> None:
    stride = 2**power
    first, second = sorted(data.draw(st.integers(0, len(values))) for _ in range(2))
    pieces = [(0, first), (first, second), (second, len(values))]
    parts = [recorded(values[start:end], stride, start) for start, end in pieces if start < end]
    whole = recorded(values, stride).to_bytes()
    assert joined(parts, stride).to_bytes() == whole
    left = joined([joined(parts[:2], stride), *parts[2:]], stride)
    right = joined([*parts[:1], joined(parts[1:], stride)], stride)
    assert left.to_bytes() == right.to_bytes() == whole
    twice = coarsened(joined(parts, stride), 2 * stride)
    assert twice.to_bytes() == recorded(values, 2 * stride).to_bytes()


def test_thirty_thousand_steps_cut_anywhere_are_the_same_rows_and_a_spike_of_one_is_seen() -> None:
    num_steps, stride = 30_000, stride_of(30_000)
    chance = random.Random(7)
    values = [chance.gauss(2.0, 0.1) for _ in range(num_steps)]
    values[17_342], values[17_500] = 900.0, math.nan
    whole = recorded(values, stride)
    assert len(whole) == 1875
    for seed in range(3):
        cuts = cuts_of(num_steps, 20, seed)
        parts = [recorded(values[a:b], stride, a) for a, b in pairwise(cuts)]
        assert joined(parts, stride).to_bytes() == whole.to_bytes(), seed
    few, wide = shortened(whole, stride, 100)
    assert len(few) <= 100 < len(coarsened(whole, wide // 2))
    assert few.max.max() == 900.0
    assert few.nonfinite.sum() == 1
    assert few.count.sum() == num_steps - 1
    seen = clipped(whole, stride, 17_343, 17_343)
    assert (len(seen), seen.max[0]) == (1, 900.0)


@settings(max_examples=40)
@given(VALUES, st.sampled_from([1, 4, 16]), st.data())
def test_a_recorder_goes_on_from_those_rows(
    values: list[float], stride: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(values)))
    donor = Recorder(stride, 0)
    for step in range(1, cut + 1):
        donor.add(step, [(LOSS, values[step - 1])])
        if step % 7 == 0:
            donor.take()  # what has been sent is no less a part of it
    copy = Recorder.going_on(stride, 0, donor.rows())
    for step in range(cut + 1, len(values) + 1):
        copy.add(step, [(LOSS, values[step - 1])])
    assert copy.end()[LOSS].to_bytes() == recorded(values, stride).to_bytes()


@pytest.mark.parametrize("stride", [1, 16])
def test_rows_do_not_depend_on_when_they_are_taken(stride: int) -> None:
    chance = random.Random(stride)
    others = [math.nan, math.inf, 0.0, -0.0]
    values = [chance.choice([chance.random(), *others]) for _ in range(5000)]
    recorder = Recorder(stride, 0)
    pieces: list[Columns] = []
    for step, value in enumerate(values, 1):
        recorder.add(step, [(LOSS, value)])
        recorder.add(step, [(LOSS, 7.0)])  # a step that is there already
        if chance.random() < 0.001:
            pieces += recorder.take().values()
    pieces.append(recorder.end()[LOSS])
    assert joined(pieces, stride).to_bytes() == recorded(values, stride).to_bytes()
    assert sum(map(len, pieces)) == math.ceil(5000 / stride), "each row goes out once"
    rows = np.array(recorded(values, stride).arrays, np.float64)
    np.testing.assert_array_equal(rows, np.array(by_hand(values, stride), np.float64).T)
    recorder.rewind()
    assert recorder.take()[LOSS].to_bytes() == recorded(values, stride).to_bytes()


def test_an_empty_recording_has_no_rows_and_names_that_are_none_are_left_out() -> None:
    assert Recorder(4, 0).end() == {}
    assert len(joined([], 4)) == 0
    with pytest.raises(ValueError, match="bytes are no rows"):
        from_bytes(b"123")
    recorder = Recorder(1, 0)
    values = [(Series(f"train.m{i}"), 1.0) for i in range(300)]
    recorder.add(1, [(Series(""), 1.0), (Series("a\x1b"), 1.0), (Series("x" * 129), 1.0), *values])
    assert len(recorder.end()) == 256
    assert len(recorder.dropped) == 3 + 44
