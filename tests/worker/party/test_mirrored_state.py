"""Which members can go on from which slices, and with which step."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stratagem.common.base.errors import SoleCopyLostError
from stratagem.v1.coordinator_pb2 import HeldSlices, RendezvousMember
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.party import mirrored_state
from stratagem.worker.party.mirrored_state import survival_of


def member(
    rank: int, step: int = 7, *, size: int = 4, at: int = 3, in_doubt: int | None = None
) -> RendezvousMember:
    slices = HeldSlices(rank=rank, size=size, membership=at, step_in_doubt=in_doubt)
    return RendezvousMember(applied_step=step, slices=slices)


NEW = RendezvousMember()


def test_each_slice_comes_from_its_owner_or_from_the_one_after_it() -> None:
    found = survival_of([member(0), member(2), member(3)], 5)
    assert found is not None
    assert (found.step, found.sources, found.donor) == (7, (0, 1, 1, 2), 0)
    assert [found.slices_of(rank) for rank in range(3)] == [[0], [1, 2], [3]]
    last = survival_of([NEW, member(2), member(0), member(1)], 5)
    assert last is not None
    assert (last.sources, last.donor, last.givers) == ((2, 3, 1, 2), 1, [1, 2, 3])


def test_the_newest_step_counts_which_others_can_reach() -> None:
    found = survival_of([member(0, 7, in_doubt=8), member(1, 8), member(2, 8)], 5)
    assert found is not None
    assert (found.step, found.sources, found.donor) == (8, (0, 1, 2, 0), 1)
    assert found.holders == {0, 1, 2}


def test_a_step_that_nobody_has_applied_is_done_again() -> None:
    found = survival_of([member(0, 7, in_doubt=8), member(1, 7), member(3, 7, in_doubt=8)], 5)
    assert found is not None
    assert found.step == 7


def test_neighbours_that_are_gone_take_a_slice_with_them() -> None:
    with pytest.raises(SoleCopyLostError, match="no worker that is left holds slice 1 of 4"):
        survival_of([member(0), member(3)], 5)


def test_what_was_divided_before_the_latest_time_does_not_count() -> None:
    members = [member(0, size=2, at=4), member(1, size=2, at=4), member(2)]
    found = survival_of(members, 5)
    assert found is not None
    assert (sorted(found.holders), found.sources) == ([0, 1], (0, 1))
    with pytest.raises(SoleCopyLostError, match="slice 0 of 3"):
        survival_of([member(2, size=3, at=4), member(1), member(2)], 5)


def test_a_step_that_was_finished_late_counts_once_when_all_have_divided_without_its_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its member has failed to gather after it, and takes the sums of others, which hold it."""
    members = [member(0, 5, size=3), member(1, 5, size=3, at=4), member(2, 5, size=3, at=4)]
    survival = survival_of(members, 0)
    assert survival is not None
    assert survival.holders == {1, 2}
    taken: list[object] = []
    sums = SimpleNamespace(take=lambda _work, trainer: taken.append(trainer))
    monkeypatch.setattr(mirrored_state, "pull_live", lambda *_: ({}, {}))
    monkeypatch.setattr(mirrored_state, "load", lambda *_: "the trainer")
    monkeypatch.setattr(mirrored_state, "take_sums", lambda *_: sums)
    holding = SimpleNamespace(trainer=None, late=["the report of step 5"])
    work, view = (cast("Any", SimpleNamespace(holding=holding, rank=0)) for _ in range(2))
    mirrored_state._gathered(work, view, members, survival, StateShare(0, 3, True, True))
    assert taken == ["the trainer"]
    assert holding.late == []


def test_nobody_has_anything_newer_than_the_base() -> None:
    assert survival_of([NEW, NEW], 0) is None
    assert survival_of([member(0, 4), NEW], 5) is None
