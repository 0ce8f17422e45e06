"""Tensor streams over a real server that cuts, lies, and falls silent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any

import google_crc32c
import grpc
import pytest
import torch

from stratagem.common.base.errors import (
    ConflictError,
    IntegrityError,
    InvalidInputError,
    LimitError,
    OutOfRangeError,
    UnavailableError,
)
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.tensor_transfer import SMALL_CHUNK_BYTES, Retry, pull, push
from stratagem.common.tensors import local_files
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.local_files import Near, UnreadableFileError, place
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose, to_proto
from stratagem.common.tensors.stream import CHUNK_BYTES, Data
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.v1 import worker_pb2
from tests.common.rpc.rig import Store, fragile_wire, serving, stub_of
from tests.common.rpc.tensor_store import EAGER, Download, download, filled
from tests.common.tensors.strategies import make_tensor, same_bits
from tests.patience import PATIENCE_S, growing
from tests.programs import run

NUM_CHUNKS = 6
STATE_OF_TWO = {"x": torch.arange(7), "y": torch.zeros(2, 3)}


@cache
def state() -> dict[str, torch.Tensor]:
    return {
        "weight": make_tensor("float32", (NUM_CHUNKS * CHUNK_BYTES // 4 - 1000,), 1, "plain"),
        "bias": make_tensor("bfloat16", (123,), 2, "strided"),
        "steps": torch.tensor(17),
        "none": torch.zeros(0, 3),
    }


def header_of(manifest: Manifest, digest: str = "0" * 64) -> Any:
    header = worker_pb2.SetStateHeader(digest=digest, manifest=to_proto(manifest))
    return worker_pb2.SetStateRequest(header=header)


async def upload(port: int, named: dict[str, torch.Tensor], digest: str = "", **kw: Any) -> str:
    manifest, buffers = manifest_of(named, Purpose.STATE)
    digest = digest or blob_digest(manifest, buffers)
    header = header_of(manifest, digest)
    async with open_channel(f"127.0.0.1:{port}", own_connection=True) as channel:
        await push(stub_of(channel).SetState, header, manifest, buffers, retry=EAGER, **kw)
    return digest


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert set(left) == set(right)
    assert all(same_bits(left[name], right[name]) for name in left)


@pytest.mark.parametrize("named", [state(), {}, {"empty": torch.zeros(0)}], ids=["6MB", "0", "0x"])
async def test_download_and_upload(named: dict[str, torch.Tensor]) -> None:
    """In chunks, and a copy in their place for who is near."""
    store, taken = filled(Store(), named), Taken()
    async with serving(store) as port:
        received, _ = await download(port, purpose=Purpose.STATE)
        assert_same(received, named)
        digest = await upload(port, named)
        store.offsets = []
        target = await download_near(port, taken)
    assert store.committed[digest] == taken.data == b"".join(store.buffers)
    assert (target.accepted, store.offsets) == (1, [0])


async def test_download_and_upload_resume_where_the_server_broke_off() -> None:
    store = filled(Store(), state())
    store.cut_after = [3, 1, 1, 2]  # the middle ones make no progress
    async with serving(store) as port:
        received, target = await download(port)
    assert_same(received, state())
    assert target.accepted == 1
    two = 4 * SMALL_CHUNK_BYTES
    assert store.offsets == [0] + [two] * 3 + [two + SMALL_CHUNK_BYTES]
    store = Store()
    store.cut_after = [2, 0, 3]
    async with serving(store) as port:
        digest = await upload(port, state())
    assert digest in store.committed
    assert store.offsets == [0, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES, 5 * CHUNK_BYTES]


async def test_download_and_upload_survive_a_cut_connection() -> None:
    store = filled(Store(), state())
    async with serving(store) as far, fragile_wire(far, [2_500_000] * 2) as (wire, port):
        received, _ = await download(port)
        assert wire.num_connections == 3
        # What arrives together with the cut may be lost with it.
        assert 0 < store.offsets[1] <= store.offsets[2]
        wire.budgets, store.offsets = [2_500_000] * 2, []
        digest = await upload(port, state())
        assert wire.num_connections == 6
        assert 0 < store.offsets[1] <= store.offsets[2]
    assert_same(received, state())
    assert digest in store.committed


async def test_a_chunk_that_never_arrives_whole_comes_in_small_ones() -> None:
    """Each connection carries a seventh of a chunk, as a slow one does until the peer gives up."""
    share = CHUNK_BYTES // 7
    named = {"x": torch.arange(CHUNK_BYTES // 2)}
    store = filled(Store(), named)
    async with serving(store) as far, fragile_wire(far, [share] * 100) as (wire, port):
        # A connection that is cut may take with it what has arrived and was not read yet.
        patient = Retry(max_attempts=50, first_pause_s=0.001, max_pause_s=0.01)
        received, _ = await download(port, retry=patient)
        assert wire.num_connections > 7
    assert_same(received, named)


class Narrow(Store):
    """Is silent to a sender once a chunk comes that takes too long, as one that is not whole
    does."""

    async def SetState(self, request_iterator: AsyncIterator[Any], context: Any) -> Any:
        async def narrowed() -> AsyncIterator[Any]:
            async for request in request_iterator:
                if len(request.chunk.data) > CHUNK_BYTES // 7:
                    raise TimeoutError("the peer was silent for 30 s")
                yield request

        async for response in super().SetState(narrowed(), context):
            yield response


async def test_an_upload_that_was_too_slow_goes_on_in_small_chunks() -> None:
    store = Narrow()
    async with serving(store) as port:
        digest = await upload(port, state())
    assert digest in store.committed
    assert len(store.offsets) == 2


async def test_no_progress_gives_up_with_the_reason_and_a_wrong_digest_leaves_nothing() -> None:
    store = filled(Store(), state())
    async with serving(store) as port:
        store.cut_after = [2, 1, 1, 1, 1]
        with pytest.raises(UnavailableError, match="cut by the test"):
            await download(port)
        assert len(store.offsets) == 4
        store.cut_after = [0, 0, 0, 0]
        with pytest.raises(UnavailableError, match="cut by the test"):
            await upload(port, state())
        with pytest.raises(IntegrityError, match="announced"):
            await upload(port, state(), digest="0" * 64)
        assert not store.committed
        assert await upload(port, state()) in store.committed


async def test_download_that_lies_is_refused_at_the_offending_chunk() -> None:
    store = filled(Store(), state())

    def flip(message: Any) -> None:
        if message.chunk.offset == 3 * CHUNK_BYTES:
            message.chunk.crc32c ^= 1

    store.tamper = flip
    async with serving(store) as port:
        with pytest.raises(IntegrityError, match=f"chunk at {3 * CHUNK_BYTES}: wrong CRC32C"):
            await download(port)
        assert len(store.offsets) == 1  # not a cut: nothing is tried again
        store.tamper = lambda message: message.manifest.SetInParent()
        with pytest.raises(InvalidInputError, match="manifest stands where"):
            await download(port)


async def test_download_checks_limits_and_purpose_before_it_accepts_and_that_all_stays() -> None:
    store = filled(Store(), state())
    target = Download()
    async with serving(store) as port, open_channel(f"127.0.0.1:{port}") as channel:
        stub = stub_of(channel)

        def open_call(offset: int) -> Any:
            if 0 < offset < 2**40:
                filled(store, state() | {"more": torch.zeros(1)})
            return stub.GetState(worker_pb2.GetStateRequest(offset=offset))

        with pytest.raises(LimitError, match="total_bytes"):
            await pull(open_call, target.accept, limits=Limits(max_total_bytes=1000))
        with pytest.raises(InvalidInputError, match="UPDATE"):
            await pull(open_call, target.accept, purpose=Purpose.UPDATE)
        with pytest.raises(OutOfRangeError, match="beyond the end"):
            await pull(open_call, target.accept, offset=2**40)
        assert target.accepted == 0
        store.cut_after = [3]
        with pytest.raises(ConflictError, match="changed"):
            await pull(open_call, target.accept, retry=EAGER)


async def test_upload_that_lies_is_refused_at_the_offending_chunk() -> None:
    """A hand-made caller with plain stubs: no class of ours on its side."""
    named = state()
    manifest, buffers = manifest_of(named, Purpose.STATE)
    data = b"".join(buffers)
    store, header = Store(), header_of(manifest)
    good = worker_pb2.SetStateRequest()
    good.chunk.data = data[:1000]
    good.chunk.crc32c = google_crc32c.value(data[:1000])
    bad = worker_pb2.SetStateRequest()
    bad.chunk.MergeFrom(good.chunk)
    bad.chunk.offset, bad.chunk.crc32c = 1000, 7
    async with serving(store) as port, open_channel(f"127.0.0.1:{port}") as channel:
        call = stub_of(channel).SetState(iter([header, good, bad]))
        assert (await call.read()).resume_offset == 0
        with pytest.raises(Exception, match="chunk at 1000: wrong CRC32C") as raised:
            await call.read()
        assert raised.value.code().name == "DATA_LOSS"  # type: ignore[attr-defined]
        short = stub_of(channel).SetState(iter([header]))
        assert (await short.read()).resume_offset == 1000  # what was good before stays
        with pytest.raises(Exception, match="after 1000 of") as raised:
            await short.read()
        call = stub_of(channel).SetState(iter([good]))
        with pytest.raises(Exception, match="must be the header") as raised:
            await call.read()
        assert raised.value.code().name == "INVALID_ARGUMENT"  # type: ignore[attr-defined]


async def test_silent_server_is_left_and_tried_again() -> None:
    for timeout_s in growing(0.3):
        store = filled(Store(), state())
        store.silence_after = 3
        async with serving(store) as port:
            try:
                received, _ = await download(port, idle_timeout_s=timeout_s)
            except UnavailableError:  # a busy machine is silent, too, and again and again
                continue
            finally:
                store.silent.set()
        assert_same(received, state())
        assert store.offsets == sorted(store.offsets)
        if store.offsets[-1] > 0:  # what had come before the silence was heard in time
            return
    pytest.fail("nothing came in time")


async def test_silent_caller_is_told_so() -> None:
    header = header_of(manifest_of(state(), Purpose.STATE)[0])
    for timeout_s in growing(1.0):
        heard = True
        async with (
            serving(Store(idle_timeout_s=timeout_s)) as port,
            open_channel(f"127.0.0.1:{port}") as channel,
        ):
            for messages in ([], [header]):
                call = stub_of(channel).SetState()
                try:
                    for message in messages:
                        await call.write(message)
                        assert (await call.read()).resume_offset == 0
                except grpc.aio.AioRpcError:  # on a busy machine
                    heard = False
                with pytest.raises(Exception, match=rf"silent for {timeout_s:g} s") as raised:
                    await call.read()
                assert raised.value.code().name == "DEADLINE_EXCEEDED"  # type: ignore[attr-defined]
        if heard:
            return
    pytest.fail("the header never came in time")


MEMORY = """
import asyncio
import numpy, torch
from stratagem.common.process.process import tune_malloc
from stratagem.common.tensors.stream import CHUNK_BYTES
from stratagem.common.tensors.stream import Data
from tests.common.rpc.rig import Store, serving
from tests.common.rpc.tensor_store import download, filled

def now_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

async def main():
    size = 48 * CHUNK_BYTES
    await pulled(filled(Store(), {"x": torch.zeros(3 * CHUNK_BYTES)}))
    store = filled(Store(), {"x": torch.zeros(size // 4)})
    before = now_bytes()
    received = await pulled(store)
    # Not ru_maxrss: that remembers the parent process too.
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    assert received["x"].nbytes == size
    # Server and client share this process, so gRPC's own windows count twice.
    extra = peak - before - size
    print(f"extra {extra / CHUNK_BYTES:.1f} chunks")
    assert extra < 8 * CHUNK_BYTES, extra / CHUNK_BYTES

async def pulled(store):
    async with serving(store) as port:
        return (await download(port))[0]

os.environ.pop("LD_PRELOAD", None)  # what is preloaded is no malloc, but another clock
assert "tuned" in tune_malloc()
torch.set_num_threads(1)
asyncio.run(main())
"""


def test_a_download_needs_its_tensor_and_little_more() -> None:
    """96 MiB are received in place: a second copy of them would be seen."""
    assert run(MEMORY)[0] == 0


class Taken:
    """Takes what a file has."""

    def __init__(self) -> None:
        self.data = b""
        self.has_left = False

    def leave(self) -> None:
        self.has_left = True

    async def take(self, offset: int, pieces: Iterator[Data]) -> None:
        assert offset == len(self.data)
        for piece in pieces:
            self.data += bytes(piece)


async def download_near(port: int, taken: Taken) -> Download:
    target = Download()
    async with open_channel(f"127.0.0.1:{port}", own_connection=True) as channel:
        stub = stub_of(channel)

        def ask(offset: int, place: str = "") -> Any:
            return stub.GetState(worker_pb2.GetStateRequest(offset=offset, place=place))

        near = Near(lambda: ask(0, place()), taken.take, taken.leave)
        await pull(ask, target.accept, retry=EAGER, near=near, idle_timeout_s=PATIENCE_S)
    return target


def forbidden(*_: Any) -> int:
    raise UnreadableFileError("the kernel does not allow it")


def gone(message: Any) -> None:
    message.file.process = 2**22 + 1  # no process has so high a number


def other(message: Any) -> None:
    message.file.name = f"stratagem-snapshot-{'0' * 32}"


def whole(_message: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("tamper", "makes_copies", "offsets", "has_left"),
    [
        *((gone, True, [0, 0], False), (other, True, [0, 0], False)),
        (whole, True, [0, 0], True),  # and it may not open the copy
        (whole, False, [0], False),  # as who has no memory for one, or is of a version before
    ],
)
async def test_who_does_not_get_the_copy_gets_chunks(
    tamper: Callable[[Any], None],
    makes_copies: bool,
    offsets: list[int],
    has_left: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if has_left:
        monkeypatch.setattr(local_files, "readable_copy", forbidden)
    store, taken = filled(Store(), STATE_OF_TWO), Taken()
    store.tamper, store.makes_copies = tamper, makes_copies
    async with serving(store) as port:
        target = await download_near(port, taken)
    assert_same(target.finish(), STATE_OF_TWO)
    assert (taken.data, store.offsets, taken.has_left) == (b"", offsets, has_left)
