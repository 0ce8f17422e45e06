"""Whatever members do, a state is there with all of its leaves, or it is pulled as ever."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import LimitError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import MAX_ASKED, SMALL_BYTES, StateFolder, state_digest
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects.context import MAX_SIGNED, LeafSigning
from stratagem.coordinator.effects.direct_commit import written_by_members
from stratagem.coordinator.effects.execute import reads_by_itself
from stratagem.coordinator.updates.merge import ContradictionError
from stratagem.v1 import worker_pb2
from stratagem.worker.session.states import Frozen, freeze
from tests.coordinator.effects.leaf_writers import (
    Answer,
    LeafWriters,
    Messages,
    dying,
    honest,
    leaf_file,
    lying,
    meddling,
)


@cache
def state(rows: int = 4) -> Frozen:
    """Of `rows` leaves and one that small tensors share."""
    generator = torch.Generator().manual_seed(1)
    named = {f"t{n}": torch.randn(SMALL_BYTES // 4 + n, generator=generator) for n in range(rows)}
    return freeze({**named, "small": torch.ones(3)}, {"step": "3"})


def whole() -> Digest:
    return state_digest(replace(state().manifest, is_in_leaves=True), state().buffers)


async def lazy(folder: StateFolder, held: Frozen, header: worker_pb2.WriteLeavesHeader) -> Messages:
    """Ends well, with one leaf missing."""
    messages = [message async for message in honest(folder, held, header)]
    for message in messages[:-1]:
        yield message


async def cutting(
    folder: StateFolder, held: Frozen, header: worker_pb2.WriteLeavesHeader
) -> Messages:
    """Has less on the disk than it says, of one leaf."""
    async for message in honest(folder, held, header):
        if message.WhichOneof("message") == "leaf" and message.leaf.number == header.rank:
            path = leaf_file(folder, header, message)
            path.write_bytes(path.read_bytes()[:-1])
        yield message


def other(folder: StateFolder, held: Frozen, header: worker_pb2.WriteLeavesHeader) -> Messages:
    return honest(folder, state(5), header)


class Party(LeafWriters):
    """Members that have the same state and answer in some way each."""

    def __init__(self, root: Path, *answers: Answer, **capability: Any) -> None:
        super().__init__(root, [state()] * len(answers), answers, **capability)

    def note(self, member: Member, header: worker_pb2.WriteLeavesHeader) -> None:
        self.asked.append(f"{member.worker_id} {header.rank}/{header.num_ranks}")
        assert header.store_id == self.folder.store_id()

    async def written(self) -> Digest | None:
        found = await written_by_members(self.env, self.sessions(), 3)
        if found is None:
            return None
        assert found[1] == state().manifest
        with self.blobs.open(found[0]) as file:
            assert file.read().endswith(b"".join(state().buffers))
        assert await reads_by_itself(self.env.runs, self.blobs, self.members[0], found[0])
        return found[0]

    def has_claims(self) -> bool:
        return any(self.blobs.claims.is_under_way(path.name[65:]) for path in self.files())


@pytest.mark.parametrize("num_members", [1, 2, 3, 7])
async def test_any_number_of_members_writes_one_state(tmp_path: Path, num_members: int) -> None:
    party = Party(tmp_path, *[honest] * num_members)
    assert await party.written() == whole()
    assert len(party.asked) == num_members
    assert len(party.files()) == 5
    assert not party.has_claims()


@pytest.mark.parametrize("bad", [dying, lazy, meddling], ids=lambda each: each.__name__)
async def test_the_others_write_what_one_has_not(tmp_path: Path, bad: Answer) -> None:
    party = Party(tmp_path, honest, bad, honest)
    assert await party.written() == whole()
    assert party.asked == ["w0 0/3", "w1 1/3", "w2 2/3", "w0 0/2", "w2 1/2"]
    assert len(party.files()) == 5, "nothing is written twice"


# One leaf of all is read: the first one, or one of w1, which is honest.
@pytest.mark.parametrize(("bad", "choice"), [(lying, min), (cutting, max)])
async def test_what_a_liar_has_written_is_written_again_and_what_is_too_short_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Answer, choice: Any
) -> None:
    monkeypatch.setattr(secrets, "choice", choice)
    party = Party(tmp_path, bad, honest)
    assert await party.written() == whole()
    assert party.asked == ["w0 0/2", "w1 1/2", "w1 0/1"]


class SentCall:
    """What was written into a call."""

    def __init__(self) -> None:
        self.sent: list[worker_pb2.WriteLeavesRequest] = []
        self._cython_call = self

    async def send_serialized_message(self, raw: bytes) -> None:
        self.sent.append(worker_pb2.WriteLeavesRequest.FromString(raw))


async def test_requests_are_signed_within_limits() -> None:
    call = SentCall()
    digests = [Digest(f"{number:064x}") for number in range(MAX_ASKED + 1)]

    def sign(leaves: Sequence[Digest]) -> list[str]:
        return [f"https://store/{leaf}" for leaf in leaves]

    signing = LeafSigning(call, worker_pb2.WriteLeavesRequest, sign)
    for _ in range(MAX_SIGNED):
        await signing.answer([7, 3], digests[:2])
    signed = [(each.number, each.url) for each in call.sent[-1].signed.requests]
    assert signed == [(7, f"https://store/{digests[0]}"), (3, f"https://store/{digests[1]}")]
    with pytest.raises(LimitError, match="at most 64 leaves in a message, and each 16 times"):
        await signing.answer([3], digests[:1])
    with pytest.raises(LimitError, match="asked"):
        await signing.answer([*range(100, 101 + MAX_ASKED)], digests)
    assert len(call.sent) == MAX_SIGNED


async def test_where_nobody_can_write_it_is_pulled(tmp_path: Path) -> None:
    party = Party(tmp_path, dying, dying)
    assert await party.written() is None
    assert party.asked[:2] == ["w0 0/2", "w1 1/2"]
    assert not party.has_claims()
    party.blobs.collect((), 0.0)
    assert party.files() == []


@pytest.mark.parametrize("capability", [{"writes_states": False}, {"data_plane": "tls"}], ids=str)
async def test_only_those_are_asked_that_may(tmp_path: Path, capability: dict[str, Any]) -> None:
    party = Party(tmp_path, honest, **capability)
    assert await party.written() is None
    assert party.asked == []
    assert not await reads_by_itself(
        party.env.runs, party.blobs, party.members[0], Digest("0" * 64)
    )


async def test_members_with_other_tensors_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ContradictionError, match="has other tensors than other members"):
        await Party(tmp_path, honest, other).written()
