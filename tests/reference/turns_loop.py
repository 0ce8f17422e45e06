"""Several optimizers that take turns, in one process: each turn is a whole step over shards."""

import torch
from torch import Tensor, nn

from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.numerics.shards import split_rows
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.engine.apply_step import learning_rate_factor, set_learning_rates
from stratagem.worker.engine.optimizers import clip, make_optimizer
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.model import prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.loops import Result, add_in_tree, change_of, cut_rows, is_skipped
from tests.reference.objective import step_of
from tests.reference.reference_norm import gradient_norm
from tests.reference.row_batches import epoch_batches, read


def turns_loop(job: JobSpec, entrypoints: EntryPoints, num_shards: int, num_steps: int) -> Result:
    """The losses are the sums of those of the turns; `logged` has each turn's."""
    device = torch.device("cpu")
    data = load_data(job, entrypoints, DataSources())["train"]
    model = build_model(job, entrypoints, device=device, fresh=True)
    gather = Gather(rows_dtype(job, model), device)
    randomness = KeyedRandomness(model, device)
    execution = prepare(model, job, device, randomness)
    buffers = list(model.buffers())
    turns = []
    for spec in job.turns or ():
        own = [(name, param) for name, param in model.named_parameters() if spec.holds(name)]
        turns.append((spec, own, make_optimizer(spec.optimizer, own)))
    losses: list[float] = []
    logged: list[dict[str, tuple[float, float]]] = []
    steps_per_epoch = len(epoch_batches(job, entrypoints, data, 0))
    total_steps = job.steps or (job.epochs or 0) * steps_per_epoch
    for step in range(num_steps):
        epoch, position = divmod(step, steps_per_epoch)
        batch = epoch_batches(job, entrypoints, data, epoch)[position]
        execution.begin_batch(len(batch))
        logged.append({})
        for number, (spec, own, optimizer) in enumerate(turns):
            objective = step_of(entrypoints.resolve(spec.step))
            params = [param for _, param in own]
            _train_only(model, params)
            before = [tensor.clone() for tensor in buffers]
            shards = [batch[s.start : s.stop] for s in split_rows(len(batch), num_shards) if s]
            parts: list[list[Tensor]] = []
            for shard, shard_rows in enumerate(shards):
                for tensor, old in zip(buffers, before, strict=True):
                    tensor.copy_(old)
                model.zero_grad()
                sums = torch.zeros(2, dtype=torch.float64)
                for micro_batch, rows in enumerate(cut_rows(job, shard_rows)):
                    key = (job.seed, step, number, shard, micro_batch)
                    x, y = read(gather, data, rows, (job.seed, "row", epoch), key, randomness)
                    value = objective(model, x, y, len(rows))
                    execution.scale.up(value.mean * value.weight).backward()
                    sums[0] += value.weight
                    sums[1] += value.mean.detach().double() * value.weight
                grads = [param.grad.clone() for param in params if param.grad is not None]
                pairs = zip(before, buffers, strict=True)
                changes = [change_of(old, new, shard, len(shards)) for old, new in pairs]
                parts.append([sums, *grads, *changes])
            total, *others = [add_in_tree(list(each)) for each in zip(*parts, strict=True)]
            for param, grad in zip(params, others, strict=False):
                param.grad = grad / (total[0].item() * execution.scale.value)
            loss = (total[1] / total[0]).item()
            if is_skipped(job, loss, params, execution.scale):
                for tensor, old in zip(buffers, before, strict=True):
                    tensor.copy_(old)
                continue
            for tensor, old, change in zip(buffers, before, others[len(params) :], strict=True):
                is_whole = len(shards) == 1 and old.is_floating_point()
                mean = change / len(shards) if old.is_floating_point() else change
                tensor.copy_(change if is_whole else old.double() + mean)
            set_learning_rates(optimizer, learning_rate_factor(spec.optimizer, step, total_steps))
            clip(params, spec.optimizer.clip_norm, gradient_norm(params, CURRENT))
            optimizer.step()
            rows_of_step = float(len(batch))
            logged[-1][f"loss.{spec.name}"] = (loss * rows_of_step, rows_of_step)
        losses.append(sum(pair[0] / pair[1] for pair in logged[-1].values()))
    return Result(model.state_dict(), losses, logged=logged)


def _train_only(model: nn.Module, params: list[nn.Parameter]) -> None:
    own = {id(param) for param in params}
    for param in model.parameters():
        param.requires_grad_(id(param) in own)
