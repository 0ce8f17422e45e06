"""The way from a device to the host: nothing on the CPU, else without a wait on the event loop.

What the exchanges do with copies that come late is in `test_server` and `test_peer`.
"""

import asyncio
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from stratagem.worker.exchange.layout import ShardOwners, plan_step
from stratagem.worker.exchange.transfer_thread import MeshTransport, Turn
from stratagem.worker.mesh.staging import HostCopy, SideStream, host_room, to_host

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize("count", [0, 1, 7])
async def test_on_the_cpu_it_is_the_tensor_itself(count: int) -> None:
    tensor = torch.ones(count, requires_grad=True)
    host = await to_host(tensor).arrive()
    assert host.data_ptr() == tensor.data_ptr()
    assert not host.requires_grad
    assert to_host(tensor).wait().data_ptr() == tensor.data_ptr()
    room = host_room((count,), torch.bfloat16, CPU)
    assert (room.shape, room.dtype, room.is_pinned()) == ((count,), torch.bfloat16, False)
    side = SideStream(CPU)
    side.follow(side.mark())
    with side.entered():
        side.join()


async def test_the_loop_goes_on_until_a_copy_arrives() -> None:
    loop, is_waited_for, has_ended = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    class Event:
        def query(self) -> bool:
            return has_ended.is_set()

        def synchronize(self) -> None:
            loop.call_soon_threadsafe(is_waited_for.set)
            has_ended.wait()

    host = torch.zeros(3)
    copy = HostCopy(host, Event())
    arriving = asyncio.create_task(copy.arrive())
    await is_waited_for.wait()
    assert not arriving.done()
    has_ended.set()
    assert await arriving is host
    assert await copy.arrive() is host
    assert copy.wait() is host


class Recorder:
    """A side stream, a link and a method that write down who does what in which order."""

    name = suffix = ""
    num_tags = 0

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, str]] = []
        self._num_marks = 0

    def _note(self, what: str, number: int = 0) -> None:
        self.seen.append((what, number, threading.current_thread().name))

    def mark(self) -> int:
        self._num_marks += 1
        return self._num_marks - 1

    def follow(self, mark: int) -> None:
        self._note("follow", mark)

    def entered(self) -> AbstractContextManager[None]:
        self._note("entered")
        return nullcontext()

    def join(self) -> None:
        self._note("join")

    def prepare(self, step: object, sets: object) -> None: ...

    def run(self, prepared: object, turn: Turn) -> None:
        for bucket in range(3):
            turn.await_launch(bucket)
            self._note("run", bucket)

    def cut(self) -> None: ...
    def close(self) -> None: ...


def test_an_exchange_follows_each_bucket_and_is_joined_at_the_end() -> None:
    recorder: Any = Recorder()
    transport = MeshTransport(recorder, recorder, recorder, deadline_s=20.0)
    transport.begin(1, plan_step(ShardOwners(0, 1, 1), 1), [], None)
    for bucket in range(3):
        transport.launch(bucket)
    transport.finish()
    seen = list(recorder.seen)
    transport.close()
    assert seen[0] == ("entered", 0, "exchange")
    assert seen[-1] == ("join", 0, "MainThread")
    for bucket in range(3):
        followed = seen[seen.index(("run", bucket, "exchange")) - 1]
        assert followed[0] == "follow"
        assert followed[1] >= bucket
    assert recorder.seen[len(seen) :] == [("join", 0, "MainThread")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("count", [0, 1, 7, 10_000_000])
async def test_a_copy_holds_what_was_queued_before_it(count: int) -> None:
    side = SideStream(CUDA)
    tensor = torch.zeros(count, device=CUDA)
    for _ in range(100):
        tensor.add_(1)
    side.follow(side.mark())
    with side.entered():
        copy = to_host(tensor)
    torch.randn(4096, 4096, device=CUDA) @ torch.randn(4096, 4096, device=CUDA)  # goes on beside
    host = await copy.arrive()
    assert host.device == CPU
    assert host.is_pinned() or count == 0
    assert torch.equal(host, torch.full((count,), 100.0))
    with side.entered():
        tensor.add_(1)
    side.join()
    assert torch.equal(tensor.cpu(), torch.full((count,), 101.0))
