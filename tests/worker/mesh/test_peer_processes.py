"""The gRPC link between real processes: the reducer's bits over it, and a member that is killed."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import pytest
import torch

from stratagem.worker.exchange import ExchangeError, mesh_exchange
from tests.patience import AT_ONCE_S, PATIENCE_S
from tests.worker.exchange.cases import Case, one_step
from tests.worker.mesh.engines import grpc_link_over, hub_in_a_thread
from tests.worker.mesh.party import introduce, party

NUM_STEPS = 3


def sum_some_steps(pipe: Connection, rank: int, size: int, case: Case) -> None:
    with hub_in_a_thread() as hub:
        params, buckets = case.make_buckets()
        exchange = mesh_exchange(buckets, grpc_link_over(hub, pipe, rank, size), case.num_shards)
        words = "equal"
        for step in range(NUM_STEPS):
            if one_step(exchange, params, case, step) != case.expected(step):
                words = f"step {step} differs on member {rank}"
        exchange.close()
        pipe.send(words)
        pipe.recv()


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, Case(5, 5)),
        pytest.param(3, Case(4, 3, dtype=torch.bfloat16), marks=pytest.mark.sweep),
    ],
)
def test_the_reducer_gives_the_same_bits_over_grpc(size: int, case: Case) -> None:
    with party(sum_some_steps, size, case) as members:
        introduce(members)
        assert [member.receive() for member in members] == ["equal"] * size


def wait_for_the_next(pipe: Connection, rank: int, size: int) -> None:
    with hub_in_a_thread() as hub:
        link = grpc_link_over(hub, pipe, rank, size)
        pipe.send("formed")
        work = link.recv((rank + 1) % size, 1, torch.empty(10))
        try:
            work.wait(2 * PATIENCE_S)
        except ExchangeError as error:
            pipe.send((time.monotonic(), str(error)))
        link.cut()
        pipe.recv()


def test_a_killed_member_is_seen_at_once() -> None:
    with party(wait_for_the_next, 3) as members:
        introduce(members)
        assert [member.receive() for member in members] == ["formed"] * 3
        killed_at_s = time.monotonic()
        members[0].kill()
        for member, where in ((members[2], "member 0"), (members[1], "member 2")):
            seen_at_s, words = member.receive()  # 2 waits for 0; 1 waits for 2, who then cuts
            assert where in words
            assert seen_at_s - killed_at_s < AT_ONCE_S
            print(f"{where} seen after {(seen_at_s - killed_at_s) * 1000:.0f} ms: {words}")
