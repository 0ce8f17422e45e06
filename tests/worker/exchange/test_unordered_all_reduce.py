"""Ring and native all-reduce: about the sum, with the same bits everywhere; what a ring sends."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from stratagem.worker.exchange import ExchangeError, mesh_exchange
from stratagem.worker.mesh import Link, form_gloo
from stratagem.worker.mesh.link import PendingTransfer
from tests.patience import PATIENCE_S
from tests.worker.exchange.cases import Case, one_step
from tests.worker.mesh.engines import form_all


class CountingLink:
    """A link that adds up how many elements are sent over it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.rank, self.size = link.rank, link.size
        self.name, self.in_order = link.name, link.in_order
        self.recv, self.cut, self.close = link.recv, link.cut, link.close
        self.num_sent = 0

    def send(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer:
        self.num_sent += tensor.numel()
        return self.link.send(peer, tag, tensor)


@contextmanager
def gloo_links(size: int) -> Iterator[list[Link]]:
    """All members in this process, each formed in a thread of its own."""
    addresses: list[bytes] = [b""] * size
    barrier = threading.Barrier(size)

    def meet(rank: int) -> Callable[[bytes], list[bytes]]:
        def rendezvous(address: bytes) -> list[bytes]:
            addresses[rank] = address
            barrier.wait(PATIENCE_S)
            return addresses

        return rendezvous

    with ThreadPoolExecutor(size) as pool:
        formed = [
            pool.submit(form_gloo, rank, size, "127.0.0.1", meet(rank), PATIENCE_S)
            for rank in range(size)
        ]
        links: list[Link] = [each.result() for each in formed]
    try:
        yield links
    finally:
        for link in links:
            link.close()


def sum_once(link: Link, all_reduce: str, case: Case) -> list[bytes]:
    """Two steps, the sums of the second one."""
    params, buckets = case.make_buckets()
    exchange = mesh_exchange(
        buckets, link, case.num_shards, all_reduce=all_reduce, deadline_s=PATIENCE_S
    )
    assert exchange.name == f"gloo {all_reduce}"
    one_step(exchange, params, case, 0)
    return one_step(exchange, params, case, 1)


def close_to(case: Case, sums: list[bytes], step: int) -> bool:
    kinds = [case.dtype] * len(case.sizes) + [torch.float64]
    pairs = zip(sums, case.expected(step), kinds, strict=True)
    return all(
        torch.allclose(
            torch.frombuffer(bytearray(left), dtype=kind),
            torch.frombuffer(bytearray(right), dtype=kind),
            rtol=1e-5,
            atol=1e-5,
        )
        for left, right, kind in pairs
        if right
    )


CASES = [
    (2, Case(2, 2)),
    (2, Case(5, 3, divisor=3.0)),
    (3, Case(3, 3, sizes=(0, 1, 7, 100_003))),
    (4, Case(6, 2, sizes=(0, 1, 7, 100_003), num_rest=2)),
    (5, Case(5, 5, sizes=(0, 1, 7), num_rest=0, divisor=5.0)),
]


@pytest.mark.parametrize("all_reduce", ["ring", "native"])
@pytest.mark.parametrize(("size", "case"), CASES)
def test_all_members_end_with_the_same_bits_of_about_the_sum(
    all_reduce: str, size: int, case: Case
) -> None:
    with gloo_links(size) as links, ThreadPoolExecutor(size) as pool:
        sums = list(pool.map(lambda link: sum_once(link, all_reduce, case), links))
    assert all(each == sums[0] for each in sums)
    assert close_to(case, sums[0], 1)


@pytest.mark.parametrize(("size", "case"), [(1, Case(2, 2)), *CASES])
def test_a_ring_sends_each_element_as_often_as_it_must(size: int, case: Case) -> None:
    with gloo_links(size) as links, ThreadPoolExecutor(size) as pool:
        counting = [CountingLink(link) for link in links]
        sums = list(pool.map(lambda link: sum_once(link, "ring", case), counting))
    assert close_to(case, sums[0], 1)
    _, buckets = case.make_buckets()
    num_elements = sum(bucket.numel for bucket in buckets.layout.buckets)
    num_steps = 2
    assert sum(link.num_sent for link in counting) == num_steps * 2 * (size - 1) * num_elements


@pytest.mark.parametrize("all_reduce", ["ring", "native"])
def test_a_cut_and_a_silent_member_end_it(all_reduce: str) -> None:
    case = Case(3, 3)
    with gloo_links(3) as links, ThreadPoolExecutor(2) as pool:
        made = [case.make_buckets() for _ in links]
        exchanges = [
            mesh_exchange(buckets, link, 3, all_reduce=all_reduce, deadline_s=0.5)
            for (_, buckets), link in zip(made, links, strict=True)
        ]

        def fail(rank: int) -> str:
            with pytest.raises(ExchangeError) as caught:
                one_step(exchanges[rank], made[rank][0], case, 0)
            return str(caught.value)

        told = list(pool.map(fail, range(2)))  # member 2 never comes
        assert all("member" in words for words in told), told
        exchanges[2].cut()
        assert "cut" in fail(2)
        for exchange in exchanges:
            exchange.close()


def test_shared_memory_and_grpc_have_no_such_method() -> None:
    case = Case(2, 2)
    groups = form_all(2)
    with pytest.raises(ValueError, match="ring all-reduce needs an engine that sends"):
        mesh_exchange(case.make_buckets()[1], groups[0], 2, all_reduce="ring")
    for group in groups:
        group.close()
    with gloo_links(1) as (link,):
        with pytest.raises(ValueError, match="no 'native' all-reduce over gloo"):
            mesh_exchange(case.make_buckets()[1], CountingLink(link), 2, all_reduce="native")
        with pytest.raises(ValueError, match="no 'tree' all-reduce"):
            mesh_exchange(case.make_buckets()[1], link, 2, all_reduce="tree")
