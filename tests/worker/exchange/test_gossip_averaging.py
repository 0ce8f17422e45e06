"""Mixing among members: the bits of W·X, and bytes between neighbours only."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.numerics.shards import assign_shards
from stratagem.common.strategy.topology import graph_of, metropolis_hastings
from stratagem.common.tensors.stream import SENT, over
from stratagem.worker.exchange import ExchangeError, GossipExchange, layout
from tests.every_pair import every_value
from tests.patience import PATIENCE_S
from tests.worker.exchange.cases import CountingLink, raw
from tests.worker.mesh.engines import THREADS, links_of

NUM_ROUNDS = 3
ODD = ((0,), (1,), (7, 3), (30_007,), (64,), ())


@dataclass(frozen=True)
class Case:
    topology: str
    num_nodes: int
    shapes: tuple[tuple[int, ...], ...] = ODD
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    """In turn."""
    bucket_bytes: int = layout.FLAT_BYTES

    def tensors(self, node: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(node)
        return [
            torch.randn(shape, generator=generator).to(self.dtypes[i % len(self.dtypes)])
            for i, shape in enumerate(self.shapes)
        ]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors(0))

    @property
    def weights(self) -> tuple[dict[int, float], ...]:
        return metropolis_hastings(graph_of(self.topology, self.num_nodes, 0))

    def exchange(
        self, link: Any, rank: int, size: int, deadline_s: float = PATIENCE_S
    ) -> GossipExchange:
        nodes = assign_shards(self.num_nodes, size)
        return GossipExchange(link, rank, nodes, self.weights, deadline_s=deadline_s)

    def mixed(self, num_rounds: int) -> list[list[Tensor]]:
        """All nodes' tensors after some rounds, by plain arithmetic."""
        values = [self.tensors(node) for node in range(self.num_nodes)]
        for _ in range(num_rounds):
            before = [[t.to(torch.float64, copy=True) for t in node] for node in values]
            for node, row in zip(values, self.weights, strict=True):
                for place, tensor in enumerate(node):
                    terms = [before[j][place] * weight for j, weight in row.items()]
                    total = terms[0]
                    for term in terms[1:]:
                        total = total + term
                    tensor.copy_(total)
        return values


def play(case: Case, size: int) -> tuple[list[list[list[bytes]]], list[list[float]], list[int]]:
    """By member, in a thread each: the bits of its nodes, a sum over all, and the bytes it sent."""
    with links_of("gloo", size) as links, ThreadPoolExecutor(size) as pool:
        counting = [CountingLink(link) for link in links]

        def mix(rank: int) -> tuple[list[list[bytes]], GossipExchange]:
            exchange = case.exchange(counting[rank], rank, size)
            own = {node: case.tensors(node) for node in assign_shards(case.num_nodes, size)[rank]}
            for _ in range(NUM_ROUNDS):
                exchange.mix(1, own)
            return [[raw(tensor) for tensor in tensors] for tensors in own.values()], exchange

        before = over("gloo", SENT).num_bytes
        bits, exchanges = zip(*pool.map(mix, range(size)), strict=True)
        sent = [link.num_bytes for link in counting]
        assert over("gloo", SENT).num_bytes - before == sum(sent)

        def add(exchange: GossipExchange) -> list[float]:
            def fill(node: int, _: int) -> Tensor:
                return torch.full((5,), 0.1 * node, dtype=torch.float64)

            return exchange.sum_in_order([5], fill)[0].tolist()

        totals = [*pool.map(add, exchanges)]
        for exchange in exchanges:
            exchange.close()
    return [*bits], totals, sent


CASES = [
    Case("ring", 4),
    Case("star", 5),
    Case("random:1", 7),
    Case("hypercube", 4, bucket_bytes=1000),
    Case("ring", 6, shapes=((5, 7),) * 9, bucket_bytes=300),
    Case("complete", 4, dtypes=(torch.bfloat16, torch.float32, torch.float64)),
    Case("exponential", 5, shapes=((0,), (0, 3)), dtypes=(torch.float32, torch.float16)),
]


@pytest.mark.parametrize(
    ("case", "size"),
    every_value(CASES, [4, 2, 3]),
    ids=lambda each: f"{each.topology}-{each.num_nodes}" if isinstance(each, Case) else str(each),
)
def test_every_node_has_the_bits_of_the_plain_product(
    case: Case, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "FLAT_BYTES", case.bucket_bytes)
    bits, totals, _ = play(case, size)
    total = 0.0
    for node in range(1, case.num_nodes):
        total += 0.1 * node
    assert totals == [[total] * 5] * size
    expected = [[raw(tensor) for tensor in node] for node in case.mixed(NUM_ROUNDS)]
    assert [node for own in bits for node in own] == expected


@pytest.mark.parametrize(
    ("topology", "size", "copies_sent"),
    [
        ("ring", 4, [2, 2, 2, 2]),  # one to each neighbour
        ("star", 4, [3, 1, 1, 1]),
        ("complete", 4, [3, 3, 3, 3]),
        # Nodes 0 1 | 2 3: only 0 and 1, which have neighbours over there, go there, and once.
        ("ring", 2, [2, 2]),
        ("complete", 2, [2, 2]),
        ("star", 2, [1, 2]),  # the centre goes once, though it has two neighbours there
    ],
)
def test_parameters_go_once_to_each_member_with_a_neighbour_and_nowhere_else(
    topology: str, size: int, copies_sent: list[int]
) -> None:
    case = Case(topology, 4)
    assert play(case, size)[2] == [NUM_ROUNDS * copies * case.size_bytes for copies in copies_sent]


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_one_member_alone_has_the_same_bits(num_nodes: int) -> None:
    case = Case("ring", num_nodes)
    exchange = case.exchange(None, 0, 1)
    own = {node: case.tensors(node) for node in range(num_nodes)}
    start = {node: [tensor.clone() for tensor in tensors] for node, tensors in own.items()}
    distances = exchange.mix(1, own)
    for node, tensors in enumerate(case.mixed(1)):
        assert [raw(tensor) for tensor in own[node]] == [raw(tensor) for tensor in tensors]
        away = sum(
            float((a.double() - b.double()).square().sum())
            for a, b in zip(own[node], start[node], strict=True)
        )
        assert distances[node].moved == pytest.approx(away, rel=1e-5, abs=1e-12)
        apart = sum(
            weight * float((a.double() - b.double()).square().sum())
            for j, weight in case.weights[node].items()
            for a, b in zip(start[node], start[j], strict=True)
        )
        assert distances[node].apart == pytest.approx(apart, rel=1e-9, abs=1e-12)
    exchange.cut()
    with pytest.raises(ExchangeError, match="was cut"):
        exchange.mix(1, own)
    exchange.close()


def test_tensors_that_are_not_contiguous_are_mixed_too() -> None:
    case = Case("ring", 2)
    exchange = case.exchange(None, 0, 1)
    own = {node: [torch.arange(6.0).view(2, 3).t() + node] for node in range(2)}
    exchange.mix(1, own)
    assert torch.equal(own[0][0], torch.arange(6.0).view(2, 3).t() + 0.5)


@pytest.mark.parametrize("is_cut", [False, True], ids=["leaves", "cut"])
def test_a_lost_neighbour_or_a_cut_ends_the_round_for_all(is_cut: bool) -> None:
    """The first joins and never mixes."""
    case = Case("complete", 3)
    with links_of("gloo", 3) as links, ThreadPoolExecutor(2) as pool:
        exchanges = [case.exchange(link, rank, 3) for rank, link in enumerate(links)]

        def mix(rank: int) -> str:
            with pytest.raises(ExchangeError) as caught:
                exchanges[rank].mix(1, {rank: case.tensors(rank)})
            return str(caught.value)

        said = [pool.submit(mix, rank) for rank in (1, 2)]
        threading.Timer(0.1, exchanges[1].cut if is_cut else links[0].cut).start()
        assert said[0].result() == "the exchange was cut" or not is_cut
        assert "member" in said[1].result()
        for exchange in exchanges:
            exchange.close()
    assert not [thread for thread in threading.enumerate() if thread.name in THREADS]
