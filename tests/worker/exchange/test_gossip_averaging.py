"""Mixing among real processes: the bits of W·X, and bytes between neighbours only."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.numerics.batch_shards import assign_shards
from stratagem.common.strategy.gossip_topology import graph_of, metropolis_hastings
from stratagem.common.tensors.traffic import SENT, over
from stratagem.worker.exchange import ExchangeError, GossipExchange
from stratagem.worker.exchange.buckets import flat_tensors
from stratagem.worker.mesh import form_gloo
from tests.patience import PATIENCE_S
from tests.worker.exchange.cases import raw
from tests.worker.mesh.party import Member, introduce, party, rendezvous_over

NUM_ROUNDS = 3
ODD = ((0,), (1,), (7, 3), (300_007,), (64,), ())


@dataclass(frozen=True)
class Case:
    topology: str
    num_nodes: int
    shapes: tuple[tuple[int, ...], ...] = ODD
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    """In turn."""
    bucket_bytes: int = flat_tensors.BUCKET_BYTES

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


def take_cases(pipe: Connection, _rank: int, _size: int) -> None:
    """One process serves many cases. Each is (rank, size, case)."""
    while (order := pipe.recv()) is not None:
        rank, size, case = order
        vars(flat_tensors)["BUCKET_BYTES"] = case.bucket_bytes
        link = form_gloo(rank, size, "127.0.0.1", rendezvous_over(pipe), PATIENCE_S)
        exchange = case.exchange(link, rank, size)
        own = {node: case.tensors(node) for node in assign_shards(case.num_nodes, size)[rank]}
        before = over("gloo", SENT).num_bytes
        for _ in range(NUM_ROUNDS):
            exchange.mix(1, own)
        num_bytes = over("gloo", SENT).num_bytes - before
        (total,) = exchange.sum_in_order(
            [5], lambda node, _: torch.full((5,), 0.1 * node, dtype=torch.float64)
        )
        bits = {node: [raw(tensor) for tensor in tensors] for node, tensors in own.items()}
        pipe.send((bits, num_bytes, total.tolist()))
        assert pipe.recv() == "done"  # the group stays until all members have what they need
        exchange.close()


@pytest.fixture(scope="module")
def volunteers() -> Iterator[list[Member]]:
    with party(take_cases, 4) as members:
        yield members


def play(volunteers: list[Member], size: int, case: Case) -> list[Any]:
    members = volunteers[:size]
    for rank, member in enumerate(members):
        member.pipe.send((rank, size, case))
    introduce(members)
    answers = [member.receive() for member in members]
    for member in members:
        member.pipe.send("done")
    return answers


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case("ring", 4),
        Case("star", 5),
        Case("random:1", 7),
        Case("hypercube", 4, bucket_bytes=1000),
        Case("ring", 6, shapes=((5, 7),) * 9, bucket_bytes=300),
        Case("complete", 4, dtypes=(torch.bfloat16, torch.float32, torch.float64)),
        Case("exponential", 5, shapes=((0,), (0, 3)), dtypes=(torch.float32, torch.float16)),
    ],
    ids=lambda case: f"{case.topology}-{case.num_nodes}-{case.bucket_bytes}-{len(case.dtypes)}",
)
def test_every_node_has_the_bits_of_the_plain_product(
    volunteers: list[Member], size: int, case: Case
) -> None:
    expected = [[raw(tensor) for tensor in node] for node in case.mixed(NUM_ROUNDS)]
    total = 0.0
    for node in range(1, case.num_nodes):
        total += 0.1 * node
    found: dict[int, list[bytes]] = {}
    for bits, _, sums in play(volunteers, size, case):
        found |= bits
        assert sums == [total] * 5
    assert [found[node] for node in range(case.num_nodes)] == expected


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
    volunteers: list[Member], topology: str, size: int, copies_sent: list[int]
) -> None:
    case = Case(topology, 4)
    sent = [num_bytes for _, num_bytes, _ in play(volunteers, size, case)]
    assert sent == [NUM_ROUNDS * copies * case.size_bytes for copies in copies_sent]


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


def linger(pipe: Connection, rank: int, size: int, case: Case) -> None:
    """Rank 0 joins and never mixes; the others say what became of their round."""
    link = form_gloo(rank, size, "127.0.0.1", rendezvous_over(pipe), PATIENCE_S)
    exchange = case.exchange(link, rank, size)
    own = {node: case.tensors(node) for node in assign_shards(case.num_nodes, size)[rank]}
    pipe.send("inside")
    order = pipe.recv()
    if order == "cut":
        threading.Timer(0.1, exchange.cut).start()
    try:
        exchange.mix(1, own)
        pipe.send("mixed")
    except ExchangeError as error:
        pipe.send(str(error))
    exchange.close()
    pipe.send(sorted(t.name for t in threading.enumerate() if t.name == "gloo-watch"))


@pytest.mark.parametrize("deed", ["kill", "cut"])
def test_lost_neighbour_or_a_cut_ends_the_round_for_all(deed: str) -> None:
    with party(linger, 3, Case("complete", 3)) as members:
        introduce(members)
        assert [member.receive() for member in members] == ["inside"] * 3
        if deed == "kill":
            members[0].kill()
        members[1].pipe.send("cut" if deed == "cut" else "mix")
        members[2].pipe.send("mix")
        said = [member.receive() for member in members[1:]]
        assert "mixed" not in said
        if deed == "cut":
            assert said[0] == "the exchange was cut"
        assert [member.receive() for member in members[1:]] == [[], []]
