"""A worker writes and reads leaves by requests that it has to ask for."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    LimitError,
    UnavailableError,
)
from stratagem.common.base.ids import Digest
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.common.tensors.leaves import leaves_of, list_bytes, pieces_of
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, from_proto
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host import states
from stratagem.worker.host.blobs import ReceivedBlobs
from stratagem.worker.host.states import SignedStream, fetch_state, received_list
from stratagem.worker.session.leaves import NUM_ATTEMPTS, ObjectSink, write_leaves
from stratagem.worker.session.states import Frozen, freeze

IDLE_S = 30.0
SHORT_S = 0.1


def state(num: int = 5) -> Frozen:
    """Of `num` large leaves and one that small tensors share."""
    generator = torch.Generator().manual_seed(1)
    named = {f"t{n}": torch.randn(300_000 + n, generator=generator) for n in range(num)}
    return freeze({**named, "small": torch.ones(3), "count": torch.tensor(3)}, {"step": "3"})


def contents_of(frozen: Frozen) -> list[bytes]:
    leaves = leaves_of(frozen.manifest)
    return [b"".join(pieces_of(each, frozen.manifest, frozen.buffers)) for each in leaves]


class Store:
    """An object store that carries out requests as told."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.num_refused: dict[str, int] = {}
        """How many of the next requests about an object are refused."""
        self.before: Callable[[], None] = lambda: None

    def _ask(self, url: str) -> None:
        self.before()
        if self.num_refused.get(url, 0):
            self.num_refused[url] -= 1
            raise UnavailableError("the object store answers 403: AccessDenied")

    def put(
        self,
        url: str,
        pieces: Iterable[memoryview],
        num_bytes: int,
        on_half: Callable[[], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._ask(url)
        self.objects[url] = b"".join(pieces)
        assert len(self.objects[url]) == num_bytes
        on_half()
        assert callable(is_cancelled)

    def get(self, url: str, num_bytes: int) -> memoryview:
        self._ask(url)
        assert len(self.objects[url]) == num_bytes
        return memoryview(self.objects[url])

    @property
    def carried(self) -> SignedObjects:
        return cast(SignedObjects, self)


class Signer:
    """The coordinator's side of a call: signs what it is asked for."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._due: asyncio.Queue[Any] = asyncio.Queue()
        self.asked: list[list[int]] = []

    def take(self, asked: pb.AskedLeaves) -> None:
        self.asked.append([leaf.number for leaf in asked.leaves])
        requests = [
            pb.SignedRequest(number=leaf.number, url=leaf.digest.hex() or str(leaf.number))
            for leaf in asked.leaves
        ]
        self.send(self._make(signed=pb.SignedRequests(requests=requests)))

    def send(self, message: Any) -> None:
        self._due.put_nowait(message)

    async def requests(self) -> AsyncIterator[Any]:
        while (message := await self._due.get()) is not None:
            yield message


async def put(
    store: Store,
    frozen: Frozen,
    rank: int = 0,
    num_ranks: int = 1,
    have: Iterable[str] = (),
    signer: Signer | None = None,
) -> list[pb.WrittenLeaf]:
    header = pb.WriteLeavesHeader(rank=rank, num_ranks=num_ranks)
    header.have.extend(bytes.fromhex(each) for each in have)
    signer = signer or Signer(pb.WriteLeavesRequest)
    stream = SignedStream(signer.requests(), pb.WriteLeavesResponse, IDLE_S)
    written = []
    work = write_leaves(stream, ObjectSink(stream, store.carried), frozen, header)
    async with aclosing(stream.responses(work)) as responses:
        first = await anext(responses)
        assert from_proto(first.manifest) == frozen.manifest
        async for response in responses:
            match response.WhichOneof("message"):
                case "asked":
                    signer.take(response.asked)
                case "leaf":
                    written.append(response.leaf)
    return written


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
async def test_shares_make_the_whole(num_ranks: int) -> None:
    store, frozen, told = Store(), state(), dict[int, str]()
    for rank in range(num_ranks):
        for leaf in await put(store, frozen, rank, num_ranks):
            assert leaf.number % num_ranks == rank
            assert leaf.written
            told[leaf.number] = leaf.digest.hex()
    contents = contents_of(frozen)
    assert [store.objects[told[number]] for number in range(6)] == contents
    assert len(store.objects) == 6
    assert told == {n: hashlib.sha256(each).hexdigest() for n, each in enumerate(contents)}


async def test_what_is_there_is_not_asked_for() -> None:
    frozen = state()
    have = [hashlib.sha256(each).hexdigest() for each in contents_of(frozen)[:4]]
    signer, store = Signer(pb.WriteLeavesRequest), Store()
    written = await put(store, frozen, have=have, signer=signer)
    assert {leaf.number: leaf.written for leaf in written} == {n: n > 3 for n in range(6)}
    assert sorted(number for each in signer.asked for number in each) == [4, 5]
    assert len(store.objects) == 2


async def test_what_is_refused_is_asked_for_again_and_not_for_ever() -> None:
    store, frozen = Store(), state(1)
    first, second = (hashlib.sha256(each).hexdigest() for each in contents_of(frozen))
    store.num_refused = {first: NUM_ATTEMPTS - 1, second: 1}
    signer = Signer(pb.WriteLeavesRequest)
    assert len(await put(store, frozen, signer=signer)) == 2
    assert sorted(number for each in signer.asked for number in each) == [0, 0, 0, 1, 1]
    store.num_refused = {first: NUM_ATTEMPTS}
    with pytest.raises(UnavailableError, match="403: AccessDenied"):
        await put(store, frozen)


async def test_many_leaves_are_asked_for_in_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_ASKED", 3)
    signer = Signer(pb.WriteLeavesRequest)
    stream = SignedStream(signer.requests(), pb.WriteLeavesResponse, IDLE_S)

    async def work() -> None:
        urls = await asyncio.gather(*(stream.url(number, bytes([number])) for number in range(7)))
        assert urls == [f"{number:02x}" for number in range(7)]

    async with aclosing(stream.responses(work())) as responses:
        async for response in responses:
            signer.take(response.asked)
    assert signer.asked == [[0, 1, 2], [3, 4, 5], [6]]


async def test_a_coordinator_that_signs_nothing_more_ends_the_share() -> None:
    signer = Signer(pb.WriteLeavesRequest)
    signer.send(None)
    with pytest.raises(UnavailableError, match="signs nothing more"):
        await put(Store(), state(), signer=signer)
    silent = SignedStream(Signer(pb.WriteLeavesRequest).requests(), pb.WriteLeavesResponse, SHORT_S)
    with pytest.raises(UnavailableError, match=r"has signed nothing for 0\.1 s"):
        await silent.url(0)
    signer = Signer(pb.WriteLeavesRequest)
    signer.send(pb.WriteLeavesRequest(header=pb.WriteLeavesHeader()))
    with pytest.raises(InvalidInputError, match="signed requests must follow"):
        await put(Store(), state(), signer=signer)


async def test_nothing_reads_the_snapshot_once_the_call_has_ended() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    store = Store()

    def slow() -> None:
        begun.set()
        may_end.wait()
        ended.set()

    store.before = slow
    task = asyncio.create_task(put(store, state(1)))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


class Stored:
    """A state in leaves in a store, and the call by which a worker is to read it."""

    def __init__(self, frozen: Frozen) -> None:
        self.frozen, self.store = frozen, Store()
        contents = contents_of(frozen)
        self.store.objects = {str(number): each for number, each in enumerate(contents)}
        digests = [Digest(hashlib.sha256(each).hexdigest()) for each in contents]
        self.content = list_bytes(frozen.manifest, digests)
        self.digest = hashlib.sha256(self.content).hexdigest()
        self.signer = Signer(pb.FetchStateRequest)

    async def read(self, blobs: ReceivedBlobs, **changes: Any) -> bool:
        header = pb.FetchStateHeader(run_id="run", digest=self.digest, list_bytes=len(self.content))
        for name, value in changes.items():
            setattr(header, name, value)
        for start in range(0, len(self.content), 100):
            self.signer.send(pb.FetchStateRequest(list=self.content[start : start + 100]))
        requests = self.signer.requests()
        listed = await received_list(requests, header, DEFAULT_LIMITS, IDLE_S)
        stream = SignedStream(requests, pb.FetchStateResponse, IDLE_S)
        is_committed = False
        work = fetch_state(stream, self.store.carried, blobs, header, listed)
        async with aclosing(stream.responses(work)) as responses:
            async for response in responses:
                if response.WhichOneof("message") == "asked":
                    self.signer.take(response.asked)
                is_committed |= response.committed
        return is_committed


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("num", [0, 1, 7])
async def test_a_state_is_read(tmp_path: Path, in_memory: bool, num: int) -> None:
    stored, blobs = Stored(state(num)), ReceivedBlobs(tmp_path, 2**30 if in_memory else 0)
    stored.store.num_refused = {"0": NUM_ATTEMPTS - 1}
    assert await stored.read(blobs)
    blob = blobs.find("run", stored.digest)
    assert blob is not None
    tensors, metadata = blob.load()
    assert metadata == {"step": "3"}
    found = [tensors[spec.name].numpy().tobytes() for spec in stored.frozen.manifest.stored()]
    assert found == [bytes(buffer) for buffer in stored.frozen.buffers]
    blobs.clear()


async def test_other_bytes_are_no_state_and_other_lists_no_lists() -> None:
    stored, blobs = Stored(state()), ReceivedBlobs(None, 2**30)
    stored.store.objects["2"] = stored.store.objects["2"][:-1] + b"?"
    with pytest.raises(IntegrityError, match="has other bytes than were written"):
        await stored.read(blobs)
    assert blobs.find("run", stored.digest) is None
    assert blobs.memory_bytes == 0, "nothing is left of it, so it may come as a stream"
    with pytest.raises(LimitError, match=r"header\.list_bytes: 1099511627776, the limit is"):
        await Stored(state()).read(blobs, list_bytes=2**40)
    with pytest.raises(IntegrityError, match="has another digest"):
        await Stored(state()).read(blobs, digest="0" * 64)
    stored = Stored(state())
    stored.signer.send(pb.FetchStateRequest(signed=pb.SignedRequests()))
    with pytest.raises(InvalidInputError, match="the whole list must follow"):
        await stored.read(blobs)
