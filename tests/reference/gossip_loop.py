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
from stratagem.common.numerics.batch_shards import split_rows
from stratagem.common.numerics.numerics_rules import CURRENT
from stratagem.common.strategy import DataParallel, Decentralized
from stratagem.common.strategy.gossip_topology import graph_of, metropolis_hastings
from stratagem.worker.data.data_sources import DataSources, load_data
from stratagem.worker.data.datasets import Gather
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.engine.numerics.prepare_model import prepare
from stratagem.worker.engine.optim.optimizers import clip, make_optimizer
from stratagem.worker.models.model_builder import build_model, float_dtype
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.coded_gossip import CodedMixing
from tests.reference.decoded_update import is_coded
from tests.reference.hooks import Hooks
from tests.reference.loops import SetRates, backward, cut_rows, divide, is_skipped, trained_of
from tests.reference.objective import objective_of
from tests.reference.plain_job import plainly
from tests.reference.rates import Rates
from tests.reference.reference_norm import gradient_norm
from tests.reference.row_batches import read

_CPU = torch.device("cpu")


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
    data = load_data(job, entrypoints, DataSources())["train"]
    gather, loss_fn = Gather(float_dtype(job), _CPU), objective_of(job, entrypoints)
    hooks = Hooks(job, entrypoints)
    models = [
        hooks.build(build_model(job, entrypoints, device=_CPU, fresh=True))
        for _ in range(num_nodes)
    ]
    params = [[p for p in model.parameters() if p.requires_grad] for model in models]
    optimizers = [
        make_optimizer(
            job.optimizer, trained_of(model), fused=job.execution.fusion, entrypoints=entrypoints
        )
        for model in models
    ]
    randomness = [KeyedRandomness(model, _CPU) for model in models]
    executions = [
        prepare(model, plainly(job), _CPU, keyed)
        for model, keyed in zip(models, randomness, strict=True)
    ]
    steps_per_epoch = -(-len(data) // job.batch_size)
    total_steps = job.steps or (job.epochs or 0) * steps_per_epoch
    rates = [Rates(job, optimizer, total_steps, entrypoints) for optimizer in optimizers]
    coded = CodedMixing(job, models, numerics) if is_coded(job) else None
    losses: list[float] = []
    of_nodes: list[list[float]] = [[] for _ in range(num_nodes)]
    distances: list[float] = []
    apart: list[float] = []
    spreads: list[float] = []
    step_weights: list[float] = []
    for step in range(total_steps if num_steps is None else num_steps):
        epoch, position = divmod(step, steps_per_epoch)
        generator = torch.Generator().manual_seed(job.seed + epoch)
        order = torch.randperm(len(data), generator=generator)
        batch = torch.split(order, job.batch_size)[position]
        loss_sum, weight_sum = 0.0, 0.0
        for node, shard in enumerate(split_rows(len(batch), num_nodes)):
            if not shard:
                continue
            before = [tensor.clone() for tensor in models[node].buffers()]
            optimizers[node].zero_grad()
            executions[node].begin_batch(len(batch))
            scale = executions[node].scale
            values = []
            for micro_batch, rows in enumerate(parts := cut_rows(job, batch[_slice(shard)])):
                key = (job.seed, step, node, micro_batch)
                x, y = read(gather, data, rows, (job.seed, "row", epoch), key, randomness[node])
                value = loss_fn(models[node], x, y, len(rows))
                values.append(backward(job, value, len(parts), scale))
            loss, weight = divide(job, params[node], values, scale)
            of_nodes[node].append(loss / weight if weight else loss)
            if is_skipped(job, loss, params[node], scale):
                for tensor, old in zip(models[node].buffers(), before, strict=True):
                    tensor.copy_(old)
                continue
            rates[node].before(step)
            if set_rates is not None:
                set_rates(optimizers[node], step)
            step_key = (job.seed, step, node, 0)
            hooks.gradients(trained_of(models[node]), step + 1, step_key, randomness[node])
            norm = gradient_norm(params[node], numerics)
            clip(params[node], job.optimizer.clip_norm, norm)
            optimizers[node].step()
            rates[node].after()
            loss_sum += loss
            weight_sum += weight
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


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


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
