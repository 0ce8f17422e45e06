"""A party of real processes over loopback, driven by the test through pipes."""

import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

SPAWN = mp.get_context("forkserver")
SPAWN.set_forkserver_preload(["pytest", "stratagem.worker.exchange", "tests.worker.mesh.engines"])
"""What else the tests of parties import, each member would import anew."""


class Member:
    """One process. Its target talks through the pipe: it may rendezvous, and report."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError("a member says nothing")
        return self.pipe.recv()

    def kill(self) -> None:
        """One that has ended by itself, as when it lost a member, has ended, too."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)

    def freeze(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def party(target: Callable[..., None], size: int, *args: Any) -> Iterator[list[Member]]:
    members = [Member(target, (rank, size, *args)) for rank in range(size)]
    try:
        yield members
    finally:
        for member in members:
            member.process.kill()
            member.process.join()


def introduce(members: list[Member]) -> list[bytes]:
    """Collects the addresses of these members, tells all of them to each, and returns them."""
    addresses = [member.receive() for member in members]
    for member in members:
        member.pipe.send(addresses)
    return addresses


def rendezvous_over(pipe: Connection) -> Callable[[bytes], list[bytes]]:
    def rendezvous(address: bytes) -> list[bytes]:
        pipe.send(address)
        addresses: list[bytes] = pipe.recv()
        return addresses

    return rendezvous


def named_memory(member: Member) -> set[str]:
    """What the process has in memory under a name, which would outlive it."""
    process = Path(f"/proc/{member.process.pid}")
    opened = []
    for fd in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            opened.append(os.readlink(fd))
    mapped = [line.split()[-1] for line in (process / "maps").read_text().splitlines()]
    return {name for name in (*opened, *mapped) if name.startswith("/dev/shm/")}


def listeners_at(addresses: list[bytes]) -> list[str]:
    """The sockets of this machine that listen for members there."""
    names = [address.decode().partition(":")[0] for address in addresses]
    lines = Path("/proc/net/unix").read_text().split()
    return [line for line in lines if any(name in line for name in names)]
