"""Schedules as data: their order, their proof, their bubble, what they keep."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.pipeline.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    TaskKind,
    choose,
    eager_one_f_one_b,
    forward_only,
    gpipe,
    interleaved,
    list_schedule,
    one_f_one_b,
    zero_bubble,
)
from stratagem.common.pipeline.simulation import check, consumers, format_lists, peak_live, required

pytestmark = pytest.mark.core

STAGES, CHUNKS, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 4), st.integers(1, 20)
F, B = TaskKind.FORWARD, TaskKind.BACKWARD
EQUAL_COSTS: Mapping[TaskKind, float] = dict.fromkeys(TaskKind, 1.0)


def chain(num_stages: int) -> list[tuple[int, ...]]:
    return [(stage - 1,) if stage else () for stage in range(num_stages)]


def timeline(
    schedule: Schedule, num_stages: int, costs: Mapping[TaskKind, float] = EQUAL_COSTS
) -> tuple[float, float]:
    """The time that a schedule of a chain of stages takes if its hops take none, and the idle share
    of all ranks' time."""
    needs = chain(num_stages)
    needed_by, ends = consumers(needs), dict[Action, float]()
    clocks, waiting = [0.0] * len(schedule), [list(actions) for actions in schedule]
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions:
                groups = required(actions[0], needs, needed_by)
                ready = [[ends[each] for each in group if each in ends] for group in groups]
                if not all(ready):
                    break
                start = max((times[0] for times in ready), default=0.0)
                clocks[rank] = max(start, clocks[rank]) + costs[actions[0].kind]
                ends[actions.pop(0)] = clocks[rank]
    busy = sum(costs[action.kind] for actions in schedule for action in actions)
    return max(clocks), 1.0 - busy / (len(schedule) * max(clocks))


def kinds(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{a.kind}{a.micro_batch}" for a in schedule[rank])


@settings(max_examples=40)
@given(STAGES, MICRO_BATCHES)
def test_1f1b_keeps_what_the_formula_says(num_stages: int, count: int) -> None:
    schedule = one_f_one_b(num_stages, count)
    check(schedule, range(num_stages), count)
    assert peak_live(schedule) == {k: min(num_stages - k, count) for k in range(num_stages)}
    _, bubble = timeline(schedule, num_stages)
    assert bubble == pytest.approx((num_stages - 1) / (count + num_stages - 1))
    for stage, actions in enumerate(schedule):
        warmup = min(num_stages - stage - 1, count)
        assert [a.kind for a in actions[:warmup]] == [F] * warmup
        steady = [a.kind for a in actions[warmup : 2 * count - warmup]]
        assert steady == [F, B] * (count - warmup)
        assert [a.kind for a in actions[2 * count - warmup :]] == [B] * warmup


@settings(max_examples=40)
@given(STAGES, MICRO_BATCHES)
def test_gpipe_eager_and_zero_bubble(num_stages: int, count: int) -> None:
    ranks = range(num_stages)
    check(gpipe(num_stages, count), ranks, count)
    assert peak_live(gpipe(num_stages, count)) == dict.fromkeys(ranks, count)
    _, bubble = timeline(gpipe(num_stages, count), num_stages)
    assert bubble == pytest.approx((num_stages - 1) / (count + num_stages - 1))
    eager = eager_one_f_one_b(num_stages, count)
    check(eager, ranks, count)
    assert peak_live(eager) == {k: min(2 * (num_stages - 1 - k) + 1, count) for k in ranks}
    split = zero_bubble(num_stages, count)
    costs = {F: 1.0, B: 2.0, TaskKind.INPUT: 1.0, TaskKind.WEIGHT: 1.0}
    check(split, ranks, count)
    assert max(peak_live(split).values()) <= num_stages
    ours, _ = timeline(split, num_stages, costs)
    assert ours <= timeline(one_f_one_b(num_stages, count), num_stages, costs)[0]


@settings(max_examples=40)
@given(STAGES, CHUNKS, st.integers(1, 4))
def test_interleaved(size: int, chunks: int, rounds: int) -> None:
    count = size * rounds
    schedule = interleaved(size, chunks, count)
    ranks = [stage % size for stage in range(size * chunks)]
    check(schedule, ranks, count)
    if chunks == 1:
        assert schedule == one_f_one_b(size, count)
        return
    if size > 1:
        _, bubble = timeline(schedule, size * chunks)
        assert bubble == pytest.approx((size - 1) / (chunks * count + size - 1))
    for rank, actions in enumerate(schedule):
        live = peak = 0
        for action in actions:
            live += 1 if action.kind is F else -1
            peak = max(peak, live)
        most = (chunks - 1) * size + 2 * (size - 1 - rank) + 1
        assert peak == min(count * chunks, most)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), MICRO_BATCHES, st.booleans())
def test_list_schedules_fit_any_placement(ranks: list[int], count: int, split: bool) -> None:
    numbers = {rank: i for i, rank in enumerate(sorted(set(ranks)))}
    ranks = [numbers[rank] for rank in ranks]
    check(list_schedule(ranks, count, split_backward=split), ranks, count)
    check(forward_only(ranks, count), ranks, count, backward=False)
    for name in SCHEDULES:
        check(choose(name, ranks, count), ranks, count)


def test_a_placement_that_fits_gets_the_named_schedule() -> None:
    for name, make in SCHEDULES.items():
        assert choose(name, (0, 1, 2), 4) == make(3, 4)
    first, second = one_f_one_b(2, 4)
    assert choose("1f1b", (1, 0), 4) == (second, first)
    assert choose("1f1b", (0, 1, 0, 1), 4) == interleaved(2, 2, 4)


def test_the_peak_may_come_after_a_backward() -> None:
    order = [(F, 0), (F, 1), (B, 0), (F, 2), (F, 3), (B, 1), (B, 2), (B, 3)]
    assert peak_live((tuple(Action(kind, 0, number) for kind, number in order),)) == {0: 3}


def test_orders_written_out() -> None:
    assert kinds(one_f_one_b(3, 4), 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert kinds(one_f_one_b(3, 4), 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert kinds(one_f_one_b(4, 2), 0) == "F0 F1 B0 B1"
    assert kinds(eager_one_f_one_b(2, 4), 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    lists = format_lists(interleaved(2, 2, 2)).splitlines()
    assert lists[0] == "rank 0: F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0"
    assert lists[1] == "rank 1: F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1"
    assert format_lists(interleaved(2, 3, 4)).splitlines()[1] == (
        "rank 1: F0.1 F1.1 F0.3 F1.3 F0.5 B0.5 F1.5 B1.5 F2.1 B0.3 F3.1 B1.3 "
        "F2.3 B0.1 F3.3 B1.1 F2.5 B2.5 F3.5 B3.5 B2.3 B3.3 B2.1 B3.1"
    )


@pytest.mark.sweep  # torch takes seconds to import them
@pytest.mark.parametrize(
    ("size", "chunks", "count"),
    [(2, 2, 2), (2, 2, 4), (2, 3, 4), (3, 2, 6), (4, 2, 4), (4, 2, 8), (4, 3, 8)],
)
def test_interleaved_order_is_that_of_torch(size: int, chunks: int, count: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    for rank, ours in enumerate(interleaved(size, chunks, count)):
        total = chunks * count
        warmup = min((chunks - 1) * size + 2 * (size - 1 - rank), total)

        def forward(step: int, rank: int = rank) -> int:
            return step // size % chunks * size + rank

        def backward(step: int, rank: int = rank, warmup: int = warmup) -> int:
            return (chunks - 1 - (step - warmup) // size % chunks) * size + rank

        theirs = schedules._get_1f1b_rank_ops(
            chunks, size, warmup, total - warmup, warmup, rank, forward, backward
        )
        assert [(a.stage, str(a.kind), a.micro_batch) for a in ours] == [
            (each.stage_index, letters[each.computation_type.name], each.microbatch_index)
            for each in theirs
            if each is not None
        ]


def test_a_deadlock_is_found_and_shown() -> None:
    stuck = (
        (Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)),
        (Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)),
    )
    with pytest.raises(
        InvalidInputError,
        match=r"rank 0 at B0.0 waits for B0.1 of rank 1; rank 1 at F1.1 waits for F1.0 of rank 0",
    ) as error:
        check(stuck, (0, 1), 2)
    assert "rank 0: F0.0   [B0.0]" in str(error.value)


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ((Action(F, 0, 1), Action(B, 0, 1)), "micro-batch 0 must be next"),
        ((Action(F, 1, 0),), "stage 1 does not belong to rank 0"),
        ((Action(F, 0, 0),), "stage 0 is not complete for 1 micro-batches"),
        ((Action(F, 0, 0), Action(B, 0, 0), Action(B, 0, 0)), "micro-batch 1 must be next"),
        ((Action(F, 0, 0), Action(TaskKind.INPUT, 0, 0)), "is not complete"),
        ((Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0)), "there are 1 micro-batches"),
        ((Action(B, 0, 0), Action(F, 0, 0)), "deadlock"),
    ],
)
def test_what_is_not_a_schedule_is_refused(actions: tuple[Action, ...], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        check((actions,), (0,), 1)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"num_micro_batches: 0 is not >= 1"):
        one_f_one_b(2, 0)
    with pytest.raises(InvalidInputError, match=r"num_stages: 0"):
        gpipe(0, 2)
    with pytest.raises(InvalidInputError, match=r"3 is no multiple of the 2 ranks"):
        interleaved(2, 2, 3)
    with pytest.raises(InvalidInputError, match=r"chunks"):
        interleaved(2, 0, 2)
    with pytest.raises(InvalidInputError, match=r'"?dualpipe"?.*1f1b, eager'):
        choose("dualpipe", (0, 1), 4)
