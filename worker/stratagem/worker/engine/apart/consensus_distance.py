"""The exact distance of the nodes of a gossip party from their mean."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stratagem.worker.exchange.buckets.flat_tensors import flatten, plan_buckets
from stratagem.worker.exchange.gossip.gossip_averaging import GossipExchange


@torch.no_grad()
def consensus_distance(exchange: GossipExchange, tensors: Mapping[int, Sequence[Tensor]]) -> float:
    """Computes sqrt(Σ_i ‖x_i - mean‖² / N) over the parameters x_i of all N nodes.

    tensors: of the own nodes, of the same shapes everywhere. All members call it equally often and
    get the same bits, independent of who owns which nodes. The mean takes one sum over all nodes in
    float64; each member sends at most twice its bytes. Raises ExchangeError.
    """
    first = next(iter(tensors.values()))
    buckets, device = plan_buckets(first), first[0].device

    def term(node: int, index: int) -> Tensor:
        bucket = buckets[index]
        flat = torch.empty(bucket.numel, dtype=torch.float64, device=device)
        return flatten(bucket, tensors[node], flat)

    totals = exchange.sum_in_order([bucket.numel for bucket in buckets], term)
    squares = dict.fromkeys(tensors, 0.0)
    for index, total in enumerate(totals):
        total.div_(exchange.num_nodes)
        for node in tensors:
            away = term(node, index).sub_(total)
            squares[node] += float(torch.dot(away, away))

    def of_node(node: int, _: int) -> Tensor:
        return torch.tensor([squares[node]], dtype=torch.float64, device=device)

    (square,) = exchange.sum_in_order([1], of_node)
    return math.sqrt(float(square) / exchange.num_nodes)
