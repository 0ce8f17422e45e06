"""Sharing memory: who is let in, what is refused, and that nothing stays behind."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stratagem.worker.exchange import ExchangeError
from stratagem.worker.mesh import shm
from stratagem.worker.mesh.choice import MeshOffer
from stratagem.worker.mesh.shm import (
    SharedGroup,
    SharedListener,
    UnshareableError,
    allocate,
    form_shared,
    host_identity,
)
from tests.patience import PATIENCE_S
from tests.worker.mesh.engines import links_of
from tests.worker.mesh.party import listeners_at


def share_all(groups: list[SharedGroup], sizes: list[int]) -> list[list[torch.Tensor]]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.share(sizes, PATIENCE_S), groups))


def test_all_members_see_the_same_memory() -> None:
    with links_of("shm", 3) as groups:
        segments = share_all(groups, [0, 1, 7])
        assert [len(segment) for segment in segments[0]] == [1, 1, 7]
        segments[1][2][:] = 5
        assert segments[0][2].tolist() == segments[2][2].tolist() == [5] * 7
    assert segments[0][2].tolist() == [5] * 7  # a mapping outlives the group


def test_a_fast_member_may_be_a_whole_step_ahead() -> None:
    with links_of("shm", 2) as (fast, slow):
        for _ in range(10_000):  # more than fit into the socket
            fast.send_token()
        hearing = threading.Thread(target=slow.hear, args=(10_000, 10_000, PATIENCE_S))
        hearing.start()
        with pytest.raises(ExchangeError, match=r"nothing from member 1 within 0\.1 s"):
            fast.hear(1, 1, 0.1)
        hearing.join()
        assert slow.has_heard(10_000)


def test_a_member_that_left_after_its_last_token_is_not_missed() -> None:
    with links_of("shm", 3) as (first, second, third):
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
    assert not listeners_at([gone.address])


def test_all_members_are_told_that_one_cannot_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size_bytes: int) -> int:
        if size_bytes == 11:
            raise OSError("no memory")
        return allocate(size_bytes)

    monkeypatch.setattr(shm, "allocate", full)

    def share(group: SharedGroup) -> str:
        with pytest.raises(UnshareableError) as caught:
            group.share([11, 7, 1], PATIENCE_S)
        return str(caught.value)

    with links_of("shm", 3) as groups, ThreadPoolExecutor(3) as pool:
        told = list(pool.map(share, groups))
    assert told[0] == "cannot allocate 11 bytes of shared memory: no memory"
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


def test_host_identity_is_that_of_the_kernel_and_the_network() -> None:
    identity = host_identity()
    assert identity is not None
    assert identity.endswith(f"/{os.stat('/proc/self/ns/net').st_ino}")
