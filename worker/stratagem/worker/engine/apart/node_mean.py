"""The mean of the models of all nodes of a decentralized run, and how far each of them is from it.

Over float64 values in order of node, rounded once; integers are node 0's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stratagem.worker.exchange.buckets.flat_tensors import flatten, plan_buckets, unflatten
from stratagem.worker.exchange.gossip.gossip_averaging import GossipExchange


@torch.no_grad()
def take_mean(
    mean: nn.Module, nodes: Mapping[int, nn.Module], exchange: GossipExchange
) -> dict[int, float]:
    """Sets `mean` to that of all nodes, of which these are the own ones; returns for each of those
    the squared distance of its parameters to it."""
    own = {number: _averaged(node) for number, node in nodes.items()}
    target, is_param = _averaged(mean), _is_trainable(mean)
    buckets = plan_buckets(target)

    def term(number: int, index: int) -> Tensor:
        bucket = buckets[index]
        flat = torch.empty(bucket.numel, dtype=torch.float64, device=target[0].device)
        return flatten(bucket, own[number], flat)

    totals = exchange.sum_in_order([bucket.numel for bucket in buckets], term)
    squares = dict.fromkeys(nodes, 0.0)
    for index, (bucket, total) in enumerate(zip(buckets, totals, strict=True)):
        total.div_(exchange.num_nodes)
        unflatten(bucket, total, target)
        for number in nodes:
            away = term(number, index).sub_(total).square_()
            start = 0
            for place in bucket.indices:
                stop = start + target[place].numel()
                if is_param[place]:
                    squares[number] += float(away[start:stop].sum())
                start = stop
    _copy_integers(mean, nodes, exchange)
    return squares


def _copy_integers(
    mean: nn.Module, nodes: Mapping[int, nn.Module], exchange: GossipExchange
) -> None:
    """Counters and the like are node 0's, through float64, which holds them exactly."""
    own = {number: _integers(node) for number, node in nodes.items()}
    target = _integers(mean)

    def term(number: int, index: int) -> Tensor:
        flat = own[number][index].detach().to(torch.float64).reshape(-1)
        return flat if number == 0 else torch.zeros_like(flat)

    totals = exchange.sum_in_order([tensor.numel() for tensor in target], term)
    for tensor, total in zip(target, totals, strict=True):
        tensor.copy_(total.view(tensor.shape))


def _stored(model: nn.Module) -> list[Tensor]:
    """The tensors of the state_dict, tied ones once."""
    return list({id(t): t for t in model.state_dict(keep_vars=True).values()}.values())


def _averaged(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in _stored(model) if tensor.is_floating_point()]


def _is_trainable(model: nn.Module) -> list[bool]:
    return [tensor.requires_grad for tensor in _stored(model) if tensor.is_floating_point()]


def _integers(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in _stored(model) if not tensor.is_floating_point()]
