"""What "correct" means: short single-process loops that distributed runs are compared with.

`plain_loop` is the loop everybody writes. `sharded_loop` is the same with each batch cut into
logical shards, whose gradients are added in the fixed tree, and each shard into micro-batches,
whose gradients are added in a row; every synchronous strategy must equal it to the bit.
`federated_loop` is FedAvg. They share model, data, loss, optimizer, keyed randomness, precision and
compiled code with the engine, but none of its stepping, buffers, exchange or state; they never
compute activations twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.common.job import JobSpec
from stratagem.common.numerics.keys import Key
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.numerics.shards import Node, split_rows, tree_sum
from stratagem.common.strategy import Federated, FedProx
from stratagem.worker.data.datasets import Dataset, Gather
from stratagem.worker.data.sources import ClientShare, DataSources, load_data
from stratagem.worker.data.streams import StreamDataset
from stratagem.worker.engine.callbacks import StepView
from stratagem.worker.engine.optimizers import clip, make_optimizer
from stratagem.worker.federated.client_trainer import client_order
from stratagem.worker.models.build import build_model
from stratagem.worker.models.nodes import program_of, separate_tied
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.model import ModelExecution, prepare
from stratagem.worker.numerics.precision import LossScale
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.objectives.objective import LossValue
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference import stream_rows
from tests.reference.decoded_update import is_coded, received
from tests.reference.hooks import Hooks
from tests.reference.objective import Objective, objective_of
from tests.reference.plain_job import plainly
from tests.reference.private_round import PrivateRounds
from tests.reference.rates import Rates
from tests.reference.reference_norm import gradient_norm
from tests.reference.regional_mean import regional_state
from tests.reference.robust import robust_state
from tests.reference.row_batches import epoch_batches, read
from tests.reference.secure_round import secure_means
from tests.reference.server_optimizer import Slots, server_step
from tests.reference.stream_rows import PlainRows, PlainStreams
from tests.reference.weighing import fair_state, loss_before, nova_state
from tests.reference.weight_average import GlobalAverage, RunningAverage

_CPU = torch.device("cpu")


SetRates = Callable[[torch.optim.Optimizer, int], None]
"""Sets the learning rates of an optimizer for a step (or a round), counted from 0."""
Prepared = tuple[nn.Module, ModelExecution, KeyedRandomness, Hooks]
TrainClient = Callable[
    [JobSpec, EntryPoints, Prepared, int, int, int, SetRates | None], tuple[int, float, bool]
]
"""(job, entry points, prepared, client, round, numerics, rates) -> (rows, loss, has learned)."""


@dataclass(frozen=True, slots=True)
class Result:
    """Where a loop ended: the model's state_dict, and the loss of each step (or round)."""

    state: Mapping[str, Tensor]
    losses: list[float]
    average: Mapping[str, Tensor] = field(default_factory=dict)
    """The model of averaged parameters, where the job has one."""
    logged: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    """Of what each step has logged, by name: the sum of mean · weight, and the weight."""


def trained_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are trained, with their names."""
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def plain_loop(job: JobSpec, entrypoints: EntryPoints, num_steps: int | None = None) -> Result:
    """Steps over whole batches."""
    model, loss_fn, params, take, *_ = _setup(job, entrypoints)
    num_rows = len(load_data(job, entrypoints, DataSources())["train"])
    total_steps = _total_steps(job, num_rows)
    optimizer = make_optimizer(
        job.optimizer, trained_of(model), fused=job.execution.fusion, entrypoints=entrypoints
    )
    rates = Rates(job, optimizer, total_steps, entrypoints)
    losses: list[float] = []
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(job.seed + epoch)
        for rows in torch.split(torch.randperm(num_rows, generator=generator), job.batch_size):
            if len(losses) == (total_steps if num_steps is None else num_steps):
                return Result(model.state_dict(), losses)
            rates.before(len(losses))
            x, y = take(rows, (job.seed, "row", epoch), (job.seed, len(losses), 0, 0))
            loss = loss_fn(model, x, y, len(rows)).mean
            optimizer.zero_grad()
            loss.backward()
            if job.optimizer.clip_norm is not None:
                nn.utils.clip_grad_norm_(params, job.optimizer.clip_norm, foreach=False)
            optimizer.step()
            rates.after()
            losses.append(loss.item())
        epoch += 1


def sharded_loop(
    job: JobSpec,
    entrypoints: EntryPoints,
    num_shards: int,
    num_steps: int | None = None,
    micro_batch_size: int | None = None,
    numerics: int = CURRENT,
    set_rates: SetRates | None = None,
) -> Result:
    """Steps over batches cut into shards and these into micro-batches; all in a fixed order.

    Micro-batches are those of the job. micro_batch_size: theirs under ModelParallel, in rows; the
    model must then be one that can be cut, and its tied parameters are summed node by node.
    set_rates: sets the rates of a step, counted from 0, where no schedule of the job does.
    """
    model, loss_fn, _, take, execution, randomness, hooks = _setup(job, entrypoints)
    scale = execution.scale
    data = load_data(job, entrypoints, DataSources())["train"]
    steps_per_epoch = len(epoch_batches(job, entrypoints, data, 0))
    total_steps = job.steps or (job.epochs or 0) * steps_per_epoch
    trained = separate_tied(model, program_of(model, job) if micro_batch_size else None)
    params = [each.param for each in trained]
    named = [(each.name, each.param) for each in trained]
    optimizer = make_optimizer(
        job.optimizer, named, fused=job.execution.fusion, entrypoints=entrypoints
    )
    buffers = [tensor for name, tensor in model.state_dict().items() if name in _buffers(model)]
    average = RunningAverage(job.weight_average, params)
    rates = Rates(job, optimizer, total_steps, entrypoints)
    losses: list[float] = []
    logged: list[dict[str, tuple[float, float]]] = []
    while len(losses) < (total_steps if num_steps is None else num_steps):
        step = len(losses)
        epoch, position = divmod(step, steps_per_epoch)
        batch = epoch_batches(job, entrypoints, data, epoch)[position]
        shards = [batch[rows.start : rows.stop] for rows in split_rows(len(batch), num_shards)]
        shards = [rows for rows in shards if len(rows)]
        execution.begin_batch(len(batch))
        before = [tensor.clone() for tensor in buffers]
        parts: list[list[Tensor]] = []
        logs: list[dict[str, Tensor]] = []
        reached: set[int] = set()
        for shard, shard_rows in enumerate(shards):
            for tensor, old in zip(buffers, before, strict=True):
                tensor.copy_(old)
            for each in trained:
                each.forget()
            weight, loss = torch.zeros(2, dtype=torch.float64).unbind()
            logs.append({})
            for micro_batch, rows in enumerate(cut_rows(job, shard_rows, micro_batch_size)):
                key = (job.seed, step, shard, micro_batch)
                x, y = take(rows, (job.seed, "row", epoch), key, randomness)
                value = loss_fn(model, x, y, len(rows))
                if value.weight or value.mean.requires_grad:
                    scale.up(value.mean * value.weight).backward()
                for name, mean, of in value.log:
                    pair = torch.tensor([float(mean) * of, of], dtype=torch.float64)
                    logs[-1][name] = logs[-1].get(name, torch.zeros_like(pair)) + pair
                weight += value.weight
                loss += value.mean.detach().double() * value.weight
            found = [each.gradient() for each in trained]
            reached |= {i for i, grad in enumerate(found) if grad is not None}
            grads = [
                wide(torch.zeros_like(param) if grad is None else grad.clone())
                for param, grad in zip(params, found, strict=True)
            ]
            changes = [
                change_of(old, new, shard, len(shards))
                for old, new in zip(before, buffers, strict=True)
            ]
            parts.append([weight, loss, *grads, *changes])
        sums = [add_in_tree([part[i] for part in parts]) for i in range(len(parts[0]))]
        total, loss_sum, grads, changes = sums[0], sums[1], sums[2:][: len(params)], sums[2:]
        divisor = total.item() if job.window.must_divide else 1.0
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            mean = (grad / (divisor * scale.value)).to(param.dtype)
            param.grad = mean if i in reached else None
        losses.append((loss_sum / total).item())
        totals = {name: add_in_tree([log[name] for log in logs]) for name in logs[0]}
        logged.append({name: (pair[0].item(), pair[1].item()) for name, pair in totals.items()})
        if is_skipped(job, losses[-1], params, scale):
            for tensor, old in zip(buffers, before, strict=True):
                tensor.copy_(old)
            continue
        for tensor, old, change in zip(buffers, before, changes[len(params) :], strict=True):
            is_whole = len(shards) == 1 and old.is_floating_point()
            mean = change / len(shards) if old.is_floating_point() else change
            tensor.copy_(change if is_whole else (old.double() + mean))
        rates.before(step)
        if set_rates is not None:
            set_rates(optimizer, step)
        hooks.gradients(named, step + 1, (job.seed, step), randomness)
        norm = gradient_norm(params, numerics)
        clip(params, job.optimizer.clip_norm, norm)
        optimizer.step()
        rates.after()
        average.update(step + 1)
        seen = StepView(step + 1, losses[-1], total.item(), len(batch), norm.item(), {})
        if hooks.step(seen):
            break
    return Result(model.state_dict(), losses, average.model_state(model), logged)


def federated_loop(
    job: JobSpec,
    entrypoints: EntryPoints,
    clients_of: Callable[[int], list[int]] | None = None,
    num_rounds: int | None = None,
    late_of: Callable[[int], Mapping[int, int]] = lambda _: {},
    numerics: int = CURRENT,
    set_rates: SetRates | None = None,
    train_client: TrainClient | None = None,
    private: PrivateRounds | None = None,
) -> Result:
    """Each round: local epochs per client, the mean over rows, the server's step.

    `clients_of(round)` names the clients of a round; all of them by default. Rounds count from 1.
    One whose every step was left out has no part in the mean.
    `late_of(round)` names those whose update comes late, with the round that they trained for.
    set_rates: sets the rates of a round, counted from 0, where no schedule of the job does.
    train_client: in place of one update in each step. private: draws the clients, clips and noises.
    """
    strategy = job.strategy
    assert isinstance(strategy, Federated)
    clients_of = private.clients_of if private is not None else clients_of
    hooks = Hooks(job, entrypoints)
    model = hooks.build(build_model(job, entrypoints, device=_CPU, fresh=True))
    randomness = KeyedRandomness(model, _CPU)
    execution = prepare(model, plainly(job), _CPU, randomness)
    world = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    live = model.state_dict(keep_vars=True)
    trained = {name for name, tensor in live.items() if tensor.requires_grad}  # tied names as well
    slots: dict[str, Slots] = {name: {} for name in world}
    losses: list[float] = []
    before: dict[int, dict[str, Tensor]] = {}  # by round
    average = GlobalAverage(job.weight_average, trained)
    for round_num in range(1, (num_rounds or strategy.rounds) + 1):
        before[round_num] = world
        chosen = clients_of(round_num) if clients_of else list(range(strategy.num_clients))
        trained_for = dict.fromkeys(chosen, round_num) | dict(late_of(round_num))
        updates: list[Update] = []
        losses_by_rows: list[tuple[int, float]] = []
        losses_before: list[float] = []
        for client, of_round in sorted(trained_for.items()):
            base = before[of_round]
            model.load_state_dict(base)
            if strategy.options.q is not None:
                losses_before.append(loss_before(job, entrypoints, model, randomness, client))
            prepared = (model, execution, randomness, hooks)
            rows, loss, has_learned = (train_client or train_one_client)(
                job, entrypoints, prepared, client, of_round, numerics, set_rates
            )
            if not has_learned:
                continue
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            if is_coded(job):
                state |= received(job, model, base, of_round, client, numerics)
            if of_round == round_num:
                losses_by_rows.append((rows, loss))
                updates.append(Update(rows, state))
            else:
                changed = {name: (state[name], base[name], world[name]) for name in trained}
                updates.append(_late(strategy, rows, round_num - of_round, state, changed))
        if private is not None:
            means = private.means(round_num, world, [update.state for update in updates])
        elif secure := strategy.options.secure_aggregation:
            states, rows_of = [u.state for u in updates], [u.weight for u in updates]
            means = secure_means(secure, world, states, rows_of)
        elif strategy.options.robust:
            means = robust_state(strategy.options.robust, [each.state for each in updates], world)
        elif strategy.options.q is not None:
            pairs = [(each.weight, each.state) for each in updates]
            means = fair_state(job, pairs, losses_before, world, trained)
        elif strategy.options.normalize is not None:
            pairs = [(each.weight, each.state) for each in updates]
            means = nova_state(job, pairs, world, trained)
        elif strategy.options.regions is not None:
            told = [(each.weight, each.state) for each in updates]
            by_client = dict(zip(sorted(trained_for), told, strict=True))
            means = regional_state(strategy.options.regions, by_client)
        else:
            means = {name: _mean_of(name, updates, numerics) for name in world}
        for name in trained & means.keys():
            means[name] = server_step(strategy, world[name], means[name], slots[name])
        world = {name: mean.to(world[name].dtype) for name, mean in means.items()}
        average.update(round_num, world)
        loss_sum = sum(rows * loss for rows, loss in losses_by_rows)
        losses.append(loss_sum / max(1, sum(rows for rows, _ in losses_by_rows)))
    return Result(world, losses, average.state(world))


@dataclass(frozen=True, slots=True)
class Update:
    """What a client adds to the mean."""

    weight: float
    state: dict[str, Tensor]
    staleness: int = 0


def _late(
    strategy: Federated,
    rows: int,
    staleness: int,
    state: dict[str, Tensor],
    changed: Mapping[str, tuple[Tensor, Tensor, Tensor]],
) -> Update:
    """What a late client has changed on its base, made to the present state; it weighs less."""
    assert strategy.options.late_updates != "refuse"
    rebased = {
        name: value.double() - base.double() + world.double()
        for name, (value, base, world) in changed.items()
    }
    weight = rows * strategy.options.late_updates.discount**staleness
    return Update(weight, {**state, **rebased}, staleness)


def train_one_client(
    job: JobSpec,
    entrypoints: EntryPoints,
    prepared: Prepared,
    client: int,
    round_num: int,
    numerics: int,
    set_rates: SetRates | None,
    anchors: list[Tensor] | None = None,
) -> tuple[int, float, bool]:
    """Trains in place; (rows, mean loss over the round, whether any step was applied).

    anchors: toward which FedProx pulls; the parameters as they are unless given.
    """
    model, execution, randomness, hooks = prepared
    scale = LossScale.of(job.execution)
    strategy = job.strategy
    assert isinstance(strategy, Federated)
    data = load_data(job, entrypoints, DataSources(), ClientShare(client, strategy.num_clients))[
        "train"
    ]
    gather, loss_fn = Gather(rows_dtype(job, model), _CPU), objective_of(job, entrypoints)
    params = [param for _, param in trained_of(model)]
    start = anchors or [param.detach().clone() for param in params]
    mu = strategy.aggregation.mu if isinstance(strategy.aggregation, FedProx) else 0.0
    optimizer = make_optimizer(
        job.optimizer, trained_of(model), fused=job.execution.fusion, entrypoints=entrypoints
    )
    epochs = strategy.options.local_epochs
    own = job.optimizer.schedule is not None and job.optimizer.schedule.entrypoint is not None
    num_scheduled = epochs * -(-len(data) // job.batch_size) if own else strategy.rounds
    rates = Rates(job, optimizer, num_scheduled, entrypoints)
    rates.before(round_num - 1)
    if set_rates is not None:
        set_rates(optimizer, round_num - 1)
    loss_sum, num_rows, num_steps, num_applied, num_seen = 0.0, 0.0, 0, 0, 0
    for epoch in range((round_num - 1) * epochs, round_num * epochs):
        for dataset, rows in _client_batches(job, data, client, epoch):
            num_seen += len(rows)
            before = [tensor.clone() for tensor in model.buffers()]
            optimizer.zero_grad()
            execution.begin_batch(len(rows))
            key = (job.seed, "client", client, round_num, num_steps)
            values = []
            for micro_batch, part in enumerate(parts := cut_rows(job, rows)):
                own_key: Key = (*key, micro_batch) if micro_batch else key
                row_key = (job.seed, "row", "client", client, epoch)
                x, y = read(gather, dataset, part, row_key, own_key, randomness)
                value = loss_fn(model, x, y, len(part))
                values.append(backward(job, value, len(parts), scale))
            loss, weight = divide(job, params, values, scale)
            for param, anchor in zip(params, start, strict=True):
                if mu and param.grad is not None:
                    param.grad.add_(param.detach() - anchor, alpha=mu)
            num_steps += 1
            if is_skipped(job, loss, params, scale):
                for tensor, old in zip(model.buffers(), before, strict=True):
                    tensor.copy_(old)
                continue
            hooks.gradients(trained_of(model), num_steps, key, randomness)
            clip(params, job.optimizer.clip_norm, gradient_norm(params, numerics))
            optimizer.step()
            rates.after()
            num_applied += 1
            loss_sum += loss
            num_rows += weight
            if hooks.step(StepView(num_steps, loss / weight, weight, len(rows), 0.0, {})):
                return len(data), loss_sum / num_rows, True
    return num_seen // epochs, loss_sum / num_rows if num_rows else 0.0, num_applied > 0


def _client_batches(
    job: JobSpec, data: Dataset, client: int, epoch: int
) -> list[tuple[Dataset | PlainRows, Tensor]]:
    if isinstance(data, StreamDataset):
        return list(stream_rows.client_batches(job, data, client, epoch))
    order = client_order(len(data), job.seed, client, epoch)
    return [(data, rows) for rows in torch.split(order, job.batch_size)]


def cut_rows(job: JobSpec, rows: Tensor, size: int | None = None) -> list[Tensor]:
    """The micro-batches of a share: of `size` rows, or as the job says."""
    if size is not None:
        return list(torch.split(rows, size))
    return [rows[cut.start : cut.stop] for cut in job.window.cut(len(rows))]


def backward(
    job: JobSpec, value: LossValue, num_micro_batches: int, scale: LossScale
) -> tuple[float, float]:
    """(mean · weight, weight) of a micro-batch. A single one's mean is differentiated as it is."""
    is_single = num_micro_batches == 1 and job.window.must_divide
    root = value.mean if is_single else value.mean * value.weight
    if value.weight or value.mean.requires_grad:
        scale.up(root).backward()
    return value.mean.item() * value.weight, value.weight


def divide(
    job: JobSpec,
    params: list[nn.Parameter],
    values: list[tuple[float, float]],
    scale: LossScale,
) -> tuple[float, float]:
    """Makes sums over several micro-batches means; (Σ mean · weight, Σ weight)."""
    weight = sum(each for _, each in values)
    if job.window.must_divide and len(values) > 1 and weight:
        for param in params:
            if param.grad is not None:
                param.grad = param.grad / weight
    scale.unscale(params)
    return sum(each for each, _ in values), weight


def is_skipped(job: JobSpec, loss: float, params: list[nn.Parameter], scale: LossScale) -> bool:
    """Whether the job leaves a step with such a loss and such gradients out."""
    grads = [param.grad for param in params if param.grad is not None]
    has_loss = math.isfinite(loss)
    if has_loss and all(bool(grad.isfinite().all()) for grad in grads):
        scale.keep()
        return False
    return scale.absorbs("gradient" if has_loss else "loss") or job.window.may_skip


def _mean_of(name: str, updates: list[Update], numerics: int) -> Tensor:
    """Σ n·w / Σ n as float64, in order of client, or what the only client says (under 1 not to the
    bit, in float64); integers from the client of this round with most rows."""
    first = updates[0].state[name]
    if not first.is_floating_point():
        on_time = [each for each in updates if not each.staleness]
        return max(on_time, key=lambda each: each.weight).state[name]
    if numerics >= 2 and len(updates) == 1:
        return first.double()
    total = torch.zeros(first.shape, dtype=torch.float64)
    for each in updates:
        total += each.state[name].double() * each.weight
    return total / math.fsum(each.weight for each in updates)


Take = Callable[..., tuple[Any, Any]]
"""`read` of the job's training rows."""


def _setup(
    job: JobSpec, entrypoints: EntryPoints
) -> tuple[nn.Module, Objective, list[nn.Parameter], Take, ModelExecution, KeyedRandomness, Hooks]:
    data = load_data(job, entrypoints, DataSources())["train"]
    hooks = Hooks(job, entrypoints)
    model = hooks.build(build_model(job, entrypoints, device=_CPU, fresh=True))
    gather = Gather(rows_dtype(job, model), _CPU)
    params = [param for param in model.parameters() if param.requires_grad]
    loss_fn = objective_of(job, entrypoints)
    randomness = KeyedRandomness(model, _CPU)
    execution = prepare(model, plainly(job), _CPU, randomness)
    rows = PlainStreams(job, data) if isinstance(data, StreamDataset) else data
    take = partial(read, gather, rows)
    return model, loss_fn, params, take, execution, randomness, hooks


def _total_steps(job: JobSpec, num_rows: int) -> int:
    return job.steps or (job.epochs or 0) * -(-num_rows // job.batch_size)


def _buffers(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_buffers()}


def wide(grad: Tensor) -> Tensor:
    """A gradient as it is summed: 16 bits are too few for that."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def change_of(old: Tensor, new: Tensor, shard: int, num_shards: int) -> Tensor:
    """What a shard adds to the change of a buffer."""
    before, after = old.double(), new.double()
    if old.is_floating_point():
        unequal = torch.where(after == before, 0.0, after - before)  # infinities have none
        return after if num_shards == 1 else unequal
    return after - before if shard == 0 else torch.zeros_like(before)


def add_in_tree(values: list[Tensor]) -> Tensor:
    """The sum in the order that all engines add in; the values stay as they are."""
    partials = {Node(i, i + 1): value.clone() for i, value in enumerate(values)}
    return tree_sum(partials, len(values), torch.add)
