"""Real processes over every engine: the sum's bits, whoever computes which shards, and failures."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import StaleError
from stratagem.worker.exchange import (
    ExchangeError,
    GradientBuckets,
    GradientReducer,
    mesh_exchange,
)
from stratagem.worker.mesh import form_gloo
from tests.patience import AT_ONCE_S, PATIENCE_S, growing
from tests.worker.exchange.cases import Case, one_step
from tests.worker.mesh.engines import ENGINES, THREADS, Former, former, num_meetings
from tests.worker.mesh.party import Member, introduce, party

NUM_STEPS = 3
LONG_S = 2 * PATIENCE_S
"""A deadline that no test waits for."""


@dataclass(frozen=True)
class Place:
    """Which member of which group a process is."""

    engine: str
    rank: int
    size: int


def form(
    former: Former, place: Place, buckets: GradientBuckets, case: Case, deadline_s: float
) -> GradientReducer:
    case.configure()
    link = former.form(place.engine, place.rank, place.size)
    return mesh_exchange(buckets, link, case.num_shards, deadline_s=deadline_s)


def sum_some_steps(pipe: Connection, members: Former, place: Place, case: Case) -> None:
    params, buckets = case.make_buckets()
    exchange = form(members, place, buckets, case, LONG_S)
    sums = [digests(one_step(exchange, params, case, step)) for step in range(NUM_STEPS)]
    exchange.close()
    pipe.send(sums)


def digests(tensors: list[bytes]) -> list[str]:
    return [blake2b(tensor).hexdigest() for tensor in tensors]


@lru_cache(maxsize=1)
def expected_of(case: Case) -> list[list[str]]:
    """Digests of what every member must have after each step; for all engines, worked out once."""
    return [digests(case.expected(step)) for step in range(NUM_STEPS)]


def take_cases(pipe: Connection, _rank: int, _size: int) -> None:
    """One process serves many cases: starting it costs far more than a case."""
    with former(pipe) as members:
        while (order := pipe.recv()) is not None:
            place, case = order
            sum_some_steps(pipe, members, place, case)
            assert pipe.recv() == "done"  # the group stays until all members have its sums


@pytest.fixture(scope="module")
def volunteers() -> Iterator[list[Member]]:
    with party(take_cases, 5) as members:
        yield members


SMALL = (0, 1, 7, 10_003)
WAYS = [
    (size, Case(num_shards, num_live, sizes, num_rest=2, divisor=3.0, way=way))
    for way in ("direct", "gather", "tree")
    for size, num_shards, num_live, sizes in [
        (1, 2, 2, SMALL),
        (2, 2, 2, SMALL),
        (3, 3, 3, SMALL),
        (3, 7, 6, (1,)),
        (4, 9, 3, SMALL),
        (5, 5, 5, (7,)),
        (5, 13, 11, SMALL),
    ]
]


@pytest.mark.parametrize("engine", ["gloo", pytest.param("grpc", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("size", "case"), WAYS, ids=lambda value: getattr(value, "way", str(value))
)
def test_every_way_has_the_same_bits(
    volunteers: list[Member], engine: str, size: int, case: Case
) -> None:
    check(volunteers[:size], engine, case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["direct", "gather", "tree", ""])
def test_sums_from_a_gpu_have_the_same_bits(volunteers: list[Member], way: str) -> None:
    check(volunteers[:2], "grpc", Case(5, 5, divisor=3.0, way=way, device="cuda:0"))


GROUPS = [
    (1, Case(3, 3)),
    (2, Case(2, 2)),
    (2, Case(2, 2, dtype=torch.float64)),
    (2, Case(2, 2, dtype=torch.bfloat16)),
    (2, Case(5, 5)),
    (2, Case(3, 3, dtype=torch.bfloat16, divisor=7.0)),
    (3, Case(3, 3, divisor=3.0)),
    (2, Case(5, 2, dtype=torch.float64)),
    (2, Case(2, 2, sizes=(8_000_000,), num_rest=0)),
    (2, Case(2, 2, piece_bytes=1 << 18)),
    (3, Case(4, 4, piece_bytes=1 << 18)),
    (3, Case(4, 4)),
    (3, Case(3, 2)),
    (3, Case(4, 1, dtype=torch.bfloat16)),
    (3, Case(3, 3, num_rest=40_001)),
    (4, Case(4, 4)),
    (4, Case(6, 3)),
    (4, Case(4, 4, divisor=3.0)),
    (5, Case(5, 5)),
    (5, Case(13, 11, sizes=(0, 1, 7, 100_003), divisor=11.0)),
]


# gloo and gRPC carry the same transfers in the same order: a third of the groups for the second.
@pytest.mark.parametrize(
    ("engine", "size", "case"),
    [
        (engine, *group)
        for engine in ENGINES
        for group in (GROUPS[1::3] if engine == "grpc" else GROUPS)
    ],
    ids=lambda value: (
        f"{value.num_live}of{value.num_shards}-{value.dtype}-{len(value.sizes)}"
        if isinstance(value, Case)
        else str(value)
    ),
)
def test_every_member_holds_the_bits_of_the_single_process_sum(
    volunteers: list[Member], engine: str, size: int, case: Case
) -> None:
    check(volunteers[:size], engine, case)


def check(members: list[Member], engine: str, case: Case) -> None:
    """All members have the sums of one process, after each step."""
    for rank, member in enumerate(members):
        member.pipe.send((Place(engine, rank, len(members)), case))
    for _ in range(num_meetings(engine)):
        introduce(members)
    for rank, member in enumerate(members):
        assert member.receive() == expected_of(case), f"member {rank}"
    for member in members:
        member.pipe.send("done")


def follow_orders(pipe: Connection, _rank: int, _size: int, case: Case) -> None:
    """Member of one group after the other; each order is (place, step, what to do, deadline)."""
    params, buckets = case.make_buckets()
    with former(pipe) as members:
        while (order := pipe.recv()) is not None:
            place, step, deed, deadline_s = order
            exchange = form(members, place, buckets, case, deadline_s)
            pipe.send("formed")
            pipe.send(follow(pipe, exchange, params, case, step, deed))
            exchange.close()
            left = [thread for thread in threading.enumerate() if thread.name in THREADS]
            for thread in left:  # one that was given up ends with what it waits for
                thread.join(PATIENCE_S / 2)
            pipe.send(sorted(thread.name for thread in left if thread.is_alive()))


def follow(
    pipe: Connection, exchange: GradientReducer, params: Any, case: Case, step: int, deed: str
) -> bool | str:
    """Whether the sum was right, or why there is none; a cut must be seen at once."""
    cut_at_s: list[float] = []

    def cut() -> None:
        cut_at_s.append(time.monotonic())
        exchange.cut()

    try:
        if deed == "linger":
            exchange.begin_step(step, exchange.party.owned, case.num_live)
            pipe.send("inside")
            pipe.recv()  # until killed, or told to go on
        if deed == "cut":
            threading.Timer(0.2, cut).start()
        return one_step(exchange, params, case, step) == case.expected(step)
    except ExchangeError as error:
        lag_s = time.monotonic() - cut_at_s[-1] if deed == "cut" else 0.0
        return str(error) if lag_s < AT_ONCE_S else f"slow: {lag_s}"


def order(
    engine: str, members: list[Member], step: int, deeds: list[str], deadline_s: float = LONG_S
) -> None:
    for rank, (member, deed) in enumerate(zip(members, deeds, strict=True)):
        member.pipe.send((Place(engine, rank, len(members)), step, deed, deadline_s))
    for _ in range(num_meetings(engine)):
        introduce(members)
    assert [member.receive() for member in members] == ["formed"] * len(members)


def answers(members: list[Member]) -> list[Any]:
    """What each says about its step; afterwards its exchange is closed and its thread gone."""
    told = [member.receive() for member in members]
    assert all(member.receive() == [] for member in members)
    return told


CASE = Case(4, 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_survivors_of_a_killed_peer_redo_the_step_with_the_same_bits(engine: str) -> None:
    with party(follow_orders, 3, CASE) as members:
        order(engine, members, 1, ["sum"] * 3)
        assert answers(members) == [True] * 3
        order(engine, members, 2, ["sum", "sum", "linger"])
        assert members[2].receive() == "inside"
        members[2].kill()
        killed = time.monotonic()
        survivors = members[:2]
        for member in survivors:
            assert "member" in member.receive()
        assert time.monotonic() - killed < AT_ONCE_S
        assert all(member.receive() == [] for member in survivors)
        order(engine, survivors, 2, ["sum"] * 2)
        assert answers(survivors) == [True] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_peer_is_given_up_at_the_deadline(engine: str) -> None:
    with party(follow_orders, 3, CASE) as members:
        for deadline_s in growing(1.0):
            order(engine, members, 1, ["sum", "sum", "linger"], deadline_s=deadline_s)
            assert members[2].receive() == "inside"
            members[2].freeze()
            told = answers(members[:2])
            assert all("member" in words for words in told), told
            if any("member 2" in words for words in told):
                break  # else a survivor was so slow that the other one gave up waiting for it
            members[2].wake()
            members[2].pipe.send("leave")
            assert "member" in members[2].receive()
            assert members[2].receive() == []
        assert any("member 2" in words for words in told), told
        order(engine, members[:2], 1, ["sum"] * 2)
        assert answers(members[:2]) == [True] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cut_ends_a_blocked_finish_here_and_at_the_peers(engine: str) -> None:
    with party(follow_orders, 3, CASE) as members:
        order(engine, members, 1, ["cut", "sum", "linger"])
        assert members[2].receive() == "inside"
        begun = time.monotonic()
        told = answers(members[:2])
        assert "cut" in told[0]
        assert "member" in told[1]
        assert time.monotonic() - begun < AT_ONCE_S


def test_a_refused_rendezvous_is_raised_and_an_absent_peer_fails_the_forming() -> None:
    addresses: list[bytes] = []

    def refuse(address: bytes) -> list[bytes]:
        addresses.append(address)
        raise StaleError("membership 3 is over")

    with pytest.raises(StaleError, match="membership 3"):
        form_gloo(0, 2, "127.0.0.1", refuse, 5.0)
    with pytest.raises(ExchangeError, match="cannot form a group of 2"):
        form_gloo(1, 2, "127.0.0.1", lambda address: [addresses[0], address], 1.0)
