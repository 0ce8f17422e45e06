"""Federated clients whose steps have several turns, each a whole step over its parameters."""

import torch

from stratagem.common.job import JobSpec
from stratagem.common.numerics.keys import Key
from stratagem.common.strategy import Federated, FedProx
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.sources import ClientShare, DataSources, load_data
from stratagem.worker.engine.apply_step import learning_rate_factor, set_learning_rates
from stratagem.worker.engine.optimizers import clip, make_optimizer
from stratagem.worker.federated.client_trainer import client_order
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.precision import LossScale
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.loops import (
    Prepared,
    Result,
    SetRates,
    backward,
    cut_rows,
    divide,
    federated_loop,
)
from tests.reference.objective import step_of
from tests.reference.reference_norm import gradient_norm
from tests.reference.row_batches import read


def federated_turns_loop(job: JobSpec, entrypoints: EntryPoints) -> Result:
    """`federated_loop` of a job with turns; the losses are sums of those of the turns."""
    return federated_loop(job, entrypoints, train_client=train_client_in_turns)


def train_client_in_turns(
    job: JobSpec,
    entrypoints: EntryPoints,
    prepared: Prepared,
    client: int,
    round_num: int,
    numerics: int,
    set_rates: SetRates | None,
) -> tuple[int, float, bool]:
    """Trains in place; (rows, mean loss over the round, whether any step was applied)."""
    assert set_rates is None
    model, _, randomness, _ = prepared
    strategy, device = job.strategy, torch.device("cpu")
    assert isinstance(strategy, Federated)
    share = ClientShare(client, strategy.num_clients)
    data = load_data(job, entrypoints, DataSources(), share)["train"]
    gather, scale = Gather(rows_dtype(job, model), device), LossScale.of(job.execution)
    named = list(model.named_parameters())
    start = {name: param.detach().clone() for name, param in named}
    mu = strategy.aggregation.mu if isinstance(strategy.aggregation, FedProx) else 0.0
    turns = []
    for spec in job.turns or ():
        own = [(name, param) for name, param in named if spec.holds(name)]
        optimizer = make_optimizer(spec.optimizer, own)
        factor = learning_rate_factor(spec.optimizer, round_num - 1, strategy.rounds)
        set_learning_rates(optimizer, factor)
        turns.append((spec, own, optimizer))
    epochs, num_steps, loss_sum = strategy.options.local_epochs, 0, 0.0
    for epoch in range((round_num - 1) * epochs, round_num * epochs):
        order = client_order(len(data), job.seed, client, epoch)
        for rows in torch.split(order, job.batch_size):
            loss_of_step = 0.0
            for number, (spec, own, optimizer) in enumerate(turns):
                for name, param in named:
                    param.requires_grad_(spec.holds(name))
                    param.grad = None
                objective, values = step_of(entrypoints.resolve(spec.step)), []
                for micro_batch, part in enumerate(parts := cut_rows(job, rows)):
                    key: Key = (job.seed, "client", client, round_num, num_steps, "turn", number)
                    key = (*key, micro_batch) if micro_batch else key
                    row_key = (job.seed, "row", "client", client, epoch)
                    x, y = read(gather, data, part, row_key, key, randomness)
                    value = objective(model, x, y, len(part))
                    values.append(backward(job, value, len(parts), scale))
                params = [param for _, param in own]
                loss, weight = divide(job, params, values, scale)
                for name, param in own:
                    if mu and param.grad is not None:
                        param.grad.add_(param.detach() - start[name], alpha=mu)
                clip(params, spec.optimizer.clip_norm, gradient_norm(params, numerics))
                optimizer.step()
                loss_of_step += loss / weight
            num_steps += 1
            loss_sum += loss_of_step * len(rows)
    for _, param in named:
        param.requires_grad_(True)
    return len(data), loss_sum / (len(data) * epochs), True
