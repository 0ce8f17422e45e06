"""Whoever holds which part of a state, its leaves are there without a byte through the
coordinator, or it is pulled as ever."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from stratagem.common.base.errors import UnavailableError
from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.tensors.leaves import SMALL_BYTES, StateFolder, state_digest
from stratagem.common.tensors.manifest import Purpose
from stratagem.common.tensors.same_bytes import SliceName
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.coordinator.core.facts import Capability, Member
from stratagem.coordinator.effects.direct_commit import written_by_owners
from stratagem.coordinator.effects.snapshot import PartHolder
from stratagem.coordinator.updates.merge import ContradictionError
from stratagem.v1 import worker_pb2
from stratagem.worker.session.states import Frozen, freeze
from tests.coordinator.effects.leaf_writers import (
    Answer,
    LeafWriters,
    Messages,
    dying,
    honest,
    lying,
    meddling,
)
from tests.worker.session.piece_server import serving, written

NUMEL = SMALL_BYTES // 4 + 65_537  # a leaf of its own
GENERATOR = torch.Generator().manual_seed(1)
MODEL = {name: torch.randn(NUMEL, generator=GENERATOR) for name in ("model/a", "model/b")}
MOMENTS = {
    f"optimizer/{name}/exp_avg": torch.randn(NUMEL, generator=GENERATOR) for name in ("a", "b")
}
WHOLE = {**MODEL, **MOMENTS}
METADATA = {"format": "1", "step": "3"}
UNDIVIDED, BUFFERS = manifest_of(WHOLE, Purpose.STATE, metadata=METADATA)
DATA = b"".join(BUFFERS)
DIGEST = state_digest(replace(UNDIVIDED, is_in_leaves=True), BUFFERS)


def parts(num: int) -> list[Frozen]:
    """Slices that end at multiples of 65,536 elements, where that many are left."""
    ends = [min(NUMEL, -(-NUMEL * n // num) // 65_536 * 65_536) for n in range(num)] + [NUMEL]
    found = []
    for rank in range(num):
        named = dict(MODEL) if rank == 0 else {}
        for number, (name, whole) in enumerate(MOMENTS.items()):
            piece = whole[ends[rank] : ends[rank + 1]].clone()
            if len(piece):
                named[str(SliceName(number, 0, ends[rank], name))] = piece
        found.append(freeze(named, METADATA))
    return found


async def readable(
    folder: StateFolder, state: Frozen, header: worker_pb2.WriteLeavesHeader
) -> Messages:
    """Cannot write."""
    if not header.describe:
        raise UnavailableError("the disk is full")
    async for message in written(folder, state, header):
        yield message


async def blind(
    folder: StateFolder, state: Frozen, header: worker_pb2.WriteLeavesHeader
) -> Messages:
    """Describes nothing."""
    raise UnavailableError("this worker has no --state-folder")
    yield


class Owners(LeafWriters):
    """Members that hold a part each and answer in some way."""

    def __init__(self, root: Path, held: Sequence[Frozen], answers: Sequence[Answer]) -> None:
        self._held, self._addresses = held, list[str]()
        super().__init__(root, held, answers, lambda number: self._addresses[number])

    def note(self, member: Member, header: worker_pb2.WriteLeavesHeader) -> None:
        if not header.describe:
            super().note(member, header)

    async def written(self, holders: list[list[int]] | None = None) -> Digest | None:
        """holders: by part, the members that have it; unless given, one each. Those with a mirror
        of it have numbers from 100 on."""
        sessions = self.sessions()
        by_part = holders or [[rank] for rank in range(len(sessions))]
        held = [
            [PartHolder(sessions[number % 100], of_mirror=number >= 100) for number in part]
            for part in by_part
        ]
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(serving(state)) for state in self._held]
            self._addresses = [address for address, _ in servers]
            found = await written_by_owners(self.env, held, 3)
        if found is None:
            return None
        assert found[1] == UNDIVIDED.total_bytes
        with self.blobs.open(found[0]) as file:
            assert file.read().endswith(DATA)
        return found[0]


@pytest.mark.parametrize("num", [1, 2, 3, 7])
async def test_any_number_of_owners_writes_one_state(tmp_path: Path, num: int) -> None:
    owners = Owners(tmp_path, parts(num), [honest] * num)
    assert await owners.written() == DIGEST
    assert len(owners.files()) == 4
    assert len(owners.asked) == min(num, 4)


async def test_any_holder_of_a_part_will_do(tmp_path: Path) -> None:
    """Stages that two replicas have; of one of them nothing is to be had."""
    first, second = parts(2)
    held, answers = [first, first, second, second], [blind, honest, honest, honest]
    owners = Owners(tmp_path, held, answers)
    assert await owners.written([[0, 1], [2, 3]]) == DIGEST
    assert sorted(owners.asked) == ["w1", "w2", "w3"]


def with_mirrors(held: list[Frozen]) -> list[Frozen]:
    copies = [Frozen(each.manifest, each.buffers) for each in held]
    return [replace(each, mirror=copies[rank - 1]) for rank, each in enumerate(held)]


MIRRORED = [[0, 101], [1, 102], [2, 100]]


@pytest.mark.parametrize("gone", [[], [0], [1], [2], [0, 1]])
async def test_a_mirror_stands_in_for_its_owner_but_not_for_two_neighbours(
    tmp_path: Path, gone: list[int]
) -> None:
    answers = [blind if rank in gone else honest for rank in range(3)]
    owners = Owners(tmp_path, with_mirrors(parts(3)), answers)
    written = await owners.written(MIRRORED)
    if len(gone) == 2:
        assert written is None
        return
    assert written == DIGEST
    assert sorted({*owners.asked}) == [f"w{rank}" for rank in range(3) if rank not in gone]


async def test_a_mirror_with_other_tensors_is_left_out(tmp_path: Path) -> None:
    held = with_mirrors(parts(3))
    held[1] = replace(held[1], mirror=parts(3)[2])
    owners = Owners(tmp_path, held, [honest] * 3)
    assert await owners.written(MIRRORED) == DIGEST
    owners = Owners(tmp_path / "gone", held, [blind, honest, honest])
    with pytest.raises(ContradictionError):
        await owners.written(MIRRORED)


@pytest.mark.parametrize("bad", [readable, dying, meddling], ids=lambda each: each.__name__)
async def test_the_others_write_what_one_has_not(tmp_path: Path, bad: Answer) -> None:
    """And have what it holds from it."""
    owners = Owners(tmp_path, parts(3), [honest, bad, honest])
    assert await owners.written() == DIGEST
    assert owners.asked[:3] == ["w0", "w1", "w2"]
    assert "w1" not in owners.asked[3:]
    assert len(owners.files()) == 4, "nothing is written twice"


async def test_what_a_liar_has_written_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "choice", min)  # one leaf of all is read
    owners = Owners(tmp_path, parts(2), [lying, honest])
    assert await owners.written() == DIGEST
    assert owners.asked == ["w0", "w1", "w1"]


@pytest.mark.parametrize(
    "answers", [[honest, blind], [readable, readable]], ids=["a part is missing", "none writes"]
)
async def test_where_it_cannot_be_written_it_is_pulled(
    tmp_path: Path, answers: list[Answer]
) -> None:
    owners = Owners(tmp_path, parts(2), answers)
    assert await owners.written() is None
    owners.blobs.collect((), 0.0)
    assert owners.files() == []


async def test_a_member_that_may_not_see_the_folder_is_not_asked(tmp_path: Path) -> None:
    owners = Owners(tmp_path, parts(2), [honest, honest])
    record = owners.env.runs.state.workers[WorkerId("w1")]
    cast(Any, record).capability = Capability(writes_states=True, data_plane="tls")
    assert await owners.written() is None
    assert owners.asked == []


async def test_parts_that_make_no_whole_contradict_each_other(tmp_path: Path) -> None:
    first, _, last = parts(3)
    with pytest.raises(ContradictionError, match="a slice of"):
        await Owners(tmp_path, [first, last], [honest, honest]).written()
