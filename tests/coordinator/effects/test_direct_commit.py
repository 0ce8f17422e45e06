"""Whatever members do, a state is there with all of its leaves, or it is pulled as ever."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import LimitError, UnavailableError
from stratagem.common.base.ids import Digest, RunId
from stratagem.common.files.state_folder import StateFolder
from stratagem.common.tensors.manifest import DEFAULT_LIMITS
from stratagem.coordinator.core.facts import ROOT
from stratagem.coordinator.effects.execution.leaf_signing import (
    MAX_ASKED,
    MAX_SIGNED,
    LeafSigning,
)
from stratagem.coordinator.effects.execution.state_writing import reads_by_itself
from stratagem.coordinator.effects.synchronous.direct_commit import written_by_members
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.store.blobs.directory_blobs import DirectoryBlobs
from stratagem.coordinator.store.leaves.leaf_blobs import LeafBlobs
from stratagem.coordinator.store.leaves.state_places import in_folder
from stratagem.coordinator.updates.members.merge_parts import ContradictionError
from stratagem.v1 import worker_pb2
from stratagem.worker.session.session_states import Frozen, freeze
from stratagem.worker.session.written_leaves import written_leaves
from tests.coordinator.effects.leaf_writers import LeafWriters, Messages, lied

Answer = Callable[[StateFolder, worker_pb2.WriteLeavesRequest], Messages]


def state(rows: int = 4) -> Frozen:
    """Of `rows` leaves and one that small tensors share."""
    generator = torch.Generator().manual_seed(1)
    named = {f"t{n}": torch.randn(300_000 + n, generator=generator) for n in range(rows)}
    return freeze({**named, "small": torch.ones(3)}, {"step": "3"})


def honest(folder: StateFolder, request: worker_pb2.WriteLeavesRequest) -> Messages:
    return written_leaves(folder, state(), request)


async def dying(folder: StateFolder, request: worker_pb2.WriteLeavesRequest) -> Messages:
    """After the first leaf; what it is writing then is there before its call ends."""
    num = 0
    async with aclosing(written_leaves(folder, state(), request)) as messages:
        async for message in messages:
            yield message
            num += 1
            if num == 2:
                raise UnavailableError("gone")


async def lazy(folder: StateFolder, request: worker_pb2.WriteLeavesRequest) -> Messages:
    """Ends well, with one leaf missing."""
    messages = [message async for message in honest(folder, request)]
    for message in messages[:-1]:
        yield message


def lying(folder: StateFolder, request: worker_pb2.WriteLeavesRequest) -> Messages:
    """Has other bytes on the disk than it says."""
    return lied(folder, request, honest(folder, request))


async def cutting(folder: StateFolder, request: worker_pb2.WriteLeavesRequest) -> Messages:
    """Has less on the disk than it says, of one leaf."""
    async for message in honest(folder, request):
        if message.WhichOneof("message") == "leaf" and message.leaf.number == request.rank:
            digest = message.leaf.digest.hex()
            path = folder.leaves / digest[:2] / f"{digest}-{request.upload}"
            path.write_bytes(path.read_bytes()[:-1])
        yield message


async def meddling(folder: StateFolder, request: worker_pb2.WriteLeavesRequest) -> Messages:
    """Says what it was not asked."""
    async for message in honest(folder, request):
        message.leaf.number += 1
        yield message


def other(folder: StateFolder, request: worker_pb2.WriteLeavesRequest) -> Messages:
    return written_leaves(folder, state(5), request)


class Party(LeafWriters):
    """Members that answer in some way each."""

    def __init__(self, root: Path, *answers: Answer, **capability: Any) -> None:
        self.asked: list[str] = []

        def answer(number: int, request: worker_pb2.WriteLeavesRequest) -> Messages:
            name = self.members[number].worker_id
            self.asked.append(f"{name} {request.rank}/{request.num_ranks}")
            assert request.store_id == self.folder.store_id()
            return answers[number](self.folder, request)

        super().__init__(root, len(answers), answer, **capability)

    async def written(self) -> Digest | None:
        sessions = [WorkerSession(m, RunId("r"), ROOT, 1) for m in self.members]
        found = await written_by_members(self.env, sessions, 3)
        if found is None:
            return None
        assert found[1] == state().manifest
        with self.blobs.open(found[0]) as file:
            assert file.read().endswith(b"".join(state().buffers))
        return found[0]

    def has_claims(self) -> bool:
        return any(self.blobs.claims.is_under_way(path.name[65:]) for path in self.files())


@pytest.mark.parametrize("num_members", [1, 2, 3, 7])
async def test_any_number_of_members_writes_one_state(tmp_path: Path, num_members: int) -> None:
    alone = await Party(tmp_path / "alone", honest).written()
    party = Party(tmp_path / "party", *[honest] * num_members)
    assert await party.written() == alone is not None
    assert len(party.asked) == num_members
    assert len(party.files()) == 5
    assert not party.has_claims()


@pytest.mark.parametrize("bad", [dying, lazy, meddling], ids=lambda each: each.__name__)
async def test_the_others_write_what_one_has_not(tmp_path: Path, bad: Answer) -> None:
    expected = await Party(tmp_path / "alone", honest).written()
    party = Party(tmp_path / "party", honest, bad, honest)
    assert await party.written() == expected
    assert party.asked == ["w0 0/3", "w1 1/3", "w2 2/3", "w0 0/2", "w2 1/2"]
    assert len(party.files()) == 5, "nothing is written twice"


async def test_what_a_liar_has_written_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "choice", min)  # one leaf of all is read
    expected = await Party(tmp_path / "alone", honest).written()
    party = Party(tmp_path / "party", lying, honest)
    assert await party.written() == expected
    assert party.asked == ["w0 0/2", "w1 1/2", "w1 0/1"]


async def test_what_is_too_short_is_found_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "choice", max)  # of w1, which is honest
    expected = await Party(tmp_path / "alone", honest).written()
    party = Party(tmp_path / "party", cutting, honest)
    assert await party.written() == expected
    assert party.asked == ["w0 0/2", "w1 1/2", "w1 0/1"]


class SentCall:
    """What was written into a call."""

    def __init__(self) -> None:
        self.sent: list[worker_pb2.PutLeavesRequest] = []
        self._cython_call = self

    async def send_serialized_message(self, raw: bytes) -> None:
        self.sent.append(worker_pb2.PutLeavesRequest.FromString(raw))


async def test_requests_are_signed_within_limits() -> None:
    call = SentCall()
    digests = [Digest(f"{number:064x}") for number in range(MAX_ASKED + 1)]

    def sign(leaves: Sequence[Digest]) -> list[str]:
        return [f"https://store/{leaf}" for leaf in leaves]

    signing = LeafSigning(call, worker_pb2.PutLeavesRequest, sign)
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
    assert not await reads_by_itself(party.env, party.members[0], Digest("0" * 64))


async def test_members_with_other_tensors_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ContradictionError, match="has other tensors than other members"):
        await Party(tmp_path, honest, other).written()


async def test_a_state_in_leaves_is_read_by_those_that_see_it(tmp_path: Path) -> None:
    party = Party(tmp_path, honest)
    digest = await party.written()
    assert digest is not None
    assert await reads_by_itself(party.env, party.members[0], digest)
    assert not await reads_by_itself(party.env, party.members[0], Digest("0" * 64))


def test_a_coordinator_that_writes_files_reads_leaves(tmp_path: Path) -> None:
    manifest, data = state().manifest, b"".join(state().buffers)
    digests: Sequence[Digest] = []
    for term, writes_leaves in enumerate((True, False), 1):
        whole = DirectoryBlobs(tmp_path / "blobs")
        blobs = LeafBlobs(
            whole,
            in_folder(tmp_path / "states"),
            term,
            writes_leaves=writes_leaves,
            limits=DEFAULT_LIMITS,
        )
        if writes_leaves:
            writer = blobs.state_writer(manifest, ())
            writer.write(data)
            digests = [writer.commit()]
        with blobs.open(digests[0]) as file:
            assert file.read().endswith(data)
