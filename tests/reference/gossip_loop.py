"""What "correct" means for Decentralized: D-PSGD in one process, as a loop.

Shares model, data, loss, optimizer, keyed randomness, precision and compiled code with the engine,
and the mixing matrix, but none of its stepping, transport, layout or state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.strategy import DataParallel, Decentralized
from stratagem.common.strategy.topology import graph_of, metropolis_hastings
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.coded_gossip import CodedMixing
from tests.reference.decoded_update import is_coded
from tests.reference.loops import SetRates
from tests.reference.replicas import Replicas


@dataclass(frozen=True, slots=True)
class GossipResult:
    """Where the loop ended."""

    mean: Mapping[str, Tensor]
    """Of all nodes' state_dicts, in their own dtypes; integers are node 0's."""
    nodes: list[Mapping[str, Tensor]]
    losses: list[float]
    """Of each step, over all nodes' rows."""
    of_nodes: list[list[float]]
    """The losses of each node's steps."""
    weights: list[float]
    """What each step's loss counts for: its rows, or tokens."""
    distance: float
    """sqrt((1/N) Σ ‖x_i - mean‖²) over the trainable parameters."""
    distances: list[float]
    """The same after each step."""
    apart: list[float]
    """Before each step's mixing sqrt((1/2N) Σ_ij w_ij ‖x_i - x_j‖²)."""
    spreads: list[float]
    """`distance`, but before each step's mixing."""


def gossip_loop(
    job: JobSpec,
    entrypoints: EntryPoints,
    num_steps: int | None = None,
    numerics: int = CURRENT,
    set_rates: SetRates | None = None,
) -> GossipResult:
    """Each step: every node takes a local step on its shard of the batch, and then all mix."""
    strategy = job.strategy
    assert isinstance(strategy, DataParallel)
    assert isinstance(strategy.aggregation, Decentralized)
    num_nodes = strategy.num_replicas
    weights = metropolis_hastings(graph_of(strategy.aggregation.topology, num_nodes, job.seed))
    replicas = Replicas(job, entrypoints, num_nodes, numerics, set_rates)
    models, params = replicas.models, replicas.params
    coded = CodedMixing(job, models, numerics) if is_coded(job) else None
    losses: list[float] = []
    of_nodes: list[list[float]] = [[] for _ in range(num_nodes)]
    distances: list[float] = []
    apart: list[float] = []
    spreads: list[float] = []
    step_weights: list[float] = []
    for step in range(replicas.num_steps if num_steps is None else num_steps):
        taken = replicas.take_step(step)
        for node, loss in taken.losses.items():
            of_nodes[node].append(loss)
        loss_sum, weight_sum = taken.loss_sum, taken.weight
        losses.append(loss_sum / weight_sum if weight_sum else math.nan)
        step_weights.append(weight_sum)
        apart.append(_apart(params, weights))
        spreads.append(_spread(params))
        if coded is None:
            _mix(params, weights)
        else:
            coded.mix(step + 1, params, weights)
        distances.append(_spread(params))
    states: list[Mapping[str, Tensor]] = [model.state_dict() for model in models]
    distance = _spread(params)
    return GossipResult(
        *(_mean(states), states, losses, of_nodes, step_weights),
        *(distance, distances, apart, spreads),
    )


@torch.no_grad()
def _mix(params: list[list[nn.Parameter]], weights: tuple[dict[int, float], ...]) -> None:
    """x_i <- Σ_j w_ij x_j, in order of j, in float64."""
    before = [[param.to(torch.float64, copy=True) for param in each] for each in params]
    for node, own in enumerate(params):
        for place, param in enumerate(own):
            first, *others = [before[j][place] * weight for j, weight in weights[node].items()]
            for term in others:
                first = first + term
            param.copy_(first)


def _mean(states: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    mean = dict(states[0])
    for name, first in states[0].items():
        if first.is_floating_point():
            total = first.double()
            for other in states[1:]:
                total = total + other[name].double()
            mean[name] = (total / len(states)).to(first.dtype)
    return mean


@torch.no_grad()
def _apart(params: list[list[nn.Parameter]], weights: tuple[dict[int, float], ...]) -> float:
    square = sum(
        weight * (own.double() - other.double()).square().sum().item()
        for node, row in enumerate(weights)
        for neighbour, weight in row.items()
        for own, other in zip(params[node], params[neighbour], strict=True)
    )
    return math.sqrt(square / (2 * len(params)))


@torch.no_grad()
def _spread(params: list[list[nn.Parameter]]) -> float:
    square = 0.0
    for same in zip(*params, strict=True):
        values = torch.stack([param.double() for param in same])
        square += (values - values.mean(0)).square().sum().item()
    return math.sqrt(square / len(params))
