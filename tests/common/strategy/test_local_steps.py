"""When which fragment of the parameters is cut and applied."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.strategy.local_steps import Due, due_after, fragments_of

pytestmark = pytest.mark.core


@dataclass(frozen=True)
class Schedule:
    local_steps: int
    fragments: int
    overlap_steps: int


SCHEDULES = st.tuples(st.integers(1, 5), st.integers(1, 6)).flatmap(
    lambda drawn: st.integers(0, drawn[1]).map(
        lambda overlap: Schedule(drawn[0] * drawn[1], drawn[0], overlap)
    )
)


@given(schedule=SCHEDULES, num_steps=st.integers(1, 60))
def test_fragments_are_cut_once_a_round_and_applied_later(
    schedule: Schedule, num_steps: int
) -> None:
    period, under_way = schedule.local_steps // schedule.fragments, dict[int, int]()
    for step in range(1, num_steps + 1):
        dues = due_after(step, schedule, num_steps)
        for due in dues:
            if due.is_cut:
                assert not under_way, "one fragment is under way at a time"
                under_way[due.fragment] = step
            else:
                taken = step - under_way.pop(due.fragment)
                assert taken == schedule.overlap_steps or step == num_steps
        if step < num_steps:
            cut = [due.fragment for due in dues if due.is_cut]
            fragment = (step // period - 1) % schedule.fragments
            assert cut == ([fragment] if step % period == 0 else [])
    assert not under_way
    cut = [due.fragment for due in due_after(num_steps, schedule, num_steps) if due.is_cut]
    assert cut == list(range(schedule.fragments))


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=20), data=st.data())
def test_fragments_are_all_parameters_and_none_is_empty(
    sizes: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    fragments = fragments_of(sizes, count)
    assert len(fragments) == count
    assert all(fragments)
    assert list(chain.from_iterable(fragments)) == list(range(len(sizes)))


def test_fragments_are_about_equal_and_the_last_one_is_cut_at_the_end() -> None:
    assert fragments_of([10] * 8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    # The sizes at which torchft's buckets left the last parameter out (torchft local_sgd.py).
    assert fragments_of([4, 4, 2], 2) == [range(1), range(1, 3)]
    assert fragments_of([1, 1, 100], 3) == [range(1), range(1, 2), range(2, 3)]
    schedule = Schedule(6, 3, 1)
    assert due_after(2, schedule, 100) == [Due(0, is_cut=True)]
    assert due_after(3, schedule, 100) == [Due(0, is_cut=False)]
    assert due_after(6, schedule, 100) == [Due(2, is_cut=True)]
    assert due_after(7, schedule, 100) == [Due(2, is_cut=False)]
    assert due_after(1, schedule, 100) == []
