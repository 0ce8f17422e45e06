"""Copy between a device and the host: the only module that does so for tensors in transfer.

On a CUDA device a copy goes through pinned memory, and is queued on the caller's current stream. An
exchange has a separate `SideStream`, which waits only for the launched gradients, so its copies and
additions run concurrently with the rest of backward. For tensors on the CPU all of this is the
identity: no copy, no thread, no wait.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """Interface of events in a device's queue, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has reached the event."""


class HostCopy:
    """A tensor on the host, or on its way there."""

    __slots__ = ("_arrived", "_host")

    def __init__(self, host: Tensor, arrived: DeviceEvent | None) -> None:
        """Take a tensor. arrived: the event at which the copy is complete; None: it is complete."""
        self._host, self._arrived = host, arrived

    async def arrive(self) -> Tensor:
        """Return the tensor once it is complete, without blocking the event loop."""
        if self._arrived is not None and not self._arrived.query():
            await asyncio.to_thread(self._arrived.synchronize)
        return self._host

    def wait(self) -> Tensor:
        """Return the tensor once it is complete; block the calling thread until then."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


def to_host(tensor: Tensor) -> HostCopy:
    """Return the tensor itself if it is on the CPU, else a copy, queued on the current stream. The
    tensor must not change until the copy has arrived."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return HostCopy(tensor.cpu(), None)
    host = host_room(tensor.shape, tensor.dtype, tensor.device)
    host.copy_(tensor, non_blocking=True)
    stream = torch.cuda.current_stream(tensor.device)
    # If the tensor is freed early, its memory is not reused before the copy has ended.
    tensor.record_stream(stream)
    # blocking: a waiting thread leaves the core to others
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(stream)
    return HostCopy(host, arrived)


def host_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor on the host, for copies to or from this device; pinned for
    CUDA.

    Nothing is cached here: torch reuses freed pinned memory, once the queued copies with it have
    ended.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


class SideStream:
    """A stream of a device for work that runs concurrently with its computation; unused on the CPU.

    The computing thread marks a point of its work, the other thread follows that mark and queues
    its work, and the computing thread joins before it uses the results.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after the work queued so far on the calling thread's current stream."""
        if self._stream is None:
            return None
        mark: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return mark

    def follow(self, mark: torch.cuda.Event | None) -> None:
        """Make all later work on this stream wait for the mark."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def entered(self) -> AbstractContextManager[object]:
        """Return a context manager in which the calling thread queues work on this stream."""
        if self._stream is None:
            return nullcontext()
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let later work on the calling thread's current stream wait for this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
