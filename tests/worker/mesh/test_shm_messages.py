"""Messages through slots: how much memory they take, who waits for whom, and what is refused."""

import gc
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stratagem.common.tensors.torch_codec import bytes_of
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.mesh import shm_messages
from stratagem.worker.mesh.shm import UnshareableError
from stratagem.worker.mesh.shm_messages import SlotLink
from tests.patience import PATIENCE_S
from tests.worker.mesh.engines import slot_links

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


def test_no_descriptor_stays_open() -> None:
    with slot_links(2) as (first, second):
        for tag in range(4):
            first.send(1, tag, payload(10_000), 1)
        second.open_step(1, [(0, tag) for tag in range(4)])
        second.take(0, 1, 3, PATIENCE_S)
        sockets = [way.sock for link in (first, second) for way in link._ways.values()]
        assert all(each.fileno() >= 0 for each in sockets)
    assert len(sockets) == 2
    assert all(each.fileno() == -1 for each in sockets)
    gc.collect()
    opened = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # another's, closed by now
            opened.append(os.readlink(path))
    assert not [target for target in opened if "memfd:stratagem" in target]
