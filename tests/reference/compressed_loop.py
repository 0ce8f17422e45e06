"""What "correct" means with a codec: the sharded loop, each shard's gradient coded and decoded.

For models without buffers. Shares model, data, loss, optimizer, keyed randomness and the codecs,
which define their bits, with the engine; none of its stepping, exchange or state.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from stratagem.common.compression import (
    Codec,
    NonFiniteError,
    State,
    TensorLayout,
    derive,
    make_codec,
)
from stratagem.common.compression.codec import RESIDUAL
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.numerics.shards import Node, split_rows, tree_sum
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.engine.optimizers import clip, make_optimizer
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.model import prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.decoded_update import is_coded
from tests.reference.loops import Result, cut_rows, is_skipped
from tests.reference.objective import objective_of
from tests.reference.plain_job import plainly
from tests.reference.rates import Rates
from tests.reference.reference_norm import gradient_norm
from tests.reference.row_batches import read

_CPU = torch.device("cpu")


def compressed_loop(
    job: JobSpec,
    entrypoints: EntryPoints,
    num_shards: int,
    num_steps: int | None = None,
    numerics: int = CURRENT,
) -> Result:
    """Each shard keeps the state of its codec; decoded shards are added in the fixed tree."""
    assert job.compression is not None
    data = load_data(job, entrypoints, DataSources())["train"]
    model = build_model(job, entrypoints, device=_CPU, fresh=True)
    gather, loss_fn = Gather(rows_dtype(job, model), _CPU), objective_of(job, entrypoints)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layout = tuple(TensorLayout(name, tuple(p.shape)) for name, p in named.items())
    codec = make_codec(job.compression, layout, job.seed, numerics=numerics)
    seed = job.seed if job.compression.seed is None else job.compression.seed
    states: dict[int, State] = {shard: codec.initial_state() for shard in range(num_shards)}
    optimizer = make_optimizer(
        job.optimizer, named.items(), fused=job.execution.fusion, entrypoints=entrypoints
    )
    randomness = KeyedRandomness(model, _CPU)
    execution = prepare(model, plainly(job), _CPU, randomness)
    scale = execution.scale
    codes_means = numerics >= 2 and is_coded(job)
    steps_per_epoch = -(-len(data) // job.batch_size)
    total_steps = job.steps or (job.epochs or 0) * steps_per_epoch
    rates = Rates(job, optimizer, total_steps, entrypoints)
    losses: list[float] = []
    for step in range(total_steps if num_steps is None else num_steps):
        epoch, position = divmod(step, steps_per_epoch)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(job.seed + epoch))
        batch = torch.split(order, job.batch_size)[position]
        execution.begin_batch(len(batch))
        grads: dict[Node, dict[str, Tensor]] = {}
        after: dict[int, State] = {}
        weight, loss_sum = [], []
        for shard, rows in enumerate(split_rows(len(batch), num_shards)):
            if not rows:
                continue
            model.zero_grad()
            found = torch.zeros(2, dtype=torch.float64)  # weight, sum of the loss
            for micro_batch, part in enumerate(cut_rows(job, batch[rows.start : rows.stop])):
                place = (job.seed, step, shard, micro_batch)
                x, y = read(gather, data, part, (job.seed, "row", epoch), place, randomness)
                value = loss_fn(model, x, y, len(part))
                scale.up(value.mean * value.weight).backward()
                found[0] += value.weight
                found[1] += value.mean.detach().double() * value.weight
            weight.append(found[0])
            loss_sum.append(found[1])
            key = derive(seed, step + 1, shard)
            own = found[0].item() if codes_means and found[0] > 0 else 1.0
            grads[Node(shard, shard + 1)], after[shard] = _coded(
                codec, named, states[shard], key, own
            )
        total = tree_sum(dict(zip(grads, weight, strict=True)), len(grads), torch.add)
        loss = tree_sum(dict(zip(grads, loss_sum, strict=True)), len(grads), torch.add)
        for name, param in named.items():
            leaves = {node: each[name] for node, each in grads.items()}
            divisor = total.item() if job.window.must_divide else 1.0
            param.grad = tree_sum(leaves, len(leaves), torch.add) / (divisor * scale.value)
        losses.append((loss / total).item())
        before = scale.value
        is_left_out = is_skipped(job, losses[-1], list(named.values()), scale)
        if not is_left_out:
            states |= after
        if scale.value != before:  # residuals are as large as gradients
            states = {shard: _times(scale.value / before, state) for shard, state in states.items()}
        if is_left_out:
            continue
        rates.before(step)
        params = list(named.values())
        clip(params, job.optimizer.clip_norm, gradient_norm(params, numerics))
        optimizer.step()
        rates.after()
    return Result(model.state_dict(), losses)


def _coded(
    codec: Codec, named: Mapping[str, nn.Parameter], state: State, key: int, weight: float
) -> tuple[dict[str, Tensor], State]:
    """decode(encode(gradients / weight)) · weight, by name, and the codec's next state. Gradients
    that are not finite stay as they are."""
    flat = [
        (torch.zeros_like(p) if p.grad is None else p.grad / weight).reshape(-1).numpy()
        for p in named.values()
    ]
    try:
        payload, after = codec.encode(flat, state, key)
    except NonFiniteError:
        return {
            name: torch.from_numpy(x.copy()).view(named[name].shape)
            for name, x in zip(named, flat, strict=True)
        }, state
    decoded = codec.decode(payload, key)
    return {
        name: torch.from_numpy(values).view(param.shape) * weight
        for (name, param), values in zip(named.items(), decoded, strict=True)
    }, after


def _times(factor: float, state: State) -> State:
    """A basis says directions only."""
    return {
        name: values * np.float32(factor) if name.startswith(RESIDUAL) else values
        for name, values in state.items()
    }
