"""Copies between a device and the host: the only place where travelling tensors are brought across.

On a CUDA device a copy goes through pinned memory, and is queued on the caller's current stream. An
exchange has a `SideStream` of its own, which waits only for the gradients that are handed over, so
its copies and additions run concurrently with the rest of backward. For tensors on the CPU all of
this is the identity: no copy, no thread, no wait. Must not know gradients or members.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A point in the work of a device, as torch.cuda.Event is."""

    def query(self) -> bool:
        """Returns whether the device has come past it."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the device has come past it."""


class HostCopy:
    """A tensor on the host, once it has arrived there."""

    __slots__ = ("_arrived", "_host")

    def __init__(self, host: Tensor, arrived: DeviceEvent | None) -> None:
        """arrived: None when it is there already."""
        self._host, self._arrived = host, arrived

    async def arrive(self) -> Tensor:
        """Returns the tensor on the host; the event loop is not blocked until it is there."""
        if self._arrived is not None and not self._arrived.query():
            await asyncio.to_thread(self._arrived.synchronize)
        return self._host

    def wait(self) -> Tensor:
        """Returns the tensor on the host; blocks the calling thread until it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


def to_host(tensor: Tensor) -> HostCopy:
    """Returns the tensor itself if it is on the CPU, else a copy of what the calling thread's
    current stream leaves in it. It must stay as it is until the copy has arrived."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return HostCopy(tensor.cpu(), None)
    host = host_room(tensor.shape, tensor.dtype, tensor.device)
    host.copy_(tensor, non_blocking=True)
    stream = torch.cuda.current_stream(tensor.device)
    # Should it be freed early, its memory is not given to others before the copy has ended.
    tensor.record_stream(stream)
    # blocking: a thread that waits for it leaves the core to others
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(stream)
    return HostCopy(host, arrived)


def host_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialised tensor on the host, for copies to or from this device; pinned for
    CUDA.

    Nothing is kept for reuse here: torch gives pinned memory that was freed to the next caller,
    once the copies that were queued with it have ended.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


class SideStream:
    """A stream of a device for work that runs concurrently with what it computes. Empty on the CPU.

    The computing thread marks what is ready, the other thread follows that mark and queues its own
    work, and the computing thread joins before it uses the results.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event | None:
        """Returns an event at the end of what the calling thread's current stream has been given so
        far."""
        if self._stream is None:
            return None
        mark: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return mark

    def follow(self, mark: torch.cuda.Event | None) -> None:
        """Makes all work that is queued here from now on wait for the mark."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def entered(self) -> AbstractContextManager[object]:
        """Returns a context in which what the calling thread queues goes to this stream."""
        if self._stream is None:
            return nullcontext()
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Makes later work of the calling thread's current stream wait for all that was queued
        here."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
