"""Sharing memory: who is let in, what is refused, and that nothing stays behind."""

import os
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from stratagem.worker.exchange import ExchangeError, mesh_exchange
from stratagem.worker.exchange.buckets.shard_owners import ShardOwners, num_sets, plan_step
from stratagem.worker.mesh.backend_agreement import MeshOffer
from stratagem.worker.mesh.same_host import SharedListener, host_identity
from stratagem.worker.mesh.shm_buffers import SharedGroup, form_shared
from stratagem.worker.mesh.shm_segments import UnshareableError
from tests.patience import PATIENCE_S
from tests.worker.exchange.cases import Case, one_step
from tests.worker.mesh.engines import form_all, former
from tests.worker.mesh.party import Member, introduce, party


def named_memory(member: Member) -> set[str]:
    """What the process has in memory under a name, which would outlive it."""
    process = Path(f"/proc/{member.process.pid}")
    opened = []
    for fd in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            opened.append(os.readlink(fd))
    mapped = [line.split()[-1] for line in (process / "maps").read_text().splitlines()]
    return {name for name in (*opened, *mapped) if name.startswith("/dev/shm/")}


def listeners() -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().split() if "@stratagem-" in line]


@contextmanager
def groups_of(size: int) -> Iterator[list[SharedGroup]]:
    """All members in this process."""
    groups = form_all(size)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def share_all(groups: list[SharedGroup], sizes: list[int]) -> list[list[torch.Tensor]]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.share(sizes, PATIENCE_S), groups))


def test_all_members_see_the_same_memory() -> None:
    with groups_of(3) as groups:
        segments = share_all(groups, [0, 1, 7])
        assert [len(segment) for segment in segments[0]] == [1, 1, 7]
        segments[1][2][:] = 5
        assert segments[0][2].tolist() == segments[2][2].tolist() == [5] * 7
    assert segments[0][2].tolist() == [5] * 7  # a mapping outlives the group


def test_a_fast_member_may_be_a_whole_step_ahead() -> None:
    with groups_of(2) as (fast, slow):
        for _ in range(10_000):  # more than fit into the socket
            fast.send_token()
        hearing = threading.Thread(target=slow.hear, args=(10_000, 10_000, PATIENCE_S))
        hearing.start()
        with pytest.raises(ExchangeError, match=r"nothing from member 1 within 0\.5 s"):
            fast.hear(1, 1, 0.5)
        hearing.join()
        assert slow.has_heard(10_000)


def test_a_member_that_left_after_its_last_token_is_not_missed() -> None:
    with groups_of(3) as (first, second, third):
        for _ in range(2):
            second.send_token()
        second.close()
        third.send_token()
        first.hear(1, 2, PATIENCE_S)
        with pytest.raises(ExchangeError, match="member 1 has left"):
            first.hear(2, 3, PATIENCE_S)
        third.send_token()
        first.hear(2, 2, PATIENCE_S)


def test_strangers_are_turned_away() -> None:
    listening = [SharedListener(), SharedListener()]
    addresses = [each.address for each in listening]
    name = addresses[0].decode().partition(":")[0]
    with ThreadPoolExecutor(2) as pool, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{name}")
        stranger.sendall(b"\0" * 20)
        formed = [
            pool.submit(form_shared, listener, rank, 2, addresses, PATIENCE_S)
            for rank, listener in enumerate(listening)
        ]
        groups = [each.result() for each in formed]
        assert stranger.recv(1) == b""
    groups[0].send_token()
    groups[1].hear(1, 1, PATIENCE_S)
    for group in groups:
        group.close()


def test_a_caller_that_says_nothing_yet_holds_nobody_up() -> None:
    """A stranger that never speaks, and a member that stands still before it does."""
    listening = [SharedListener() for _ in range(3)]
    addresses = [each.address for each in listening]
    name = addresses[0].decode().partition(":")[0]
    with ThreadPoolExecutor(3) as pool, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{name}")
        first = pool.submit(form_shared, listening[0], 0, 3, addresses, PATIENCE_S)
        with socket.socket(socket.AF_UNIX) as slow:  # in place of member 2
            slow.connect(f"\0{name}")
            second = pool.submit(form_shared, listening[1], 1, 3, addresses, PATIENCE_S)
            slow.sendall(bytes.fromhex(addresses[0].decode().partition(":")[2]) + b"\0\0\0\2")
            slow.settimeout(PATIENCE_S)
            assert slow.recv(16) == bytes.fromhex(addresses[2].decode().partition(":")[2])
            first.result().close()  # it is formed
        with pytest.raises(ExchangeError, match="member 0 has left while the group was formed"):
            second.result()  # which member 2 has not called
    listening[2].close()


def test_an_absent_member_is_told_from_a_silent_one() -> None:
    gone = SharedListener()
    gone.close()
    with pytest.raises(UnshareableError, match="cannot reach member 0"):
        form_shared(SharedListener(), 1, 2, [gone.address, b""], 0.5)
    with pytest.raises(ExchangeError, match="member 1 does not connect"):
        form_shared(SharedListener(), 0, 2, [b"", gone.address], 0.2)
    assert not [each for each in listeners() if gone.address.decode().split(":")[0] in each]


def refuse_to_allocate(pipe: Connection, rank: int, size: int) -> None:
    """Member 0 has no room for its segment."""
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with former(pipe) as members:
        _, buckets = Case(size, size).make_buckets()
        group = members.form("shm", rank, size)
        try:
            mesh_exchange(buckets, group, size)
        except UnshareableError as error:
            pipe.send(str(error))
            # Until the test has heard all: a socket that closes resets the others.
            pipe.poll(PATIENCE_S)


def test_all_members_are_told_that_one_cannot_allocate() -> None:
    with party(refuse_to_allocate, 3) as members:
        introduce(members)
        told = [member.receive() for member in members]
    assert "cannot allocate" in told[0]
    assert told[1:] == ["member 0 cannot allocate shared memory"] * 2


def test_sharing_is_offered_until_it_fails_twice_in_a_row() -> None:
    offer, error = MeshOffer("auto", torch.device("cpu")), UnshareableError("no")
    offer.sharing_fails(error)
    offer.sharing_works()
    offer.sharing_fails(error)
    assert offer.engines(("shm", "gloo")) == ("shm", "gloo")
    offer.sharing_fails(error)
    assert offer.engines(("shm", "gloo")) == ("gloo",)
    assert MeshOffer("grpc", torch.device("cpu")).engines(("shm", "grpc")) == ("grpc",)


def sum_forever(pipe: Connection, rank: int, size: int) -> None:
    case = Case(size, size)
    with former(pipe) as members:
        while True:
            params, buckets = case.make_buckets()
            exchange = mesh_exchange(buckets, members.form("shm", rank, size), size)
            one_step(exchange, params, case, 1)
            exchange.close()


@pytest.mark.parametrize(
    "num_meetings",
    [pytest.param(1, marks=pytest.mark.sweep), 2, pytest.param(5, marks=pytest.mark.sweep)],
)
def test_killed_members_leave_nothing_behind(num_meetings: int) -> None:
    with party(sum_forever, 2) as members:
        for _ in range(num_meetings):
            addresses = introduce(members)
        assert [named_memory(member) for member in members] == [set(), set()]
        for member in members:
            member.kill()
            member.process.join()
        names = [address.decode().partition(":")[0] for address in addresses]
        assert not [line for line in listeners() if any(name in line for name in names)]


def test_host_identity_is_that_of_the_kernel_and_the_network() -> None:
    identity = host_identity()
    assert identity is not None
    assert identity.endswith(f"/{os.stat('/proc/self/ns/net').st_ino}")


@pytest.mark.parametrize("num_shards", range(1, 13))
def test_no_step_needs_more_sets_than_are_shared(num_shards: int) -> None:
    for size in range(1, num_shards + 1):
        for rank in range(size):
            member = ShardOwners(rank, size, num_shards)
            steps = [plan_step(member, num_live) for num_live in range(1, num_shards + 1)]
            needed = [max([0, *step.sets]) + 1 for step in steps]
            assert all(few <= many for few, many in pairwise(needed))
            assert num_sets(member) == needed[-1]
