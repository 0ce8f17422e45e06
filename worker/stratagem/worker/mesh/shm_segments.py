"""Memory without a name that one process makes and others map, passed over a Unix socket.

Knows neither members nor barriers.
"""

import fcntl
import mmap
import os
import select
import socket
import time
from typing import Final

import torch
from torch import Tensor

from stratagem.worker.mesh.link import ExchangeError

_SEALS: Final = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
_SEGMENT: Final = b"S"
_NO_SEGMENT: Final = b"N"


class UnshareableError(ExchangeError):
    """Members that were thought to be on one host cannot share memory; trying again is no use."""


def allocate(size_bytes: int) -> int:
    """Allocates a segment with its pages: to run out of memory later would kill the process."""
    fd = os.memfd_create("stratagem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, max(1, size_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_segment(fd: int, size_bytes: int, owner: int) -> Tensor:
    """Maps the segment as bytes. Its seals keep others from truncating it while it is in use."""
    size_found = os.fstat(fd).st_size
    if size_found != max(1, size_bytes):
        raise ExchangeError(
            f"the segment of member {owner} has {size_found} bytes, expected {size_bytes}"
        )
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ExchangeError(f"the segment of member {owner} is not sealed")
    mapped = mmap.mmap(fd, size_found, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(mapped, dtype=torch.uint8)


def send_segment(sock: socket.socket, fds: list[int]) -> None:
    try:
        socket.send_fds(sock, [_SEGMENT if fds else _NO_SEGMENT], fds)
    except OSError:  # the peer is gone, which receiving from it will say
        return


def take_segment(sock: socket.socket, size_bytes: int, peer: int, deadline_s: float) -> Tensor:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))):
        raise ExchangeError(f"no segment from member {peer}")
    try:
        word, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise ExchangeError(f"no segment from member {peer}: {error}") from error
    try:
        if word == _NO_SEGMENT:
            raise UnshareableError(f"member {peer} cannot allocate shared memory")
        if not fds:
            raise ExchangeError(f"member {peer} has left before it shared its segment")
        return map_segment(fds[0], size_bytes, peer)
    finally:
        for fd in fds:
            os.close(fd)
