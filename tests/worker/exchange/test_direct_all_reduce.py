"""Sums over every engine: the bits of one process, whoever computes which shards, and failures."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.common.base.errors import StaleError
from stratagem.worker.exchange import ExchangeError, GradientReducer, mesh_exchange
from stratagem.worker.exchange import all_reduce as all_reduce_schedule
from stratagem.worker.mesh import form_gloo
from tests.every_pair import every_pair
from tests.patience import AT_ONCE_S, PATIENCE_S
from tests.worker.exchange.cases import ODD, SMALL, Case, exchanges_of, one_step, sums_of
from tests.worker.mesh.engines import ENGINES, THREADS, Former, former, links_of, num_meetings
from tests.worker.mesh.party import Member, introduce, listeners_at, named_memory, party

LONG_S = 2 * PATIENCE_S
"""A deadline that no test waits for."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def shards_of(size: int, kind: str) -> tuple[int, int]:
    """How many shards there are, and how many of them have rows."""
    kinds = {"each": (size, size), "uneven": (2 * size + 3, 2 * size + 1), "few": (size + 2, 1)}
    return kinds[kind]


def cases_of(*ways: str) -> list[tuple[int, Case]]:
    rows = every_pair([1, 2, 3, 4, 5], ["each", "uneven", "few"], DTYPES, [SMALL, (1,), ODD], ways)
    return [
        (
            size,
            Case(
                *shards_of(size, kind),
                sizes=sizes,
                dtype=dtype,
                way=way,
                num_rest=(2, 0, 4001)[number // 2 % 3],
                divisor=(None, 3.0, 7.0)[number % 3],
                piece_bytes=(all_reduce_schedule.PIECE_BYTES, 1 << 17)[number % 2],
            ),
        )
        for number, (size, kind, dtype, sizes, way) in enumerate(rows)
    ]


OVER_LINKS = cases_of("", "direct", "gather", "tree")


# gloo and gRPC carry the same transfers in the same order: a quarter of the cases for the second.
@pytest.mark.parametrize(
    ("engine", "size", "case"),
    [
        *(("gloo", *each) for each in OVER_LINKS),
        *(("grpc", *each) for each in OVER_LINKS[1::4]),
        *(("shm", *each) for each in cases_of("")),
    ],
    ids=lambda value: (
        f"{value.num_live}of{value.num_shards}-{value.dtype}-{len(value.sizes)}{value.way}"
        if isinstance(value, Case)
        else str(value)
    ),
)
def test_every_member_holds_the_bits_of_the_single_process_sum(
    engine: str, size: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIECE_BYTES", "SMALL_BYTES", "MAX_GATHER_MEMBERS"):  # as they were, afterwards
        monkeypatch.setattr(all_reduce_schedule, name, getattr(all_reduce_schedule, name))
    case.configure()
    expected = [case.expected(step) for step in range(2)]
    with links_of(engine, size) as links:
        for rank, sums in enumerate(sums_of(links, case, range(2))):
            assert sums == expected, f"member {rank}"


# Ring and native all-reduce send in ways of their own, and lose members in the same ones.
@pytest.mark.parametrize(
    ("engine", "all_reduce"),
    [*((engine, "direct") for engine in ENGINES), ("gloo", "ring"), ("gloo", "native")],
)
@pytest.mark.parametrize("is_cut", [False, True], ids=["silent", "cut"])
def test_a_silent_member_is_given_up_and_a_cut_ends_all_waits(
    engine: str, all_reduce: str, is_cut: bool
) -> None:
    """The third never takes its step; a cut is that of the first, which waits for it."""
    case, begun = Case(4, 4, SMALL), time.monotonic()
    with links_of(engine, 3) as links, ThreadPoolExecutor(2) as pool:
        made = exchanges_of(links, case, all_reduce, LONG_S if is_cut else 0.5)

        def fail(member: tuple[list[nn.Parameter], GradientReducer]) -> str:
            with pytest.raises(ExchangeError) as caught:
                one_step(member[1], member[0], case, 1)
            return str(caught.value)

        failing = [pool.submit(fail, each) for each in made[:2]]
        if is_cut:
            threading.Timer(0.1, made[0][1].cut).start()
        told = [each.result() for each in failing]
        assert ("cut" if is_cut else "member") in told[0]
        assert "member" in told[1]
        for _, exchange in made:
            exchange.close()
    assert time.monotonic() - begun < AT_ONCE_S
    for thread in threading.enumerate():
        if thread.name in THREADS:  # one that was given up ends with what it waits for
            thread.join(PATIENCE_S / 2)
            assert not thread.is_alive()


# ---- real processes ----


@dataclass(frozen=True)
class Order:
    """What a member of a group is to do in a step: "sum" it, or "linger" inside of it."""

    engine: str
    rank: int
    size: int
    case: Case
    step: int
    deed: str
    deadline_s: float


def follow_orders(pipe: Connection, _rank: int, _size: int) -> None:
    """Member of one group after the other."""
    with former(pipe) as members:
        while True:
            follow(pipe, members, pipe.recv())


def follow(pipe: Connection, members: Former, order: Order) -> None:
    """Says whether the sum was right, or why there is none."""
    case = order.case
    case.configure()
    params, buckets = case.make_buckets()
    link = members.form(order.engine, order.rank, order.size)
    exchange = mesh_exchange(buckets, link, case.num_shards, deadline_s=order.deadline_s)
    pipe.send("formed")
    try:
        if order.deed == "linger":
            exchange.begin_step(order.step, exchange.party.owned, case.num_live)
            pipe.send("inside")
            pipe.recv()  # until killed, or told to go on
        pipe.send(one_step(exchange, params, case, order.step) == case.expected(order.step))
    except ExchangeError as error:
        pipe.send(str(error))
    exchange.close()


CASE = Case(4, 4, SMALL)


def send_orders(
    members: list[Member], engine: str, step: int, deeds: list[str], deadline_s: float = LONG_S,
    case: Case = CASE,
) -> list[bytes]:  # fmt: skip
    """The addresses of the members, as soon as they have formed their group."""
    addresses: list[bytes] = []
    for rank, (member, deed) in enumerate(zip(members, deeds, strict=True)):
        member.pipe.send(Order(engine, rank, len(members), case, step, deed, deadline_s))
    for _ in range(num_meetings(engine)):
        addresses = introduce(members)
    assert [member.receive() for member in members] == ["formed"] * len(members)
    return addresses


def answers(members: list[Member]) -> list[Any]:
    return [member.receive() for member in members]


@pytest.fixture(scope="module")
def followers() -> Iterator[list[Member]]:
    """Two that survive, and one to lose for each engine."""
    with party(follow_orders, 2 + len(ENGINES)) as members:
        yield members


@pytest.mark.parametrize("engine", ENGINES)
def test_survivors_of_a_frozen_and_of_a_killed_peer_redo_the_step_with_the_same_bits(
    engine: str, followers: list[Member]
) -> None:
    lost = followers[2 + ENGINES.index(engine)]
    survivors = followers[:2]
    members = [*survivors, lost]
    send_orders(members, engine, 1, ["sum"] * 3)
    assert answers(members) == [True] * 3
    send_orders(members, engine, 2, ["sum", "sum", "linger"], deadline_s=1.0)
    assert lost.receive() == "inside"
    lost.freeze()
    assert all("member" in words for words in answers(survivors))
    lost.wake()
    lost.pipe.send("go on")
    lost.receive()  # what the others sent before they gave it up may be all that it needs
    addresses = send_orders(members, engine, 2, ["sum", "sum", "linger"])
    assert lost.receive() == "inside"
    assert [named_memory(member) for member in members] == [set()] * 3
    lost.kill()
    killed = time.monotonic()
    assert all("member" in words for words in answers(survivors))
    assert time.monotonic() - killed < AT_ONCE_S
    lost.process.join()
    send_orders(survivors, engine, 2, ["sum"] * 2)  # they have closed the group before
    assert engine != "shm" or not listeners_at(addresses)
    assert answers(survivors) == [True] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["direct", "gather", "tree", ""])
def test_sums_from_a_gpu_have_the_same_bits(followers: list[Member], way: str) -> None:
    case = Case(5, 5, divisor=3.0, way=way, device="cuda:0")
    send_orders(followers[:2], "grpc", 1, ["sum"] * 2, case=case)
    assert answers(followers[:2]) == [True] * 2


def test_a_refused_rendezvous_is_raised_and_an_absent_peer_fails_the_forming() -> None:
    addresses: list[bytes] = []

    def refuse(address: bytes) -> list[bytes]:
        addresses.append(address)
        raise StaleError("membership 3 is over")

    with pytest.raises(StaleError, match="membership 3"):
        form_gloo(0, 2, "127.0.0.1", refuse, 5.0)
    with pytest.raises(ExchangeError, match="cannot form a group of 2"):
        form_gloo(1, 2, "127.0.0.1", lambda address: [addresses[0], address], 1.0)
