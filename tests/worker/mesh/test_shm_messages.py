"""Messages through slots: how much memory they take, who waits for whom, and what is refused."""

import gc
import os
import resource
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stratagem.common.tensors.torch_codec import bytes_of
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.mesh import shm_messages
from stratagem.worker.mesh.same_host import SharedListener, connect
from stratagem.worker.mesh.shm_messages import SlotLink
from stratagem.worker.mesh.shm_segments import UnshareableError
from tests.patience import AT_ONCE_S, PATIENCE_S
from tests.worker.mesh.engines import slot_links
from tests.worker.mesh.party import introduce, party, rendezvous_over

SIZES = (64, 0, 1, 7, 4096, 4097, 300_000, 65_536)


def payload(size_bytes: int) -> Tensor:
    return torch.arange(size_bytes).to(torch.uint8)


def num_segments() -> int:
    """Maps of anonymous segments in this process, of what is not left by earlier tests."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:stratagem")


def test_messages_of_any_size_arrive_whole_and_in_any_order() -> None:
    with slot_links(3) as links:
        for source in (0, 2):
            for tag, size_bytes in enumerate(SIZES):
                links[source].send(1, tag, payload(size_bytes), 1)
        links[1].open_step(1, [(source, tag) for source in (0, 2) for tag in range(len(SIZES))])
        for tag, size_bytes in reversed(list(enumerate(SIZES))):
            for source in (2, 0):
                assert links[1].take(source, 1, tag, PATIENCE_S) == bytes_of(payload(size_bytes))


def test_slots_are_used_again() -> None:
    before = num_segments()
    with slot_links(2) as (first, second):
        for step in range(1, 51):
            first.open_step(step, [(1, 0)])
            second.open_step(step, [(0, 0), (0, 1)])
            works = [first.send(1, tag, payload(9000), step) for tag in range(2)]
            for tag in range(2):
                assert len(second.take(0, step, tag, PATIENCE_S)) == 9000
            works.append(second.send(0, 0, payload(5000), step))
            assert len(first.take(1, step, 0, PATIENCE_S)) == 5000
            for work in works:
                work.wait(PATIENCE_S)
        assert num_segments() - before == 2 * 3  # each is mapped at both ends
    assert num_segments() == before


def test_a_sender_never_waits_for_room_and_two_of_them_not_for_each_other() -> None:
    """Both send more than there is memory for before either takes anything."""
    count = 20
    with slot_links(2, max_slot_bytes=3 * 4096) as links:
        works = [link.send(1 - link.rank, tag, payload(4000 + tag), 1)
                 for link in links for tag in range(count)]  # fmt: skip
        assert [work.is_done for work in works[:count]] == [True] * 3 + [False] * (count - 3)

        def take_all(link: SlotLink) -> None:
            peer = 1 - link.rank
            link.open_step(1, [(peer, tag) for tag in range(count)])
            for tag in reversed(range(count)):
                assert link.take(peer, 1, tag, PATIENCE_S) == bytes_of(payload(4000 + tag))

        other = threading.Thread(target=take_all, args=(links[1],))
        other.start()
        take_all(links[0])
        other.join()
        for work in works:
            work.wait(PATIENCE_S)


def test_memory_is_bounded_but_one_message_always_passes() -> None:
    with slot_links(2, max_slot_bytes=8192) as (first, second):
        second.open_step(1, [(0, tag) for tag in range(3)])
        small = first.send(1, 0, payload(4096), 1)
        large = first.send(1, 1, payload(100_000), 1)
        with pytest.raises(ExchangeError, match=r"send to member 1: not taken within 0\.01 s"):
            large.wait(0.01)
        assert small.is_done
        assert len(second.take(0, 1, 0, PATIENCE_S)) == 4096
        assert not second.wait_until(lambda: False, 0.0)  # gives the slot back
        large.wait(PATIENCE_S)  # the small slot made room
        assert len(second.take(0, 1, 1, PATIENCE_S)) == 100_000
        first.send(1, 2, payload(5), 1).wait(PATIENCE_S)
        assert len(second.take(0, 1, 2, PATIENCE_S)) == 5


def test_what_found_no_memory_is_not_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size_bytes: int) -> int:
        raise OSError("no memory")

    with slot_links(2) as (first, second):
        with monkeypatch.context() as patch:
            patch.setattr(shm_messages, "allocate", refuse)
            with pytest.raises(UnshareableError, match="cannot allocate 8192 bytes"):
                first.send(1, 0, payload(5000), 1)
            assert not first.wait_until(lambda: False, 0.0)  # and does not try again
        second.open_step(1, [(0, 0), (0, 1)])
        first.send(1, 1, payload(6), 1)
        assert len(second.take(0, 1, 1, PATIENCE_S)) == 6
        with pytest.raises(ExchangeError, match="nothing within"):
            second.take(0, 1, 0, 0.0)


def test_what_nobody_awaits_is_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_messages, "MAX_EARLY_BYTES", 10_000)
    with slot_links(2) as (first, second):
        for tag in range(3):
            first.send(1, tag, payload(4096), 1)
        second.open_step(0, [(0, 9)])
        with pytest.raises(ExchangeError, match=r"early messages: 12288 bytes .* limit is 10000"):
            second.take(0, 0, 9, PATIENCE_S)


def test_what_was_sent_before_the_end_is_still_taken() -> None:
    with slot_links(2) as (first, second):
        first.send(1, 0, payload(5000), 1).wait(PATIENCE_S)
        first.cut()
        first.close()
        second.open_step(1, [(0, 0), (0, 1)])
        assert len(second.take(0, 1, 0, PATIENCE_S)) == 5000
        with pytest.raises(ExchangeError, match=r"tag 1 .* from member 0: member 0 has left"):
            second.take(0, 1, 1, PATIENCE_S)
        with pytest.raises(ExchangeError, match="send to member 0: member 0 has left"):
            second.send(0, 0, payload(1), 1).wait(PATIENCE_S)


def test_nonsense_ends_the_link() -> None:
    for notice in (
        shm_messages._NOTICE.pack(shm_messages._Kind.MESSAGE, 7, 1, 0, 10),
        shm_messages._NOTICE.pack(shm_messages._Kind.SLOT, 1, 0, 0, 10),
        shm_messages._NOTICE.pack(99, 1, 0, 0, 10),
    ):
        with slot_links(2) as (first, second):
            first._ways[1].sock.send(notice)
            second.open_step(1, [(0, 0)])
            with pytest.raises(ExchangeError, match="member 0 said what is refused"):
                second.take(0, 1, 0, PATIENCE_S)


def wait_for_the_next(pipe: Connection, rank: int, size: int) -> None:
    listener = SharedListener()
    addresses = rendezvous_over(pipe)(listener.address)
    link = SlotLink(rank, size, connect(listener, rank, size, addresses, PATIENCE_S))
    link.open_step(1, [((rank + 1) % size, 0)])
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            link.send(1, 9, payload(5000), 1)
        except UnshareableError as error:
            pipe.send(str(error))
    pipe.send("formed")
    try:
        link.take((rank + 1) % size, 1, 0, 2 * PATIENCE_S)
    except ExchangeError as error:
        pipe.send((time.monotonic(), str(error)))
    link.cut()
    pipe.recv()


def test_no_memory_is_said_and_a_killed_member_is_seen_at_once() -> None:
    with party(wait_for_the_next, 3) as members:
        introduce(members)
        assert "cannot allocate 8192 bytes" in members[0].receive()
        assert [member.receive() for member in members] == ["formed"] * 3
        killed_at_s = time.monotonic()
        members[0].kill()
        for member, where in ((members[2], "member 0"), (members[1], "member 2")):
            seen_at_s, words = member.receive()  # 2 waits for 0; 1 waits for 2, who then cuts
            assert f"{where} has left" in words
            assert 0 < seen_at_s - killed_at_s < AT_ONCE_S


def test_descriptors_do_not_grow() -> None:
    with slot_links(2):
        pass
    before = num_descriptors()
    for _ in range(3):
        with slot_links(2) as (first, second):
            for tag in range(4):
                first.send(1, tag, payload(10_000), 1)
            second.open_step(1, [(0, tag) for tag in range(4)])
            second.take(0, 1, 3, PATIENCE_S)
            assert num_descriptors() >= before + 2
    assert num_descriptors() == before


def num_descriptors() -> int:
    """How many descriptors of this process are of links; those of others come and go."""
    gc.collect()
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed by now
            found += is_of_links(int(path.name), os.readlink(path))
    return found


def is_of_links(descriptor: int, target: str) -> bool:
    """Whether it is of a segment, or of a socket at either end of which a listener has a name."""
    if not target.startswith("socket:"):
        return "memfd:stratagem" in target
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        if sock.family != socket.AF_UNIX:
            return False
        names = [sock.getsockname()]
        with suppress(OSError):  # a listener has no peer
            names.append(sock.getpeername())
    # A name in the file system, which is text, is another's.
    return any(isinstance(name, bytes) and name.startswith(b"\0stratagem-") for name in names)
