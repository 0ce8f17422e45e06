"""Which members can go on from which slices, and with which step."""

import pytest

from stratagem.common.base.errors import SoleCopyLostError
from stratagem.v1.coordinator_pb2 import HeldSlices, KeptSlices, RendezvousMember
from stratagem.worker.party.survival import Survival, survival_of


def member(
    rank: int, step: int = 7, *, size: int = 4, at: int = 3, in_doubt: int | None = None
) -> RendezvousMember:
    slices = HeldSlices(rank=rank, size=size, membership=at, step_in_doubt=in_doubt)
    return RendezvousMember(applied_step=step, slices=slices)


def kept(
    divided: RendezvousMember, numbers: list[int], *, size: int = 4, at: int = 3
) -> RendezvousMember:
    """A member with its new slices, and copies of those before."""
    before = KeptSlices(numbers=numbers, size=size, membership=at, step=7)
    before.grad_norm, before.is_finite = 2.5, True
    divided.slices.before.CopyFrom(before)
    return divided


NEW = RendezvousMember()


def survived(members: list[RendezvousMember], base_step: int) -> Survival:
    found = survival_of(members, base_step)
    assert found is not None
    return found


def test_each_slice_comes_from_its_owner_or_from_the_one_after_it() -> None:
    found = survived([member(0), member(2), member(3)], 5)
    assert (found.step, found.sources, found.donor) == (7, (0, 1, 1, 2), 0)
    assert [found.slices_of(rank) for rank in range(3)] == [[0], [1, 2], [3]]
    last = survived([NEW, member(2), member(0), member(1)], 5)
    assert (last.sources, last.donor, last.givers) == ((2, 3, 1, 2), 1, [1, 2, 3])


def test_the_newest_step_counts_which_others_can_reach() -> None:
    """One that nobody has applied is done again."""
    found = survived([member(0, 7, in_doubt=8), member(1, 8), member(2, 8)], 5)
    assert (found.step, found.sources, found.donor) == (8, (0, 1, 2, 0), 1)
    assert found.holders == {0, 1, 2}
    found = survived([member(0, 7, in_doubt=8), member(1, 7), member(3, 7, in_doubt=8)], 5)
    assert found.step == 7


def test_what_was_divided_before_the_latest_time_does_not_count() -> None:
    members = [member(0, size=2, at=4), member(1, size=2, at=4), member(2)]
    found = survived(members, 5)
    assert (sorted(found.holders), found.sources) == ([0, 1], (0, 1))
    with pytest.raises(SoleCopyLostError, match="slice 0 of 3"):
        survival_of([member(2, size=3, at=4), member(1), member(2)], 5)
    # One that has joined first has no slices for the others.
    members = [member(3, size=4, at=4), *(member(rank, size=3) for rank in range(3))]
    found = survived(members, 5)
    assert (found.membership, found.sources, found.holders) == (3, (1, 2, 3), frozenset({1, 2, 3}))


def test_while_a_state_is_divided_anew_the_division_before_counts_until_all_have_theirs() -> None:
    """Of four, one is gone; the first of the three that are left has its new slices."""
    first = kept(member(0, size=3, at=4), [0, 3])
    found = survived([first, member(2), member(3), NEW], 5)
    assert (found.membership, found.step, found.sources) == (3, 7, (0, 1, 1, 2))
    assert (found.donor, found.holders, found.keepers) == (1, frozenset({1, 2}), frozenset({0}))
    others = [kept(member(rank, size=3, at=4), [rank + 1, rank]) for rank in (1, 2)]
    all_done = survived([first, *others, NEW], 5)
    assert (all_done.membership, all_done.sources, all_done.keepers) == (4, (0, 1, 2), frozenset())
    beyond = [member(rank, 8, size=3, at=4) for rank in (1, 2)]
    with pytest.raises(SoleCopyLostError, match="slice 0 of 3"):
        survival_of([NEW, *beyond[1:], member(3)], 5)


def test_who_has_divided_anew_gives_the_rest_where_no_other_is_at_the_step() -> None:
    members = [kept(member(0, size=3, at=4), [0, 3, 2]), member(1, 6, in_doubt=7), NEW]
    found = survived(members, 5)
    assert (found.step, found.donor, found.sources) == (7, 0, (1, 1, 0, 0))
    assert (found.grad_norm, found.is_finite) == (2.5, True)


def test_sums_come_from_one_that_has_not_finished_the_step_late() -> None:
    members = [member(0), member(1), member(3)]
    members[0].slices.is_late = True
    found = survived(members, 5)
    assert found.donor == 1
    with_a_keeper = [members[0], members[2], kept(member(0, size=3, at=4), [1, 0])]
    with_a_keeper[1].slices.is_late = True
    found = survived(with_a_keeper, 5)
    assert (found.donor, found.sources) == (2, (0, 2, 1, 1))
    for each in members:
        each.slices.is_late = True
    found = survived(members, 5)
    assert found.donor == 0


def test_a_step_of_one_that_was_cut_off_is_done_again_where_no_other_can_reach_it() -> None:
    """Of five it alone had applied the step; two of the others have divided the one before anew."""
    members = [
        kept(member(0, size=4, at=4), [0, 4], size=5),
        member(1, 8, size=5),
        member(2, size=5),
        member(3, size=5),
        kept(member(3, size=4, at=4), [4, 3], size=5),
    ]
    found = survived(members, 5)
    assert (found.membership, found.step, found.donor) == (3, 7, 2)
    assert found.sources == (0, 2, 2, 3, 4)
    assert found.holders == {2, 3}


def test_nobody_has_anything_newer_than_the_base() -> None:
    """And neighbours that are gone take a slice with them, unless it is in the base."""
    assert survival_of([NEW, NEW], 0) is None
    assert survival_of([member(0, 4), NEW], 5) is None
    assert survival_of([member(0, 5), member(3, 5)], 5) is None
    with pytest.raises(SoleCopyLostError, match="no worker that is left holds slice 1 of 4"):
        survival_of([member(0), member(3)], 5)
