"""The thread behind a stream: order, bounds, errors, and a sink that is free after close."""

import asyncio
import threading
from functools import partial

import pytest

from stratagem.coordinator.updates.floats import MAX_PIECES_BEHIND, Offload
from tests.patience import AT_ONCE_S


def note(seen: list[tuple[int, bytes]], offset: int, data: bytes) -> None:
    seen.append((offset, data))


async def test_pieces_arrive_in_order() -> None:
    for num_pieces in (0, 1, 7, 300):
        seen: list[tuple[int, bytes]] = []
        offload = Offload(partial(note, seen))
        pieces = [(number, bytes([number % 256])) for number in range(num_pieces)]
        for offset, data in pieces:
            offload.write(offset, data)
            await offload.keep_up()
        await offload.finish()
        await offload.close()
        assert seen == pieces


async def test_the_stream_waits_until_a_slow_sink_has_half_of_the_pieces() -> None:
    ready = threading.Semaphore(0)

    def wait(_offset: int, _data: object) -> None:
        ready.acquire()

    offload = Offload(wait)
    for number in range(MAX_PIECES_BEHIND):
        offload.write(number, b"x")
        await offload.keep_up()
    offload.write(MAX_PIECES_BEHIND, b"x")
    held_up = asyncio.create_task(offload.keep_up())
    await asyncio.sleep(0)
    assert not held_up.done()
    try:
        ready.release(MAX_PIECES_BEHIND + 1 - MAX_PIECES_BEHIND // 2)
        async with asyncio.timeout(AT_ONCE_S):
            await held_up
    finally:
        ready.release(MAX_PIECES_BEHIND // 2)
    await offload.finish()


async def test_an_error_of_the_sink_comes_out() -> None:
    def refuse(offset: int, _data: bytes) -> None:
        if offset == MAX_PIECES_BEHIND - 1:
            raise ValueError("no more")

    offload = Offload(refuse)
    for number in range(MAX_PIECES_BEHIND):
        offload.write(number, b"x")
    with pytest.raises(ValueError, match="no more"):
        await offload.finish()
    with pytest.raises(ValueError, match="no more"):
        await offload.keep_up()
    await offload.close()


async def test_nothing_touches_the_sink_after_close() -> None:
    started, gate = threading.Event(), threading.Event()
    running: list[int] = []

    def sink(offset: int, _data: bytes) -> None:
        started.set()
        gate.wait()
        running.append(offset)

    offload = Offload(sink)
    for number in range(3):
        offload.write(number, b"x")
    finishing = asyncio.create_task(offload.finish())
    await asyncio.to_thread(started.wait)
    finishing.cancel()
    await asyncio.gather(finishing, return_exceptions=True)
    closing = asyncio.create_task(offload.close())
    await asyncio.sleep(0)
    assert not closing.done()
    gate.set()
    await closing
    assert running == [0]
