"""Callers that no library makes: silent, one byte at a time, or lying about what comes."""

from __future__ import annotations

import asyncio
import gzip
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc

from tests.hostile.wire import End, RawCall, message, raw_call
from tests.patience import PATIENCE_S

Code = grpc.StatusCode
Act = Callable[[RawCall, str, list[bytes]], Coroutine[Any, Any, None]]


async def says_nothing(call: RawCall, path: str, frames: list[bytes]) -> None:
    call.open(path)


async def says_half(call: RawCall, path: str, frames: list[bytes]) -> None:
    call.open(path)
    call.data(message(frames[0], announced=len(frames[0]) + 1000))


async def trickles(call: RawCall, path: str, frames: list[bytes]) -> None:
    """A byte now and then, so that the connection never looks dead; until it is cut."""
    call.open(path)
    for byte in itertools.cycle(message(b"\0" * 100, announced=2**20)):
        call.data(bytes((byte,)))
        await asyncio.sleep(0.05)


async def announces_too_much(call: RawCall, path: str, frames: list[bytes]) -> None:
    call.open(path)
    call.data(message(b"\0" * 1000, announced=2**30))


async def sends_a_bomb(call: RawCall, path: str, frames: list[bytes]) -> None:
    call.open(path, **{"grpc-encoding": "gzip"})
    call.data(message(BOMB, compressed=True), is_last=True)


async def lies_about_the_codec(call: RawCall, path: str, frames: list[bytes]) -> None:
    call.open(path, **{"grpc-encoding": "gzip"})
    call.data(message(b"not gzip at all", compressed=True), is_last=True)


async def talks_of_another_codec(call: RawCall, path: str, frames: list[bytes]) -> None:
    call.open(path, **{"grpc-encoding": "middle-out"})
    call.data(message(frames[0], compressed=True), is_last=True)


BOMB: Final = gzip.compress(b"\0" * (56 * 2**20), 9)
"""Small enough for the window of a new connection, and fourteen times what a message may have."""
SILENT: Final[dict[str, Act]] = {
    "says nothing": says_nothing,
    "says half": says_half,
    "trickles": trickles,
}
LYING: Final[dict[str, Act]] = {
    "1 GiB announced": announces_too_much,
    "gzip bomb": sends_a_bomb,
    "no gzip": lies_about_the_codec,
    "unknown codec": talks_of_another_codec,
}
ENDS: Final = {
    "says nothing": {Code.DEADLINE_EXCEEDED},
    "says half": {Code.DEADLINE_EXCEEDED},
    "trickles": {Code.DEADLINE_EXCEEDED},
    "1 GiB announced": {Code.RESOURCE_EXHAUSTED},
    "gzip bomb": {Code.RESOURCE_EXHAUSTED},
    "no gzip": {Code.INTERNAL},
    "unknown codec": {Code.INTERNAL, Code.UNIMPLEMENTED},
}
"""What they are told. Of codecs gRPC itself speaks, before any rule of ours."""


async def end_of(address: str, act: Act, path: str, frames: list[bytes]) -> tuple[End, float]:
    """How the call ended, and after how many seconds."""
    loop = asyncio.get_running_loop()
    async with raw_call(address) as call:
        began = loop.time()
        acting = asyncio.create_task(act(call, path, frames))
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await call.end(), loop.time() - began
        finally:
            acting.cancel()
            await asyncio.gather(acting, return_exceptions=True)
